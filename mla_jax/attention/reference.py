"""The specification: gather everything, one dense softmax in float32. Short before fast."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mla_jax.attention.operands import HIGHEST, as_numbers, out_dtype, product_dtype
from mla_jax.attention.visibility import visible


def decode(
    q: Float[Array, "B S H D"],
    kv_cache: Shaped[Array, "P T W"],
    block_table: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    *,
    logit_scale: Float[Array, ""] | Float[Array, "B S H"],
    value_scale: Float[Array, ""] | None,
    d_v: int,
    causal: bool,
    tree_mask: Bool[Array, "B S S"] | None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """softmax(logit_scale · q kᵀ) v · value_scale for checked arguments; see `mla_decode`.

    All in float32. Where products are made in a 16-bit dtype (`product_dtype`) the weights exp(score − maximum) are
    rounded to it before they meet the values, as in every kernel: FlashMLA's output differs from an exact one by more
    than 2⁻⁷ |out| + 1e-3 where values cancel.

    Cost: B·M·T·D float32 for the gathered cache and B·H·S·M·T float32 for the scores.
    """
    num_requests, num_queries, _, d = q.shape
    page_size, width = kv_cache.shape[1], block_table.shape[1]
    pages = jnp.clip(block_table, 0, kv_cache.shape[0] - 1)  # tails of the table hold anything
    dtype = product_dtype(q, kv_cache)
    keys = as_numbers(kv_cache[pages], dtype).reshape(num_requests, width * page_size, d).astype(jnp.float32)
    positions = jnp.arange(width * page_size, dtype=jnp.int32)
    # Rows that nobody owns may hold NaN, and 0 · NaN is NaN.
    keys = jnp.where((positions[None] < kv_lens[:, None])[..., None], keys, 0)

    scores = jnp.einsum("bshd,btd->bhst", q.astype(jnp.float32), keys, precision=HIGHEST)
    scores *= logit_scale if logit_scale.ndim == 0 else logit_scale.transpose(0, 2, 1)[..., None]
    seen = visible(positions, kv_lens, num_queries, causal, tree_mask)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    maximum = jnp.max(scores, axis=-1, keepdims=True)
    maximum = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1)  # [B, H, S], 0 for a row that sees nothing
    rounded = weights.astype(dtype).astype(jnp.float32)
    out = jnp.einsum("bhst,btv->bshv", rounded, keys[..., :d_v], precision=HIGHEST)
    out = out / jnp.where(total == 0, 1, total).transpose(0, 2, 1)[..., None]
    out = out if value_scale is None else out * value_scale
    return out.astype(out_dtype(q)), maximum[..., 0] + jnp.log(total)
