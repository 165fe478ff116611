"""The decode step with speculation: draft, verify, accept and roll back, in one jitted function."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.decode.sampling import Sampling, probabilities, sample
from mla_jax.decode.state import DecodeState
from mla_jax.decode.step import Emitted, finish_step, is_running, on_slots, put_rows, repeat, rows_of
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import lm_logits
from mla_jax.speculative.accept import Accepted, accept_rejection, accept_walk, cut
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.draft import Drafter, drawing
from mla_jax.speculative.tree import Draft
from mla_jax.speculative.verify import gather_kept, reserve, verify
from mla_jax.speculative.window import MTPWindow, window_after


@partial(
    jax.jit,
    static_argnames=("config", "speculation", "greedy", "implementation", "fp8_queries", "steps"),
    donate_argnames=("state",),
)
def speculative_step(
    params: ModelParams,
    state: DecodeState,
    slots: Int[Array, "b"],
    *,
    config: MLAConfig,
    speculation: Speculation,
    greedy: bool = False,
    implementation: str | Sequence[str] | None = None,
    fp8_queries: bool = False,
    steps: int = 1,
) -> tuple[DecodeState, Emitted]:
    """Drafts tokens for each running slot among `slots`, verifies them in one pass, and emits 1 … A tokens of each;
    all this `steps` times.

    The text is that of `decode_step`, up to rounding where two choices lie close (which e4m3 queries enlarge): greedy
    and target-only sampling (trees) choose the same tokens with the same keys; rejection sampling (chains) draws others
    from the same distribution. A is speculation.most_kept.

    Pages: each slot gets room for as many nodes as the pool and its table allow, one at least, and drafts so much
    less; one that gets none ends with `Status.PAGES`. Behind the step it holds what its kept tokens need. All else is
    as in `decode_step`.

    Args:
        state: with a window of A entries (`MTPWindow.create`) and a cache with the draft layer.
        slots: int32 `[b]`, different slots, or N for padding.
        greedy: no slot among them samples, see `sample`.
        implementation, fp8_queries: as for `decode_step`.
        steps: as for `decode_step`; `Emitted.tokens` has A columns for each.
    """
    return repeat(
        lambda s: _speculate_once(params, s, slots, config, speculation, greedy, implementation, fp8_queries),
        state,
        steps,
    )


def _speculate_once(
    params: ModelParams,
    state: DecodeState,
    slots: Int[Array, "b"],
    config: MLAConfig,
    speculation: Speculation,
    greedy: bool,
    implementation: str | Sequence[str] | None,
    fp8_queries: bool,
) -> tuple[DecodeState, Emitted]:
    assert state.mtp is not None and state.mtp.hidden.shape[1] == speculation.most_kept
    running = is_running(state, slots)
    lens = state.pool.kv_lens
    pool, ok, room = reserve(state.pool, on_slots(state, slots, running) > 0, speculation.draft_tokens)
    live = running & rows_of(ok, slots)
    window = jax.tree.map(lambda x: rows_of(x, slots), state.mtp)
    window = replace(window, count=jnp.where(live, window.count, 0))
    table = jnp.where(live[:, None], rows_of(pool.block_table, slots), 0)
    rows = Drafter(
        params,
        config,
        # Nodes without room may stand past the end of the table, where kernels read it all the same: page 0 too.
        block_table=jnp.pad(table, ((0, 0), (0, -(-speculation.draft_tokens // pool.page_size)))),
        kv_lens=jnp.where(live, rows_of(lens, slots), 1),
        room=jnp.where(live, rows_of(room, slots), 1),
        implementation=implementation,
        fp8_queries=fp8_queries,
    )
    sampling = None if greedy else jax.tree.map(lambda x: rows_of(x, slots), state.sampling)
    keys = _keys(rows_of(state.keys, slots), rows.kv_lens, speculation.most_kept)
    accepted, hidden, cache = _draft_and_verify(
        rows, speculation, window, rows_of(state.last_tokens, slots), state.cache, keys, sampling
    )
    accepted, stopped = cut(accepted, rows_of(state.remaining, slots), rows_of(state.stops, slots))
    if not speculation.is_chain:
        cache = gather_kept(cache, rows.block_table, rows.kv_lens, accepted)

    kept = lens + on_slots(state, slots, jnp.where(live, accepted.count, 0))
    mtp = jax.tree.map(
        lambda x, new: put_rows(x, jnp.where(live, slots, x.shape[0]), new), state.mtp, window_after(accepted, hidden)
    )
    after = replace(state, pool=pool.truncate(kept), cache=cache, mtp=mtp)
    return finish_step(after, slots, running, jnp.where(live[:, None], accepted.tokens, -1), stopped, pool.num_live)


def _draft_and_verify(
    rows: Drafter,
    speculation: Speculation,
    window: MTPWindow,
    root: Int[Array, "b"],
    cache: PagedKVCache,
    keys: Key[Array, "b A"],
    sampling: Sampling | None,
) -> tuple[Accepted, Float[Array, "b J E"], PagedKVCache]:
    """What is accepted, before stop tokens and limits; the model's states behind all nodes; the cache."""
    choose = None
    if sampling is not None and speculation.is_chain:
        choose = drawing(keys, partial(probabilities, sampling=sampling))
    draft, cache = rows.draft(speculation, window, root, cache, choose)
    hidden, cache = verify(
        rows.params,
        rows.config,
        speculation,
        draft,
        rows.kv_lens,
        rows.room,
        rows.block_table,
        cache,
        implementation=rows.implementation,
        fp8_queries=rows.fp8_queries,
    )
    logits = lm_logits(rows.params, hidden)
    room = jnp.where(window.count > 0, rows.room, 1)  # without a window the draft means nothing
    if choose is not None:
        target = probabilities(_flat(logits), _per_node(sampling, logits)).reshape(logits.shape)
        return accept_rejection(draft, target, keys, room), hidden, cache
    return accept_walk(draft, _choices(draft, logits, keys, sampling), room, speculation.most_kept), hidden, cache


def _choices(
    draft: Draft, logits: Float[Array, "b J vocab"], keys: Key[Array, "b A"], sampling: Sampling | None
) -> Int[Array, "b J"]:
    """The model's token behind each node, drawn with the key of its position: what `decode_step` would emit there."""
    flat_keys = jnp.take_along_axis(keys, draft.depths, axis=1).reshape(-1)
    if sampling is None:
        return sample(_flat(logits), flat_keys, Sampling(), greedy=True).reshape(draft.tokens.shape)
    return sample(_flat(logits), flat_keys, _per_node(sampling, logits)).reshape(draft.tokens.shape)


def _flat(logits: Float[Array, "b J vocab"]) -> Float[Array, "b*J vocab"]:
    return logits.reshape(-1, logits.shape[-1])


def _per_node(sampling: Sampling | None, logits: Float[Array, "b J vocab"]) -> Sampling:
    """The numbers of each row for all its nodes."""
    return jax.tree.map(lambda x: jnp.repeat(x, logits.shape[1]), sampling)


def _keys(request_keys: Key[Array, "b"], kv_lens: Int[Array, "b"], count: int) -> Key[Array, "b A"]:
    """Of the positions behind the pending token, as `decode_step` makes them."""
    positions = kv_lens[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)[None]
    return jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(request_keys, positions)
