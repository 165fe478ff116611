"""Wrong calls of `flash_mla_with_kvcache`, and what each gives: a ValueError, or the result of a right call.

Shared by the tests on a CPU and on a GPU, where a wrong value that reached a kernel would be an illegal access.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

Call = dict[str, Any]
PAGES, WIDTH, LENS = 8, 3, (150, 0, 70)


def right_call() -> Call:
    """Three requests of two queries and four heads."""
    rng = np.random.default_rng(7)
    return {
        "q": jnp.asarray(rng.standard_normal((3, 2, 4, 576)), jnp.bfloat16),
        "k_cache": jnp.asarray(rng.standard_normal((PAGES, 64, 1, 576)), jnp.bfloat16),
        "block_table": jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 0, 1]], jnp.int32),
        "cache_seqlens": jnp.asarray(LENS, jnp.int32),
        "head_dim_v": 512,
        "causal": True,
    }


def sparse_call() -> Call:
    """One request of two queries and 64 heads over a cache of zeros."""
    return {
        "q": jnp.ones((1, 2, 64, 576), jnp.bfloat16),
        "k_cache": jnp.zeros((PAGES, 64, 1, 656), jnp.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "indices": jnp.asarray(np.arange(128).reshape(1, 2, 64), jnp.int32),
    }


def fp8_call() -> Call:
    """The first call in e4m3."""
    call, one = right_call(), jnp.ones(1, jnp.float32)
    for name in ("q", "k_cache"):
        call[name] = call[name].astype(jnp.float8_e4m3fn)
    return call | {"descale_q": one, "descale_k": one}


@dataclass(frozen=True)
class Wrong:
    """A change of a right call. `says`: words of its ValueError, or `means`: the change that gives the same result."""

    name: str
    change: Callable[[Call], Call]
    says: str | None = None
    means: Callable[[Call], Call] | None = None
    base: Callable[[], Call] = right_call

    def call(self) -> Call:
        base = self.base()
        return base | self.change(base)

    def same_as(self) -> Call:
        base = self.base()
        assert self.means is not None
        return base | self.means(base)


def _cast(name: str, dtype: Any) -> Callable[[Call], Call]:
    return lambda c: {name: c[name].astype(dtype)}


def _put(name: str, index: Any, value: int) -> Callable[[Call], Call]:
    return lambda c: {name: c[name].at[index].set(value)}


def _fixed(**changes: Any) -> Callable[[Call], Call]:
    return lambda _: changes


def _permuted(name: str, order: tuple[int, ...]) -> Callable[[Call], Call]:
    def change(c: Call) -> Call:
        layout = Format(Layout(major_to_minor=order), c[name].sharding)
        return {name: jax.device_put(c[name], layout)}

    return change


def _metadata(rows: int, parts: int = 132, dtype: Any = np.int32) -> Callable[[Call], Call]:
    metadata, num_splits = np.zeros((parts, 8), dtype), np.zeros(rows + 1, np.int32)
    return _fixed(tile_scheduler_metadata=jnp.asarray(metadata), num_splits=jnp.asarray(num_splits))


def _garbage_metadata(c: Call) -> Call:
    rng = np.random.default_rng(3)
    metadata = rng.integers(-(2**31), 2**31 - 1, (132, 8), np.int32)
    return {"tile_scheduler_metadata": jnp.asarray(metadata), "num_splits": jnp.asarray([0, 900, -5, 7], jnp.int32)}


SAME = _fixed()
WRONG = [
    Wrong("q in float32", _cast("q", jnp.float32), "q and k_cache must both be bfloat16"),
    Wrong("k_cache in float16", _cast("k_cache", jnp.float16), "q and k_cache must both be bfloat16"),
    Wrong("k_cache in float32", _cast("k_cache", jnp.float32), "q and k_cache must both be bfloat16"),
    Wrong("q in e4m3 alone", _cast("q", jnp.float8_e4m3fn), "q and k_cache must both be bfloat16"),
    Wrong("k_cache in e4m3 alone", _cast("k_cache", jnp.float8_e4m3fn), "q and k_cache must both be bfloat16"),
    Wrong("table in int16", _cast("block_table", jnp.int16), "block_table must be int32, got int16"),
    Wrong("table in float32", _cast("block_table", jnp.float32), "block_table must be int32, got float32"),
    Wrong("table of int64 on the host", lambda c: {"block_table": np.asarray(c["block_table"], np.int64)}, "ndarray"),
    Wrong("lengths in uint32", _cast("cache_seqlens", jnp.uint32), "cache_seqlens must be int32, got uint32"),
    Wrong("lengths as a list", _fixed(cache_seqlens=[150, 0, 70]), "must be a jax.Array int32 [b], got list"),
    Wrong("q on the host", lambda c: {"q": np.asarray(c["q"])}, "q must be a jax.Array"),
    Wrong("k_cache on the host", lambda c: {"k_cache": np.asarray(c["k_cache"])}, "puts it on the GPU once"),
    Wrong("q of rank 3", lambda c: {"q": c["q"][:, 0]}, "q must be [b, s_q, h_q, 576], got shape (3, 4, 576)"),
    Wrong("k_cache of rank 3", lambda c: {"k_cache": c["k_cache"][:, :, 0]}, "k_cache must be [num_blocks, 64, 1"),
    Wrong("table of rank 1", lambda c: {"block_table": c["block_table"][0]}, "block_table must be int32 [b, max"),
    Wrong("lengths of rank 2", lambda c: {"cache_seqlens": c["cache_seqlens"][None]}, "cache_seqlens must be int32"),
    Wrong("pages of 32", lambda c: {"k_cache": c["k_cache"][:, :32]}, "k_cache must be [num_blocks, 64, 1, 576] here"),
    Wrong("head dim 512", lambda c: {n: c[n][..., :512] for n in ("q", "k_cache")}, "did you pass q before absorbing"),
    Wrong("cache dim 512", lambda c: {"k_cache": c["k_cache"][..., :512]}, "k_cache must be [num_blocks, 64, 1, 576]"),
    Wrong("two heads of the cache", lambda c: {"k_cache": jnp.repeat(c["k_cache"], 2, 2)}, "(8, 64, 2, 576)"),
    Wrong("head_dim_v 576", _fixed(head_dim_v=576), "head_dim_v must be 512, got 576"),
    Wrong("another batch's table", lambda c: {"block_table": c["block_table"][:2]}, "of the same b"),
    Wrong("another batch's lengths", lambda c: {"cache_seqlens": c["cache_seqlens"][:1]}, "of the same b"),
    Wrong("a table without entries", lambda c: {"block_table": c["block_table"][:, :0]}, "max_num_blocks of at"),
    Wrong("no queries", lambda c: {"q": c["q"][:, :0]}, "must be at least 1"),
    Wrong("permuted k_cache", _permuted("k_cache", (1, 0, 2, 3)), "k_cache must lie in row-major order"),
    Wrong("permuted table", _permuted("block_table", (1, 0)), "block_table must lie in row-major order"),
    Wrong("causal as a number", _fixed(causal=1), "causal must be True or False"),
    Wrong("a scale per request", _fixed(softmax_scale=jnp.ones(3)), "softmax_scale must be one number"),
    Wrong("a complex scale", _fixed(softmax_scale=np.complex64(1)), "softmax_scale must be one number"),
    Wrong("a scale of text", _fixed(softmax_scale=np.array("a")), "softmax_scale must be one number"),
    Wrong("a huge scale", _fixed(softmax_scale=10**400), "softmax_scale must be one number"),
    Wrong("a scale of NaN", _fixed(softmax_scale=float("nan")), "and finite, got nan"),
    Wrong("head_dim_v of text", _fixed(head_dim_v="512"), "head_dim_v must be 512, got '512'"),
    Wrong("is_fp8_kvcache as an array", _fixed(is_fp8_kvcache=jnp.ones(2)), "is_fp8_kvcache must be True, False"),
    Wrong("a table beside indices", _fixed(block_table=jnp.zeros((1, 1), jnp.int32)), "None with", base=sparse_call),
    Wrong("descale_q of bf16", _fixed(descale_q=jnp.ones(1)), "descale_q must be None but for"),
    Wrong("no scales of e4m3", _fixed(descale_q=None), "descale_q is needed with", base=fp8_call),
    Wrong("scales of e4m3 in bf16", _fixed(descale_k=jnp.ones(1, jnp.bfloat16)), "float32 [1]", base=fp8_call),
    Wrong("metadata of another batch size", _metadata(4), "[4] for this GPU"),
    Wrong("metadata of another GPU", _metadata(3, parts=78), "[132, 8] and [4] for this GPU"),
    Wrong("metadata without splits", lambda c: _metadata(3)(c) | {"num_splits": None}, "belong together"),
    Wrong("indices of 40", lambda c: {"indices": c["indices"][..., :40]}, "a multiple of 64", base=sparse_call),
    Wrong("indices of another batch", lambda c: {"indices": c["indices"][:, :1]}, "indices must be", base=sparse_call),
    Wrong("sparse with 16 heads", lambda c: {"q": c["q"][:, :, :16]}, "h_q must be 64 or 128", base=sparse_call),
    Wrong("sparse and causal", _fixed(causal=True), "causal must be False with indices", base=sparse_call),
    Wrong("dense call told to be FP8", _fixed(is_fp8_kvcache=True), "contradicts the call"),
    # Values, which only the device knows.
    Wrong("a table of -1", lambda c: {"block_table": jnp.full_like(c["block_table"], -1)},
          means=lambda c: {"block_table": jnp.zeros_like(c["block_table"])}),
    Wrong("a page beyond the cache", _put("block_table", (0, 1), 2147480000),
          means=_put("block_table", (0, 1), PAGES - 1)),
    Wrong("a length beyond the table", _put("cache_seqlens", 2, 2**31 - 1), means=_put("cache_seqlens", 2, WIDTH * 64)),
    Wrong("a negative length", _put("cache_seqlens", 0, -(2**31)), means=_put("cache_seqlens", 0, 0)),
    Wrong("metadata of zeros", _metadata(3), means=SAME),
    Wrong("metadata of garbage", _garbage_metadata, means=SAME),
    Wrong("metadata of garbage, e4m3", _garbage_metadata, means=SAME, base=fp8_call),
    Wrong("indices beyond the cache", _put("indices", (0, 1, 5), PAGES * 64), means=_put("indices", (0, 1, 5), -1),
          base=sparse_call),
    Wrong("indices far below 0", _put("indices", (0, 0, 0), -(2**31)), means=_put("indices", (0, 0, 0), -1),
          base=sparse_call),
]  # fmt: skip
