"""What is wrong with a call: shapes and dtypes before it, values on the host when asked."""

from typing import Any

import jax
import numpy as np

from flash_mla_jax.errors import InputError
from flash_mla_jax.provider import DENSE, DENSE_FP8, SPARSE

PAGE, DIM, D_V, ROW_BYTES = 64, 576, 512, 656
BYTES = ("uint8", "int8", "float8_e4m3fn")  # dtypes of a cache with 656 bytes per token
SPARSE_HEADS = (64, 128)
MAX_CACHE = "[num_blocks, 64, 1, 576], or 656 bytes for the sparse kernel"


def kind_of(q: Any, k_cache: Any, indices: Any, is_fp8_kvcache: Any) -> str:
    """The kernel that such a call means. Raises ValueError for a contradiction."""
    check_array("q", q, 4, "[b, s_q, h_q, 576]")
    check_array("k_cache", k_cache, 4, MAX_CACHE)
    fp8 = indices is not None or k_cache.dtype.name in BYTES
    if not isinstance(is_fp8_kvcache, bool | np.bool_ | None):
        raise InputError(f"is_fp8_kvcache must be True, False or None, got {type(is_fp8_kvcache).__name__}.")
    if is_fp8_kvcache is not None and bool(is_fp8_kvcache) != fp8:
        what = f"k_cache is {k_cache.dtype.name} and indices {'are' if indices is not None else 'are not'} given"
        raise InputError(f"is_fp8_kvcache={is_fp8_kvcache} contradicts the call, where {what}; leave it out.")
    if indices is not None:
        return SPARSE
    return DENSE_FP8 if k_cache.dtype.name == "float8_e4m3fn" else DENSE


def check_array(name: str, array: Any, ndim: int, shape: str) -> None:
    """Raises ValueError unless it is a JAX array of that rank, on one device, in row-major order."""
    if not isinstance(array, jax.Array):
        hint = "; jnp.asarray puts it on the GPU once" if isinstance(array, np.ndarray) else ""
        raise InputError(f"{name} must be a jax.Array {shape}, got {type(array).__name__}{hint}.")
    if array.ndim != ndim:
        raise InputError(f"{name} must be {shape}, got shape {array.shape}.")
    if isinstance(array, jax.core.Tracer):
        return
    if len(array.sharding.device_set) > 1:
        raise InputError(f"{name} must lie on one device, found it on {len(array.sharding.device_set)}.")
    check_row_major(name, array)


def check_row_major(name: str, array: Any) -> None:
    """Raises ValueError for an array whose last dim is not the one that lies together in memory."""
    layout = getattr(array.format, "layout", None)
    order = getattr(layout, "major_to_minor", None)
    if order is not None and tuple(order) != tuple(range(array.ndim)):
        raise InputError(f"{name} must lie in row-major order, found dims in order {order}; copy it with jnp.copy.")


