"""One decode step, and one step of prefill, as pure functions that never read the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.decode.sampling import Sampling, sample
from mla_jax.decode.state import DecodeState, Status
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import decode, lm_logits, prefill


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Emitted:
    """What a step tells the host: int32 `[N]` tokens, −1 where none came, each slot's status after it, pages in use."""

    tokens: Int[Array, "N"]
    status: Int[Array, "N"]
    pages: Int[Array, ""]


@partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames=("state",))
def decode_step(
    params: ModelParams,
    state: DecodeState,
    sampling: Sampling,
    stops: Bool[Array, "vocab"],
    *,
    config: MLAConfig,
    implementation: str | Sequence[str] | None = None,
) -> tuple[DecodeState, Emitted]:
    """Feeds each running slot's last token and emits its next.

    Slots that do not run are padding: they point at the reserved page 0 with length 1 and change nothing. A slot
    that gets no page ends with `Status.PAGES`. A slot that ends, for whatever reason, gives its pages back at once,
    so that others can grow into them. Lengths, pages and tokens stay on the device.
    """
    running = state.status == Status.RUNNING
    pool, ok = state.pool.extend(state.pool.kv_lens + running.astype(jnp.int32))
    live = running & ok
    hidden, cache = decode(
        params,
        config,
        state.last_tokens[:, None],
        jnp.where(live, pool.kv_lens, 1),
        jnp.where(live[:, None], pool.block_table, 0),
        state.cache,
        implementation=implementation,
    )
    keys = jax.vmap(jax.random.fold_in)(state.keys, pool.kv_lens)
    tokens = sample(lm_logits(params, hidden[:, 0]), keys, sampling)
    remaining = state.remaining - live.astype(jnp.int32)
    status = jnp.where(running & ~ok, Status.PAGES, state.status)
    status = jnp.where(live & (remaining == 0), Status.LENGTH, status)
    status = jnp.where(live & stops[tokens], Status.STOP, status).astype(jnp.int32)
    state = replace(
        state,
        pool=pool.release(running & (status != Status.RUNNING)),
        cache=cache,
        remaining=remaining,
        status=status,
        last_tokens=jnp.where(live, tokens, state.last_tokens),
    )
    return state, Emitted(jnp.where(live, tokens, -1), status, pool.num_live)


@partial(jax.jit, static_argnames=("config",), donate_argnames=("cache",))
def prefill_step(
    params: ModelParams,
    cache: PagedKVCache,
    tokens: Int[Array, "N S"],
    counts: Int[Array, "N"],
    prefix_lens: Int[Array, "N"],
    block_table: Int[Array, "N M"],
    *,
    config: MLAConfig,
) -> PagedKVCache:
    """Leaves the latents of the next counts[n] prompt tokens of each slot in the cache; see `prefill`."""
    return prefill(params, config, tokens, counts, prefix_lens, block_table, cache)[1]
