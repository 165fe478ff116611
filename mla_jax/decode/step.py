"""One decode step, and one step of prefill, as pure functions that never read the device.

Both run some of a state's N slots: `slots` int32 `[b]` names them, and N in place of a slot is padding. So the model
computes b rows, whatever N is, and one executable per b (a bucket) serves every set of slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mla_jax.config import MLAConfig
from mla_jax.decode.sampling import sample
from mla_jax.decode.state import DecodeState, Status
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import decode, lm_logits, prefill
from mla_jax.speculative.draft import prefill_draft_layer
from mla_jax.speculative.window import window_after_prefill


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """What a step tells the host of its b rows.

    Attributes:
        tokens: int32 `[b, K]`, the new tokens of each row in order, −1 where there is none. K is the number of steps,
            times the tokens that one can emit with speculation.
        status: int32 `[b]`, of each row's slot afterwards; `Status.EMPTY` for padding.
        pages: pages in use by all slots, at the most.
    """

    tokens: Int[Array, "b K"]
    status: Int[Array, "b"]
    pages: Int[Array, ""]


@partial(
    jax.jit,
    static_argnames=("config", "greedy", "implementation", "fp8_queries", "steps"),
    donate_argnames=("state",),
)
def decode_step(
    params: ModelParams,
    state: DecodeState,
    slots: Int[Array, "b"],
    *,
    config: MLAConfig,
    greedy: bool = False,
    implementation: str | Sequence[str] | None = None,
    fp8_queries: bool = False,
    steps: int = 1,
) -> tuple[DecodeState, Emitted]:
    """Feeds the last token of each running slot among `slots` and emits its next, `steps` times.

    Rows whose slot does not run are padding: they point at the reserved page 0 with length 1 and change nothing. A
    slot that gets no page ends with `Status.PAGES`. A slot that ends, for whatever reason, gives its pages back at
    once, so that others can grow into them. Lengths, pages and tokens stay on the device.

    Args:
        slots: int32 `[b]`, different slots, or N for padding.
        greedy: no slot among them samples, see `sample`.
        implementation, fp8_queries: static; as for `decode`.
        steps: static; more than one run in a loop on the device, which the host visits once.
    """
    return repeat(lambda s: _decode_once(params, s, slots, config, greedy, implementation, fp8_queries), state, steps)


def repeat(
    once: Callable[[DecodeState], tuple[DecodeState, Emitted]], state: DecodeState, steps: int
) -> tuple[DecodeState, Emitted]:
    """Runs a step several times in one loop on the device."""
    if steps == 1:
        return once(state)
    state, each = jax.lax.scan(lambda s, _: once(s), state, length=steps)
    tokens = jnp.moveaxis(each.tokens, 0, 1).reshape(each.tokens.shape[1], -1)
    return state, Emitted(tokens, each.status[-1], jnp.max(each.pages))


def _decode_once(
    params: ModelParams,
    state: DecodeState,
    slots: Int[Array, "b"],
    config: MLAConfig,
    greedy: bool,
    implementation: str | Sequence[str] | None,
    fp8_queries: bool,
) -> tuple[DecodeState, Emitted]:
    running = is_running(state, slots)
    pool, ok = state.pool.extend(state.pool.kv_lens + on_slots(state, slots, running))
    live = running & rows_of(ok, slots)
    hidden, cache = decode(
        params,
        config,
        rows_of(state.last_tokens, slots)[:, None],
        jnp.where(live, rows_of(pool.kv_lens, slots), 1),
        jnp.where(live[:, None], rows_of(pool.block_table, slots), 0),
        state.cache,
        implementation=implementation,
        fp8_queries=fp8_queries,
    )
    logits = lm_logits(params, hidden[:, 0])
    keys = jax.vmap(jax.random.fold_in)(rows_of(state.keys, slots), rows_of(pool.kv_lens, slots))
    tokens = sample(logits, keys, jax.tree.map(lambda x: rows_of(x, slots), state.sampling), greedy=greedy)
    stopped = jnp.any(tokens[:, None] == rows_of(state.stops, slots), axis=1)
    after = replace(state, pool=pool, cache=cache)
    return finish_step(after, slots, running, jnp.where(live, tokens, -1)[:, None], stopped, pool.num_live)


def finish_step(
    state: DecodeState,
    slots: Int[Array, "b"],
    running: Bool[Array, "b"],
    tokens: Int[Array, "b K"],
    stopped: Bool[Array, "b"],
    pages: Int[Array, ""],
) -> tuple[DecodeState, Emitted]:
    """What follows from a step's new tokens: who goes on with which, and who ends and gives its pages back.

    Args:
        state: with the pool and cache that the step leaves.
        running: rows that ran before it. Those without a new token got no page and end.
        tokens: new tokens, −1 behind the last; at most as many as remain.
        stopped: rows whose last new token ends them.
        pages: that were in use.
    """
    count = jnp.sum(tokens >= 0, axis=1, dtype=jnp.int32)
    live = count > 0
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    remaining = rows_of(state.remaining, slots) - count
    status = jnp.where(running & ~live, Status.PAGES, rows_of(state.status, slots))
    status = jnp.where(live & (remaining == 0), Status.LENGTH, status)
    status = jnp.where(live & stopped, Status.STOP, status).astype(jnp.int32)
    ended = on_slots(state, slots, running & (status != Status.RUNNING)) > 0
    after = replace(
        state,
        pool=state.pool.release(ended),
        remaining=put_rows(state.remaining, slots, remaining),
        status=put_rows(state.status, slots, status),
        last_tokens=put_rows(state.last_tokens, slots, jnp.where(live, last, rows_of(state.last_tokens, slots))),
    )
    status = jnp.where(slots < state.status.shape[0], status, Status.EMPTY).astype(jnp.int32)
    return after, Emitted(tokens, status, pages)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("state",))
def prefill_step(
    params: ModelParams,
    state: DecodeState,
    slots: Int[Array, "b"],
    tokens: Int[Array, "b S"],
    counts: Int[Array, "b"],
    prefix_lens: Int[Array, "b"],
    next_tokens: Int[Array, "b S"] | None = None,
    *,
    config: MLAConfig,
) -> DecodeState:
    """Leaves the latents of the next counts[i] prompt tokens of each slot in the cache; see `prefill`.

    A slot whose prompt is then all in the cache runs. Slots that are not being prefilled are padding.

    Args:
        next_tokens: of a state that drafts, and only there: the token behind each in the prompt. The draft layer gets
            its latents too, and the state's window the last of them.
    """
    waiting = (slots < state.status.shape[0]) & (rows_of(state.status, slots) == Status.PREFILL)
    counts = jnp.where(waiting, counts, 0)
    table = jnp.where(waiting[:, None], rows_of(state.pool.block_table, slots), 0)
    prefix_lens = jnp.where(waiting, prefix_lens, 0)
    hidden, cache = prefill(params, config, tokens, counts, prefix_lens, table, state.cache)
    window = state.mtp
    if window is not None:
        assert next_tokens is not None
        cache = prefill_draft_layer(params, config, hidden, next_tokens, counts, prefix_lens, table, cache)
        rows = window_after_prefill(jax.tree.map(lambda x: rows_of(x, slots), window), hidden, next_tokens, counts)
        window = jax.tree.map(lambda x, new: put_rows(x, slots, new), window, rows)
    complete = waiting & (prefix_lens + counts >= rows_of(state.pool.kv_lens, slots))
    status = jnp.where(complete, Status.RUNNING, rows_of(state.status, slots)).astype(jnp.int32)
    return replace(state, cache=cache, status=put_rows(state.status, slots, status), mtp=window)


def is_running(state: DecodeState, slots: Int[Array, "b"]) -> Bool[Array, "b"]:
    """Which rows of a step have a running slot."""
    return (slots < state.status.shape[0]) & (rows_of(state.status, slots) == Status.RUNNING)


def rows_of(values: Array, slots: Int[Array, "b"]) -> Array:
    """Rows of a `[N, …]` array for the rows of a step; those of padding mean nothing."""
    return values.at[slots].get(mode="clip")


def put_rows(values: Array, slots: Int[Array, "b"], rows: Array) -> Array:
    """The `[N, …]` array with the rows of a step put back; those of padding are dropped."""
    return values.at[slots].set(rows, mode="drop")


def on_slots(state: DecodeState, slots: Int[Array, "b"], values: Array) -> Int[Array, "N"]:
    """One int32 per slot: the values of a step's rows, 0 for other slots."""
    return put_rows(jnp.zeros_like(state.status), slots, values.astype(jnp.int32))