def check_call(
    kind: str, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any, causal: Any, indices: Any
) -> None:
    """Raises ValueError for shapes and dtypes that the kernel of that kind does not take."""
    if not _is_whole(head_dim_v) or head_dim_v != D_V:
        raise InputError(f"head_dim_v must be {D_V}, got {head_dim_v!r:.60}.")
    if not isinstance(causal, bool | np.bool_):
        raise InputError(f"causal must be True or False and not traced, got {type(causal).__name__}.")
    if q.shape[3] != DIM:
        raise InputError(f"q must be [b, s_q, h_q, {DIM}], got {q.shape}; did you pass q before absorbing W_UK?")
    if 0 in q.shape or k_cache.shape[0] == 0:
        raise InputError(f"b, s_q, h_q and num_blocks must be at least 1, got q {q.shape}, k_cache {k_cache.shape}.")
    width = ROW_BYTES if kind == SPARSE else DIM
    if k_cache.shape[1:] != (PAGE, 1, width):
        raise InputError(f"k_cache must be [num_blocks, {PAGE}, 1, {width}] here, got {k_cache.shape}.")
    if kind == SPARSE:
        if block_table is not None or cache_seqlens is not None:
            raise InputError("block_table and cache_seqlens must be None with indices, which say where each key lies.")
        _check_sparse(q, k_cache, indices, causal)
        return
    wanted = ("float8_e4m3fn",) if kind == DENSE_FP8 else ("bfloat16", "float16")
    if q.dtype.name not in wanted or k_cache.dtype != q.dtype:
        raise InputError(
            f"q and k_cache must both be bfloat16, both float16 or both float8_e4m3fn, got {q.dtype.name} and "
            f"{k_cache.dtype.name}{'; pass indices for a cache of 656 bytes' if k_cache.dtype == 'uint8' else ''}."
        )
    _check_int32("block_table", block_table, 2, "[b, max_num_blocks]")
    _check_int32("cache_seqlens", cache_seqlens, 1, "[b]")
    batch = q.shape[0]
    if block_table.shape[0] != batch or cache_seqlens.shape[0] != batch or block_table.shape[1] == 0:
        raise InputError(
            f"q, block_table and cache_seqlens must be of the same b with max_num_blocks of at least 1, got "
            f"q {q.shape}, block_table {block_table.shape}, cache_seqlens {cache_seqlens.shape}."
        )


def _check_sparse(q: Any, k_cache: Any, indices: Any, causal: Any) -> None:
    if causal:
        raise InputError("causal must be False with indices: leave out the indices of keys that a query must not see.")
    if q.dtype.name != "bfloat16" or k_cache.dtype.name not in BYTES:
        raise InputError(
            f"with indices q must be bfloat16 and k_cache one of {', '.join(BYTES)}, got {q.dtype.name} and "
            f"{k_cache.dtype.name}."
        )
    if q.shape[2] not in SPARSE_HEADS:
        raise InputError(f"with indices h_q must be 64 or 128, got {q.shape[2]}; pad the heads of q.")
    _check_int32("indices", indices, 3, "[b, s_q, topk]")
    if indices.shape[:2] != q.shape[:2] or indices.shape[2] == 0 or indices.shape[2] % PAGE:
        raise InputError(
            f"indices must be [b, s_q, topk] = [{q.shape[0]}, {q.shape[1]}, a multiple of {PAGE}], got "
            f"{indices.shape}; pad with -1."
        )


def _check_int32(name: str, array: Any, ndim: int, shape: str) -> None:
    check_array(name, array, ndim, f"int32 {shape}")
    if array.dtype.name != "int32":
        raise InputError(f"{name} must be int32, got {array.dtype.name}; convert with .astype('int32').")


def check_scales(kind: str, softmax_scale: Any, descale_q: Any, descale_k: Any) -> None:
    """Raises ValueError for a scale that the kernel cannot take."""
    if isinstance(softmax_scale, jax.core.Tracer):
        raise InputError("softmax_scale must be a number that is known when jit traces; only descale_q may be traced.")
    if softmax_scale is not None and not _is_finite(softmax_scale):
        raise InputError(f"softmax_scale must be one number or None, and finite, got {softmax_scale!r:.60}.")
    for name, scale in (("descale_q", descale_q), ("descale_k", descale_k)):
        if (scale is not None) != (kind == DENSE_FP8):
            state = "is needed with" if kind == DENSE_FP8 else "must be None but for"
            raise InputError(f"{name} {state} q and k_cache in float8_e4m3fn.")
        if scale is not None:
            check_array(name, scale, 1, "float32 [1]")
            if scale.dtype.name != "float32" or scale.shape != (1,):
                raise InputError(f"{name} must be float32 [1], got {scale.dtype.name} {scale.shape}.")


