"""`get_mla_metadata` and `flash_mla_with_kvcache`, as people call them in PyTorch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flash_mla_jax import provider as providers
from flash_mla_jax import validate
from flash_mla_jax.call import Spec, run
from flash_mla_jax.in_graph import clamped, matching_schedule, valid_indices
from flash_mla_jax.provider import DENSE_FP8, METADATA, METADATA_FP8, SPARSE, Provider

ROWS = 64  # query rows that one thread block handles


def get_mla_metadata(
    cache_seqlens: jax.Array | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Metadata of the tile scheduler, from FlashMLA's own kernel. Works in and out of `jax.jit`.

    Args:
        cache_seqlens: int32 `[b]`, tokens per request.
        num_q_tokens_per_head_k: s_q · h_q.
        num_heads_k: 1.
        num_heads_q: h_q; needed with topk.
        is_fp8_kvcache: for a cache in float8_e4m3fn, or with topk for one of 656 bytes per token.
        topk: indices per query of the sparse kernel; None for the dense ones.

    Returns:
        tile_scheduler_metadata int32 `[num_sm_parts, 8]` and num_splits int32 `[b + 1]`, valid for these lengths alone.
        Without arguments (None, None), with which each `flash_mla_with_kvcache` makes its own.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: this machine cannot run it.
    """
    if cache_seqlens is None:
        return None, None
    validate.check_metadata_request(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk)
    assert num_q_tokens_per_head_k is not None
    if is_fp8_kvcache and topk is None:
        spec = Spec(METADATA_FP8, _parts(num_q_tokens_per_head_k), options=(num_q_tokens_per_head_k, 1))
    else:
        parts = _parts(num_q_tokens_per_head_k)
        if topk is not None and num_heads_q is not None:
            parts = _sparse_parts(num_q_tokens_per_head_k // num_heads_q, num_heads_q)
        options = (num_q_tokens_per_head_k, 1, num_heads_q, is_fp8_kvcache, topk)
        spec = Spec(METADATA, parts, options=options)
    metadata, num_splits = _metadata(cache_seqlens, spec)
    return metadata, num_splits


def flash_mla_with_kvcache(
    q: jax.Array,
    k_cache: jax.Array,
    block_table: jax.Array | None,
    cache_seqlens: jax.Array | None,
    head_dim_v: int = 512,
    tile_scheduler_metadata: jax.Array | None = None,
    num_splits: jax.Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: jax.Array | None = None,
    *,
    descale_q: jax.Array | None = None,
    descale_k: jax.Array | None = None,
    check: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a few new tokens per request over a paged cache of latents. Works in and out of `jax.jit`.

    Under jit XLA captures the call into its CUDA graphs; then no Python runs at a replay.

    Args:
        q: `[b, s_q, h_q, 576]`, bf16 or fp16 (dense), float8_e4m3fn (dense FP8), bf16 (sparse, h_q 64 or 128).
        k_cache: `[num_blocks, 64, 1, 576]` in q's dtype; sparse: `[num_blocks, 64, 1, 656]` in uint8, int8 or
            float8_e4m3fn: 512 e4m3, 4 float32 scales, 64 bf16 per token.
        block_table: int32 `[b, max_num_blocks]`; entries past a request's length may hold anything. None if sparse.
        cache_seqlens: int32 `[b]`, the s_q new tokens included; 0 is an empty request. None if sparse.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: what all layers of a step share: `get_mla_metadata` of the same lengths, or
            mla_jax's `tile_schedule`. (None, None) makes one per call. One of other lengths, or of another batch with
            as many requests, is noticed on the device and replaced by one that is right and slow.
        softmax_scale: a number, not traced; default 576^-½. With e4m3 put a traced one into descale_q.
        causal: bottom-right: query j sees key t iff t ≤ cache_seqlens − s_q + j. False if sparse.
        is_fp8_kvcache: None takes it from k_cache; a value must agree with it.
        indices: int32 `[b, s_q, topk]`, topk a multiple of 64: page · 64 + place in the page of each key, −1 for none.
        descale_q, descale_k: float32 `[1]`, of e4m3 alone and needed there: logits are multiplied by both, the output
            by descale_k.
        check: reads page ids, lengths and indices on the host, and names the first wrong one in a ValueError; outside
            jit only. By default they are clamped on the device: a page id to the cache, a length to what the table
            holds, an index outside the cache to −1.

    Returns:
        out `[b, s_q, h_q, 512]` in q's dtype, bf16 for e4m3; lse float32 `[b, h_q, s_q]`, natural logarithm. A row that
        sees no key has out 0 and lse +inf, which is FlashMLA's convention and not mla_jax's.

    Raises:
        ValueError: the call is wrong.
        NotImplementedError: this machine cannot run it, or under `jax.vmap` or `jax.grad`, which it does not support.

    Cost: scratch of (b + num_sm_parts) · s_q · h_q · 513 float32 from XLA, which layers share. With e4m3 one more pass
    over out.
    """
    kind = validate.kind_of(q, k_cache, indices, is_fp8_kvcache)
    validate.check_call(kind, q, k_cache, block_table, cache_seqlens, head_dim_v, causal, indices)
    validate.check_scales(kind, softmax_scale, descale_q, descale_k)
    scale = float(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    batch, queries, heads, _ = q.shape
    parts = _sparse_parts(queries, heads) if kind == SPARSE else _parts(queries * heads)
    validate.check_metadata(tile_scheduler_metadata, num_splits, parts, batch)
    if check:
        validate.check_values(k_cache, block_table, cache_seqlens, indices)
    made = tile_scheduler_metadata is not None
    metadata = (tile_scheduler_metadata, num_splits) if made else ()
    if kind == SPARSE:
        spec = Spec(kind, parts, made, (scale,), PROVIDER)
        return _sparse(q, k_cache, indices, *metadata, spec=spec)
    spec = Spec(kind, parts, made, (scale, bool(causal)), PROVIDER)
    scales = (descale_q, descale_k) if kind == DENSE_FP8 else ()
    return _dense(q, k_cache, block_table, cache_seqlens, scales, *metadata, spec=spec)


PROVIDER: Provider | None = None  # tests of the callback on a CPU put one of their own here


@functools.partial(jax.jit, static_argnames="spec")
def _metadata(cache_seqlens: jax.Array, spec: Spec) -> Any:
    return run(spec, jnp.maximum(cache_seqlens, 1 if spec.kind == METADATA_FP8 else 0))  # see _dense_fp8


@functools.partial(jax.jit, static_argnames="spec")
def _dense(
    q: jax.Array,
    k_cache: jax.Array,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    scales: tuple[jax.Array, ...],
    *metadata: jax.Array,
    spec: Spec,
) -> tuple[jax.Array, jax.Array]:
    table, lens = clamped(block_table, cache_seqlens, k_cache.shape[0])
    if spec.kind == DENSE_FP8:
        return _dense_fp8(q, k_cache, table, lens, scales, *metadata, spec=spec)
    if metadata:
        metadata = matching_schedule(metadata[0], metadata[1], lens, tokens=False)
    out, lse = run(spec, q, k_cache, table, lens, *metadata)
    return out, jnp.swapaxes(lse, 1, 2)


def _dense_fp8(
    q: jax.Array,
    k_cache: jax.Array,
    table: jax.Array,
    lens: jax.Array,
    scales: tuple[jax.Array, ...],
    *metadata: jax.Array,
    spec: Spec,
) -> tuple[jax.Array, jax.Array]:
    """An empty request takes part with one token: of none its kernel reads the table entry before the first."""
    used = jnp.maximum(lens, 1)
    if metadata:
        metadata = matching_schedule(metadata[0], metadata[1], used, tokens=True)
    else:  # the only kernel that does not make its own
        rows = q.shape[1] * q.shape[2]
        metadata = tuple(run(Spec(METADATA_FP8, spec.parts, options=(rows, 1), provider=spec.provider), used))
        spec = Spec(spec.kind, spec.parts, True, spec.options, spec.provider)
    out, lse = run(spec, q, k_cache, table, used, *scales, *metadata)
    empty = (lens == 0)[:, None, None]
    return jnp.where(empty[..., None], 0, out), jnp.swapaxes(jnp.where(empty, jnp.inf, lse), 1, 2)


@functools.partial(jax.jit, static_argnames="spec")
def _sparse(
    q: jax.Array, k_cache: jax.Array, indices: jax.Array, *metadata: jax.Array, spec: Spec
) -> tuple[jax.Array, jax.Array]:
    indices = valid_indices(indices, k_cache.shape[0] * k_cache.shape[1])
    if metadata:  # the work of every request is its topk indices
        lens = jnp.full(q.shape[0], indices.shape[-1], jnp.int32)
        metadata = matching_schedule(metadata[0], metadata[1], lens, tokens=False)
    out, lse = run(spec, q, k_cache, indices, *metadata)
    return out, jnp.swapaxes(lse, 1, 2)


def _parts(rows: int) -> int:
    """num_sm_parts of the dense kernels: as many as fill the GPU with blocks of 64 query rows."""
    return max(providers.num_sms() // -(-rows // ROWS), 1)


def _sparse_parts(queries: int, heads: int) -> int:
    return max(providers.num_sms() // queries // (heads // ROWS), 1)
