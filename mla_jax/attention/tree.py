"""Attention of the nodes of a token tree in two parts: the prefix, which all nodes see, and the tree's own rows.

The parts are merged by their log-sum-exp, so any kernel that can attend to a prefix serves trees, even one without a
mask: `without_mask` makes a whole implementation of `mla_decode` of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mla_jax.attention.merge import merge_states
from mla_jax.attention.operands import HIGHEST, as_numbers

Decode = Callable[..., tuple[jax.Array, jax.Array]]


def add_nodes(
    prefix: tuple[Float[Array, "B S H V"], Float[Array, "B H S"]],
    q: Float[Array, "B S H D"],
    rows: Float[Array, "B R D"],
    seen: Bool[Array, "B S R"],
    *,
    logit_scale: float | Float[Array, ""],
    value_scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """Attention over a prefix, and over R rows of a tree beside it.

    Args:
        prefix: out and lse of the queries over the prefix, not causal, as `mla_decode` returns them.
        q: the queries.
        rows: latents, as the queries shall see them. Those that no query sees may hold NaN.
        seen: True where query s sees row r.
        logit_scale: factor of q · row, a scale of the rows in it.
        value_scale: factor of the rows as values.

    Returns:
        out in the dtype of the prefix's and lse. A query that sees nothing has out 0 and lse −inf.

    Cost: B·H·S·R float32 for the scores. Meant for the few tens of rows of a draft, not for a context.
    """
    d_v = prefix[0].shape[-1]
    rows = jnp.where(jnp.any(seen, axis=1)[..., None], rows, 0).astype(jnp.float32)  # 0 · NaN is NaN
    scores = jnp.einsum("bshd,brd->bhsr", q.astype(jnp.float32), rows, precision=HIGHEST)
    scores = jnp.where(seen[:, None], scores * jnp.asarray(logit_scale, jnp.float32), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    out = jnp.einsum("bhsr,brv->bshv", weights, rows[..., :d_v], precision=HIGHEST)
    out = out if value_scale is None else out * value_scale
    merged, merged_lse = merge_states([prefix[0].astype(jnp.float32), out], [prefix[1], lse])
    return merged.astype(prefix[0].dtype), merged_lse


def without_mask(decode: Decode) -> Decode:
    """An implementation of `mla_decode` that takes a tree_mask, from one that does not.

    Without a mask the call is passed on. With one, `decode` gets the prefix of each request, not causal, and the last
    S rows are read back from the cache, as it holds them, for a product in plain XLA.
    """

    def masked(
        q: Float[Array, "B S H D"],
        kv_cache: Shaped[Array, "P T W"],
        block_table: Int[Array, "B M"],
        kv_lens: Int[Array, "B"],
        *,
        tree_mask: Bool[Array, "B S S"] | None,
        causal: bool,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array]:
        if tree_mask is None:
            return decode(q, kv_cache, block_table, kv_lens, causal=causal, tree_mask=None, **options)
        if "schedule" in options:
            options["schedule"] = None  # it was made for kv_lens
        prefix_lens = jnp.maximum(kv_lens, q.shape[1]) - q.shape[1]  # no lengths below 0, which might wrap around
        prefix = decode(q, kv_cache, block_table, prefix_lens, causal=False, tree_mask=None, **options)
        rows, exists = _last_rows(kv_cache, block_table, kv_lens, q.shape[1])
        scales = {name: options[name] for name in ("logit_scale", "value_scale")}
        return add_nodes(prefix, q, rows, tree_mask & exists[:, None], **scales)

    return masked


def _last_rows(
    kv_cache: Shaped[Array, "P T W"], block_table: Int[Array, "B M"], kv_lens: Int[Array, "B"], count: int
) -> tuple[Float[Array, "B S D"], Bool[Array, "B S"]]:
    """The last rows of each request, float32 without a scale per tensor, and which of them there are."""
    num_pages, page_size, _ = kv_cache.shape
    positions = jnp.maximum(kv_lens, 0)[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
    exists = (positions >= 0) & (positions < block_table.shape[1] * page_size)
    entries = jnp.clip(positions // page_size, 0, block_table.shape[1] - 1)
    pages = jnp.clip(jnp.take_along_axis(block_table, entries, axis=1), 0, num_pages - 1)
    return as_numbers(kv_cache[pages, positions % page_size], jnp.float32), exists
