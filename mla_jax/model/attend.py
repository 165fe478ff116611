"""Ways for a layer to attend: over its own tokens, in chunks over a paged cache, decoding from it, or as a draft tree.

Each is a function (layer index, weights, query, latents, cache) → (value heads, cache), so that the decoder is
written once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.attention.api import implementation_for, mla_decode, step_schedule
from mla_jax.attention.merge import merge_states
from mla_jax.attention.queries import quantize_queries
from mla_jax.attention.tree import add_nodes
from mla_jax.cache.formats import PAGE_SIZE, kv_format
from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.model.mla import absorb_query, expand_output, plain_attention
from mla_jax.model.params import AttentionParams
from mla_jax.schedule import TileSchedule

Query = tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]]
Latents = Float[Array, "B S D"]
Cache = PagedKVCache | None
Attend = Callable[[int, AttentionParams, Query, Latents, Any], tuple[Float[Array, "B S H W"], Any]]

PREFIX_CHUNK = 512  # tokens of the prefix that are expanded to keys and values at a time


def attend_self(config: MLAConfig) -> Attend:
    """Causal attention of a sequence over itself, without a cache."""

    def attend(layer: int, p: AttentionParams, query: Query, latents: Latents, cache: Any) -> tuple[jax.Array, Any]:
        return plain_attention(p, config, query, latents, _causal(latents))[0], cache

    return attend


def attend_decode(
    config: MLAConfig,
    block_table: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    positions: Int[Array, "B S"],
    valid: Bool[Array, "B S"] | None = None,
    *,
    tree_mask: Bool[Array, "B S S"] | None = None,
    schedule: Any = None,
    implementation: str | Sequence[str] | None = None,
    fp8_queries: bool = False,
) -> Attend:
    """Writes the S new latents, then `mla_decode` in the absorbed form. kv_lens counts the new tokens."""

    def attend(
        layer: int, p: AttentionParams, query: Query, latents: Latents, cache: PagedKVCache
    ) -> tuple[jax.Array, PagedKVCache]:
        cache = cache.write(layer, block_table, positions, latents, valid)
        q = absorb_query(*query, p.w_uk)
        how = {"tree_mask": tree_mask, "schedule": schedule, "implementation": implementation}
        out, _ = _decode_layer(config, q, cache, layer, block_table, kv_lens, fp8_queries, **how)
        return expand_output(out, p.w_uv), cache

    return attend


def attend_tree(
    config: MLAConfig,
    block_table: Int[Array, "B M"],
    prefix_lens: Int[Array, "B"],
    seen: Bool[Array, "B S R"],
    *,
    schedule: Any = None,
    implementation: str | Sequence[str] | None = None,
    fp8_queries: bool = False,
) -> Attend:
    """S nodes of a tree whose rows stay out of the paged cache: over the prefix there, and the rows that each sees.

    What such a layer gets and returns as its cache is a pair: the `PagedKVCache`, which it leaves as it is, and the
    rows of the tree. It gets the `[B, R − S, D]` of earlier nodes and appends those of its own.
    """

    def attend(
        layer: int, p: AttentionParams, query: Query, latents: Latents, cache: tuple[PagedKVCache, jax.Array]
    ) -> tuple[jax.Array, tuple[PagedKVCache, jax.Array]]:
        paged, earlier = cache
        rows = jnp.concatenate([earlier, latents], axis=1)
        q = absorb_query(*query, p.w_uk)
        how = {"causal": False, "schedule": schedule, "implementation": implementation}
        prefix = _decode_layer(config, q, paged, layer, block_table, prefix_lens, fp8_queries, **how)
        out, _ = add_nodes(prefix, q, rows, seen, logit_scale=config.sm_scale)
        return expand_output(out, p.w_uv), (paged, rows)

    return attend


def _decode_layer(
    config: MLAConfig,
    q: Float[Array, "B S H D"],
    cache: PagedKVCache,
    layer: int,
    block_table: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    fp8_queries: bool,
    **how: Any,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """`mla_decode` over a layer of the cache, in q's dtype, with q rounded to e4m3 row by row where wanted.

    The output of e4m3 queries has been bf16 on its way, whatever q's dtype is.
    """
    check_fp8_queries(fp8_queries, cache.format.name)
    given, q_scale = quantize_queries(q) if fp8_queries else (q, None)
    out, lse = mla_decode(
        given,
        cache.layers[layer],
        block_table,
        kv_lens,
        d_v=config.kv_lora_rank,
        sm_scale=config.sm_scale,
        q_scale=q_scale,
        kv_scale=cache.scale(layer),
        **how,
    )
    return out.astype(q.dtype), lse


def attend_prefill(
    config: MLAConfig,
    block_table: Int[Array, "B M"],
    prefix_lens: Int[Array, "B"],
    positions: Int[Array, "B S"],
    valid: Bool[Array, "B S"],
) -> Attend:
    """Writes a chunk of S prompt tokens and attends in the plain form: chunk over itself, merged with the prefix.

    The chunk reads its own latents back from the cache too, so that chunk borders change nothing, whatever the
    format rounds away.
    """

    def attend(
        layer: int, p: AttentionParams, query: Query, latents: Latents, cache: PagedKVCache
    ) -> tuple[jax.Array, PagedKVCache]:
        cache = cache.write(layer, block_table, positions, latents, valid)
        stored = jnp.where(valid[..., None], cache.gather(layer, block_table, positions, latents.dtype), 0)
        own = plain_attention(p, config, query, stored, _causal(latents))
        prefix = _attend_prefix(layer, p, config, query, cache, block_table, prefix_lens)
        out, _ = merge_states([own[0].astype(jnp.float32), prefix[0]], [own[1], prefix[1]])
        return out.astype(latents.dtype), cache

    return attend


def _attend_prefix(
    layer: int,
    p: AttentionParams,
    config: MLAConfig,
    query: Query,
    cache: PagedKVCache,
    block_table: Int[Array, "B M"],
    prefix_lens: Int[Array, "B"],
) -> tuple[Float[Array, "B S H W"], Float[Array, "B H S"]]:
    """Attention over what lies in the cache before the chunk, PREFIX_CHUNK tokens at a time."""
    num_requests, num_queries, num_heads, _ = query[0].shape

    def step(chunk: Int[Array, ""], state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = chunk * PREFIX_CHUNK + jnp.arange(PREFIX_CHUNK, dtype=jnp.int32)[None]
        exists = at < prefix_lens[:, None]
        positions = jnp.broadcast_to(at, exists.shape)
        latents = cache.gather(layer, block_table, positions, query[0].dtype)
        latents = jnp.where(exists[..., None], latents, 0)  # rows that nobody owns may hold NaN
        seen = jnp.broadcast_to(exists[:, None], (num_requests, num_queries, PREFIX_CHUNK))
        out, lse = plain_attention(p, config, query, latents, seen)
        return merge_states([state[0], out.astype(jnp.float32)], [state[1], lse])

    nothing = (
        jnp.zeros((num_requests, num_queries, num_heads, config.v_head_dim), jnp.float32),
        jnp.full((num_requests, num_heads, num_queries), -jnp.inf, jnp.float32),
    )
    num_chunks = (jnp.max(prefix_lens) + PREFIX_CHUNK - 1) // PREFIX_CHUNK
    return jax.lax.fori_loop(0, num_chunks, step, nothing)


def _causal(latents: Latents) -> Bool[Array, "B S S"]:
    num_requests, num_tokens, _ = latents.shape
    return jnp.broadcast_to(jnp.tri(num_tokens, dtype=bool), (num_requests, num_tokens, num_tokens))


def check_fp8_queries(fp8_queries: Any, kv_format_name: str) -> None:
    """Raises ValueError if it is no bool, or if queries are to be in e4m3 and the cache, by name or alias, is not."""
    if not isinstance(fp8_queries, bool):
        raise InputError(f"fp8_queries must be True or False and not traced, got {type(fp8_queries).__name__}.")
    if fp8_queries and (found := kv_format(kv_format_name).name) != "fp8_e4m3":
        raise InputError(f"FP8 queries need a cache in fp8_e4m3 (--kv-format, kv_format), got {found}.")


def attention_implementation(
    config: MLAConfig,
    dtype: Any,
    kv_format_name: str,
    wanted: str | Sequence[str] | None,
    *,
    fp8_queries: bool = False,
) -> str:
    """The implementation of `mla_decode` that a model of this dtype and cache format will use here.

    Raises ValueError for FP8 queries with another cache than fp8_e4m3.
    """
    check_fp8_queries(fp8_queries, kv_format_name)
    query = _query_like((1, 1), config, dtype, fp8_queries)
    chosen = kv_format(kv_format_name)
    cache = jax.ShapeDtypeStruct((1, PAGE_SIZE, chosen.row_width(config.latent_dim)), chosen.dtype)
    return implementation_for(wanted, query, cache, row_scales=fp8_queries)


def schedule_for_layers(
    config: MLAConfig,
    tokens: Int[Array, "B S"],
    dtype: Any,
    cache: PagedKVCache,
    kv_lens: Int[Array, "B"],
    implementation: str | Sequence[str] | None,
    *,
    fp8_queries: bool = False,
) -> TileSchedule | None:
    """What all layers of a step share, if the implementation divides its work; dtype is that of the weights.

    Raises ValueError for FP8 queries with another cache than fp8_e4m3.
    """
    check_fp8_queries(fp8_queries, cache.format.name)
    query = _query_like(tokens.shape, config, dtype, fp8_queries)
    layer = jax.ShapeDtypeStruct(cache.layers[0].shape, cache.layers[0].dtype)
    return step_schedule(implementation, query, layer, kv_lens, row_scales=fp8_queries)


def _query_like(shape: tuple[int, ...], config: MLAConfig, dtype: Any, fp8_queries: bool) -> jax.ShapeDtypeStruct:
    """What `mla_decode` gets for tokens `[B, S]`."""
    dtype = jnp.float8_e4m3fn if fp8_queries else dtype
    return jax.ShapeDtypeStruct((*shape, config.num_heads, config.latent_dim), dtype)