def check_metadata(metadata: Any, num_splits: Any, parts: int, batch: int) -> None:
    """Raises ValueError for metadata of another GPU, another number of query rows or another batch size."""
    if metadata is None and num_splits is None:
        return
    if metadata is None or num_splits is None:
        raise InputError("tile_scheduler_metadata and num_splits belong together: pass both, or None for both.")
    _check_int32("tile_scheduler_metadata", metadata, 2, "[num_sm_parts, 8]")
    _check_int32("num_splits", num_splits, 1, "[b + 1]")
    if metadata.shape != (parts, 8) or num_splits.shape != (batch + 1,):
        raise InputError(
            f"tile_scheduler_metadata and num_splits must be [{parts}, 8] and [{batch + 1}] for this GPU and q, got "
            f"{metadata.shape} and {num_splits.shape}; make them for this call's s_q, h_q and b."
        )


def check_metadata_request(lens: Any, rows: Any, num_heads_k: Any, num_heads_q: Any, topk: Any) -> None:
    """Raises ValueError for wrong arguments of `get_mla_metadata`."""
    _check_int32("cache_seqlens", lens, 1, "[b]")
    if lens.shape[0] == 0:
        raise InputError("cache_seqlens must hold at least one request.")
    if not _is_whole(rows) or rows < 1:
        raise InputError(f"num_q_tokens_per_head_k must be s_q · h_q, a whole number of at least 1, got {rows!r:.60}.")
    if num_heads_k != 1:
        raise InputError(f"num_heads_k must be 1, the latent serves all heads, got {num_heads_k}.")
    known = _is_whole(topk) and _is_whole(num_heads_q) and num_heads_q in SPARSE_HEADS
    if topk is not None and not (known and rows % num_heads_q == 0 and topk >= 1 and topk % PAGE == 0):
        raise InputError(
            f"with topk, num_heads_q must be 64 or 128 and divide num_q_tokens_per_head_k, and topk a multiple of "
            f"{PAGE}, got {num_heads_q}, {rows} and {topk}."
        )


def _is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _is_finite(number: Any) -> bool:
    """Whether it is one real number that float32 can hold."""
    if not isinstance(number, int | float | np.number | np.ndarray | jax.Array) or np.ndim(number) != 0:
        return False
    array = np.asarray(number)
    with np.errstate(over="ignore"):
        return array.dtype.kind in "iuf" and bool(np.isfinite(array.astype(np.float32)))


def check_values(k_cache: Any, block_table: Any, cache_seqlens: Any, indices: Any) -> None:
    """Raises ValueError that names the first request with a length, page id or index out of range. Reads the device."""
    arrays = (indices,) if indices is not None else (block_table, cache_seqlens)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise InputError("check=True reads values on the host and cannot be used under jit; leave it out there.")
    if indices is not None:
        _check_indices(np.asarray(indices), k_cache.shape[0] * PAGE)
    else:
        _check_pages(np.asarray(block_table), np.asarray(cache_seqlens), k_cache.shape[0])


def _check_pages(table: np.ndarray, lens: np.ndarray, num_blocks: int) -> None:
    longest = table.shape[1] * PAGE
    wrong = np.flatnonzero((lens < 0) | (lens > longest))
    if len(wrong):
        raise InputError(
            f"request {wrong[0]} has cache_seqlens {lens[wrong[0]]}; {table.shape[1]} entries of block_table hold 0 to "
            f"{longest} tokens."
        )
    used = np.arange(table.shape[1])[None] * PAGE < lens[:, None]
    outside = np.argwhere(used & ((table < 0) | (table >= num_blocks)))
    if len(outside):
        request, entry = outside[0]
        raise InputError(
            f"request {request} has block_table[{entry}] = {table[request, entry]}; k_cache has pages 0 to "
            f"{num_blocks - 1}."
        )


def _check_indices(indices: np.ndarray, num_tokens: int) -> None:
    wrong = np.argwhere((indices < -1) | (indices >= num_tokens))
    if len(wrong):
        request, query, place = wrong[0]
        raise InputError(
            f"request {request} has indices[{query}, {place}] = {indices[request, query, place]}; k_cache holds tokens "
            f"0 to {num_tokens - 1}, and -1 means none."
        )
