"""`mla_decode` through FlashMLA's CUDA kernels: names, scales, schedules and marks as `flash_mla_jax` wants them."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from mla_jax.cache.formats import DS_ROW, PAGE_SIZE
from mla_jax.schedule import TileSchedule, num_sm_parts, tile_schedule

DIM, LATENT = 576, 512
SPARSE_HEADS = (64, 128)  # that the kernel for fp8_ds_mla is built for


def cannot_run(
    q: Any = None, kv_cache: Any = None, *, d_v: int = LATENT, tree_mask: Any = None, row_scales: bool = False
) -> str | None:
    """Why this call cannot run here, in one sentence; None if it can. Without arrays it speaks of the machine alone.

    Loads torch and FlashMLA only on a machine with a Hopper GPU.
    """
    kind = "dense"
    if q is not None:
        kind = _kind(kv_cache)
        if (reason := _unsupported_call(q, kv_cache, d_v)) is not None:
            return reason
        if row_scales:
            return "its kernels take one q_scale for all queries, got one for each query row"
    try:
        import flash_mla_jax
    except ModuleNotFoundError as error:
        return f"the package flash_mla_jax is missing ({error})"
    reason = flash_mla_jax.cannot_run(kind)
    return None if reason is None else reason.rstrip(".")


def decode(
    q: Float[Array, "B S H 576"],
    kv_cache: Shaped[Array, "P 64 W"],
    block_table: Int32[Array, "B M"],
    kv_lens: Int32[Array, " B"],
    *,
    logit_scale: float | Float[Array, ""],
    value_scale: Float[Array, ""] | None,
    d_v: int,
    causal: bool,
    tree_mask: None,
    schedule: TileSchedule | None = None,
) -> tuple[Float[Array, "B S H 512"], Float[Array, "B H S"]]:
    """`mla_decode` for arguments that `cannot_run` has let pass, without a tree mask (`tree.without_mask` adds it).

    A cache of fp8_ds_mla is read by FlashMLA's sparse kernel, with all of a request's tokens as its indices.

    Raises:
        NotImplementedError: the softmax scale is traced and the cache has none of its own to carry it.
        ValueError: a schedule for another GPU or number of query rows, or with columns in another order.

    Cost: FlashMLA's own, and its scratch of (B + parts) · S · H · 513 float32; for fp8_ds_mla beside it B · S · M · 64
    indices, all of which the kernel walks.
    """
    kind = _kind(kv_cache)
    scales = _scales(logit_scale, value_scale) if kind == "dense_fp8" else {}
    softmax_scale = 1.0 if scales else _number(logit_scale)
    if schedule is not None:
        schedule.require_order(_order(q), "flash_mla")
    metadata = (None, None) if schedule is None else (schedule.metadata, schedule.num_splits)
    return _decode(q, kv_cache, block_table, kv_lens, metadata, scales, softmax_scale, causal)


@functools.partial(jax.jit, static_argnums=(6, 7))  # outside jit too: there the cache's new dim would be a copy
def _decode(
    q: Array,
    kv_cache: Array,
    block_table: Array,
    kv_lens: Array,
    metadata: tuple[Array | None, Array | None],
    scales: Any,
    softmax_scale: float,
    causal: bool,
) -> tuple[Array, Array]:
    from flash_mla_jax import flash_mla_with_kvcache

    cache = kv_cache[:, :, None]
    if _kind(kv_cache) == "sparse":
        indices = _all_tokens(block_table, kv_lens, q.shape[1], causal)
        out, lse = flash_mla_with_kvcache(q, cache, None, None, softmax_scale=softmax_scale, indices=indices)
    else:
        out, lse = flash_mla_with_kvcache(
            q, cache, block_table, kv_lens, LATENT, *metadata, softmax_scale=softmax_scale, causal=causal, **scales
        )
    return out, jnp.where(jnp.isposinf(lse), -jnp.inf, lse)  # FlashMLA's mark of a row that sees no key


def schedule_for(q: jax.ShapeDtypeStruct | Array, kv_lens: Int32[Array, " B"]) -> TileSchedule:
    """The schedule of all calls with queries of this shape and dtype and these lengths."""
    from flash_mla_jax import provider

    _, tokens, heads, _ = q.shape
    parts = num_sm_parts(provider.num_sms(), tokens, heads)
    if q.dtype != jnp.float8_e4m3fn:
        return tile_schedule(kv_lens, parts)
    # The FP8 kernel is of the first generation, and flash_mla_jax gives it a token of an empty request.
    return replace(tile_schedule(jnp.maximum(kv_lens, 1), parts, order=_order(q)), kv_lens=kv_lens)


def _order(q: jax.ShapeDtypeStruct | Array) -> str:
    return "2025-02" if q.dtype == jnp.float8_e4m3fn else "2026-01"


def _kind(kv_cache: Any) -> str:
    return {"uint8": "sparse", "float8_e4m3fn": "dense_fp8"}.get(kv_cache.dtype.name, "dense")


def _unsupported_call(q: Any, kv_cache: Any, d_v: int) -> str | None:
    kind, found = _kind(kv_cache), f"{q.dtype.name} and {kv_cache.dtype.name}"
    if q.shape[-1] != DIM or d_v != LATENT:
        return f"it is built for {DIM} dims with {LATENT} value dims, got {q.shape[-1]} and {d_v}"
    if kv_cache.ndim != 3 or kv_cache.shape[1:] != (PAGE_SIZE, DS_ROW if kind == "sparse" else DIM):
        return f"it needs kv_cache [pages, {PAGE_SIZE}, {DIM}], or {DS_ROW} bytes per row, got {kv_cache.shape}"
    if kind == "sparse":
        if q.dtype != jnp.bfloat16:
            return f"it needs q in bfloat16 with a cache of fp8_ds_mla, got {q.dtype.name}"
        if q.shape[2] not in SPARSE_HEADS:
            return f"its kernel for fp8_ds_mla is built for 64 or 128 heads, got {q.shape[2]}"
    elif kv_cache.dtype != q.dtype or kv_cache.dtype.name == "float32":
        return f"it needs q and kv_cache both in bfloat16, float16 or float8_e4m3fn, got {found}"
    return None


def _scales(logit_scale: Any, value_scale: Any) -> dict[str, Array]:
    """The FP8 kernel multiplies logits by both, and the output by descale_k."""
    descale_k = jnp.ones((), jnp.float32) if value_scale is None else jnp.asarray(value_scale, jnp.float32)
    descale_q = jnp.asarray(logit_scale, jnp.float32) / descale_k
    return {"descale_q": descale_q.reshape(1), "descale_k": descale_k.reshape(1)}


def _number(scale: Any) -> float:
    if isinstance(scale, jax.core.Tracer):
        raise NotImplementedError(
            "flash_mla takes sm_scale and q_scale as numbers and these are traced; pass Python numbers, or choose "
            "another implementation."
        )
    return float(scale)


def _all_tokens(block_table: Array, kv_lens: Array, queries: int, causal: bool) -> Int32[Array, "B S M*64"]:
    """Where the tokens that each query sees lie in the cache; -1 for the others."""
    positions = jnp.arange(block_table.shape[1] * PAGE_SIZE, dtype=jnp.int32)
    places = jnp.repeat(block_table, PAGE_SIZE, axis=1) * PAGE_SIZE + positions[None] % PAGE_SIZE
    hidden = queries - 1 - jnp.arange(queries, dtype=jnp.int32) if causal else jnp.zeros(queries, jnp.int32)
    seen = positions[None, None] + hidden[None, :, None] < kv_lens[:, None, None]
    return jnp.where(seen, places[:, None], -1)
