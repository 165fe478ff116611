"""The specification: gather everything, one dense softmax in float32. Short before fast."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.attention.visibility import visible

HIGHEST = jax.lax.Precision.HIGHEST  # float32 means float32 on a GPU too


def decode(
    q: Float[Array, "B S H D"],
    kv_cache: Float[Array, "P T D"],
    block_table: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    *,
    logit_scale: Float[Array, ""],
    d_v: int,
    causal: bool,
    tree_mask: Bool[Array, "B S S"] | None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """softmax(logit_scale · q kᵀ) v for checked arguments; see `mla_decode`.

    Cost: B·M·T·D float32 for the gathered cache and B·H·S·M·T float32 for the scores.
    """
    num_requests, num_queries, _, d = q.shape
    page_size, width = kv_cache.shape[1], block_table.shape[1]
    pages = jnp.clip(block_table, 0, kv_cache.shape[0] - 1)  # tails of the table hold anything
    keys = kv_cache[pages].reshape(num_requests, width * page_size, d).astype(jnp.float32)
    positions = jnp.arange(width * page_size, dtype=jnp.int32)
    keys = jnp.where((positions[None] < kv_lens[:, None])[..., None], keys, 0)  # unowned rows may hold NaN: 0 · NaN is NaN

    scores = logit_scale * jnp.einsum("bshd,btd->bhst", q.astype(jnp.float32), keys, precision=HIGHEST)
    seen = visible(positions, kv_lens, num_queries, causal, tree_mask)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)  # −inf for a row that sees nothing
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    out = jnp.einsum("bhst,btv->bshv", weights, keys[..., :d_v], precision=HIGHEST)
    return out.astype(q.dtype), lse
