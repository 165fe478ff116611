"""What the XLA implementations share: dtypes of products, and cache rows as numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from mla_jax.cache.codec import dequantize_kv

HIGHEST = jax.lax.Precision.HIGHEST  # float32 means float32: on a GPU JAX would otherwise use TF32 for it
FP8_DTYPES = ("float8_e4m3fn", "uint8")  # one scale per tensor; rows of 656 bytes


def out_dtype(q: jax.Array) -> Any:
    """Of the result: q's, bf16 for an e4m3 q."""
    return jnp.dtype(jnp.bfloat16) if q.dtype == jnp.float8_e4m3fn else q.dtype


def product_dtype(q: jax.Array, kv_cache: jax.Array) -> Any:
    """Of the operands of both products, which accumulate in float32.

    That of q and cache where they agree, float32 where they differ; an FP8 cache is widened to q's dtype, which holds
    e4m3 exactly, and an e4m3 q to bf16.
    """
    if kv_cache.dtype.name in FP8_DTYPES:
        return out_dtype(q)
    return q.dtype if q.dtype == kv_cache.dtype else jnp.dtype(jnp.float32)


def as_numbers(rows: Shaped[Array, "*n W"], dtype: Any) -> Float[Array, "*n D"]:
    """Cache rows in dtype; a scale per tensor is left to the caller, who can apply it to the logits and the result."""
    return dequantize_kv(rows, "fp8_ds_mla", dtype=dtype) if rows.dtype == jnp.uint8 else rows.astype(dtype)
