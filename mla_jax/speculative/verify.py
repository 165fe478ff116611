"""The model's own states behind every node of a draft, and what of them is kept."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.config import MLAConfig
from mla_jax.model.attend import attend_decode, schedule_for_layers
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import decode_stack
from mla_jax.speculative.accept import Accepted
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.tree import Draft, ancestors


def verify(
    params: ModelParams,
    config: MLAConfig,
    speculation: Speculation,
    draft: Draft,
    kv_lens: Int[Array, "B"],
    room: Int[Array, "B"],
    block_table: Int[Array, "B M"],
    cache: PagedKVCache,
    *,
    implementation: str | Sequence[str] | None = None,
    fp8_queries: bool = False,
) -> tuple[Float[Array, "B J E"], PagedKVCache]:
    """Runs the model over all J nodes at once; each sees the prefix, its ancestors and itself.

    Node j's latents go to row kv_lens + j, rotated for its position kv_lens + depth. Nodes from room on write to the
    reserved page 0, and their states mean nothing.

    Args:
        kv_lens: int32 `[B]`, tokens in the cache, none of the draft's.
        room: int32 `[B]`, rows behind them for which pages are owned.
        implementation, fp8_queries: as for `decode`.

    Returns:
        States after the final norm, and the cache.
    """
    num_nodes = draft.tokens.shape[1]
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)[None]
    attend = attend_decode(
        config,
        block_table,
        kv_lens + num_nodes,
        kv_lens[:, None] + nodes,
        nodes < room[:, None],
        tree_mask=None if speculation.is_chain else ancestors(draft, speculation.steps),
        schedule=schedule_for_layers(
            config,
            draft.tokens,
            params.embed.dtype,
            cache,
            kv_lens + num_nodes,
            implementation,
            fp8_queries=fp8_queries,
        ),
        implementation=implementation,
        fp8_queries=fp8_queries,
    )
    return decode_stack(params, config, draft.tokens, kv_lens[:, None] + draft.depths, cache, attend)


def reserve(pool: PagePool, active: Bool[Array, "N"], rows: int) -> tuple[PagePool, Bool[Array, "N"], Int[Array, "N"]]:
    """Pages for up to so many more rows of each active sequence.

    First every sequence gets room for one row and what its pages hold anyway; then, from what is left, for all rows.
    So nobody drafts with a page that another needs in order to go on.

    Returns the pool, whose kv_lens count the room, ok `[N]` (False: not even one row) and the room, 1 … rows of those
    that are ok, 0 of the others.
    """
    lens = pool.kv_lens
    owned = ((lens - 1) // pool.page_size + 1) * pool.page_size
    at_least = jnp.clip(owned, lens + 1, lens + rows)
    extended, ok = pool.extend(jnp.where(active, at_least, lens))
    ok &= active
    extended, _ = extended.extend(jnp.where(ok, lens + rows, extended.kv_lens))
    return extended, ok, extended.kv_lens - lens


def gather_kept(
    cache: PagedKVCache, block_table: Int[Array, "B M"], kv_lens: Int[Array, "B"], accepted: Accepted
) -> PagedKVCache:
    """Moves the rows of a tree's kept nodes side by side, to kv_lens, kv_lens + 1, … in all layers."""
    kept = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)[None]
    moves = (kept < accepted.count[:, None]) & (accepted.path != kept)
    return cache.move_rows(block_table, kv_lens[:, None] + accepted.path, kv_lens[:, None] + kept, moves)
