"""Queries in e4m3: numbers of one byte, and a factor for each row."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax.cache.codec import E4M3_MAX
from mla_jax.errors import InputError

DTYPES = ("bfloat16", "float16", "float32")  # that queries may have before they are rounded
SMALLEST_NORMAL = 2.0**-6  # of e4m3; below it numbers are multiples of 2⁻⁹


def quantize_queries(q: Float[Array, "B S H D"]) -> tuple[Float[Array, "B S H D"], Float[Array, "B S H"]]:
    """Queries in e4m3, and the factor of each row: q ≈ q_e4m3 · q_scale, what `mla_decode` takes beside an FP8 cache.

    A row's factor is a power of two and brings its largest magnitude into (224, 448], the end of e4m3's range. A number
    errs by 2⁻⁴ of itself at most, or by 2⁻¹⁷ of its row's largest; what e4m3 holds is kept exactly. NaN stays NaN, and
    so become infinities, which e4m3 lacks. Rows with either and rows of zeros have factor 1. No factor is below 2⁻¹²⁶,
    and numbers below that count as 0.

    Args:
        q: `[B, S, H, D]` bf16, fp16 or fp32.

    Returns:
        float8_e4m3fn `[B, S, H, D]` and float32 `[B, S, H]`: `mla_decode(q_e4m3, kv_cache, …, q_scale=q_scale)`.

    Raises:
        ValueError: q has another shape or dtype.

    Cost: one pass over q, jitted; inside another jitted function XLA fuses it with what made q. A kernel that would
    split 16-bit queries into two e4m3 numbers does half the products of logits, and reads half the bytes of q.

    Source: e4m3 is that of FP8 Formats for Deep Learning (arXiv 2209.05433).
    """
    if not isinstance(q, jax.Array | np.ndarray):
        raise InputError(f"q must be a JAX or NumPy array, got {type(q).__name__}.")
    if q.ndim != 4:
        raise InputError(f"q must be [B, S, H, D], got shape {q.shape}.")
    if q.dtype.name not in DTYPES:
        raise InputError(f"q must be one of {', '.join(DTYPES)}, got {q.dtype.name}.")
    return _quantize(q)


@jax.jit
def _quantize(q: Float[Array, "B S H D"]) -> tuple[Float[Array, "B S H D"], Float[Array, "B S H"]]:
    numbers = q.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(numbers), axis=-1)  # not of the largest: a CPU's maximum may pass over NaN
    largest = jnp.max(jnp.abs(numbers), axis=-1, initial=0)
    mantissa, exponent = jnp.frexp(largest)  # largest = mantissa · 2^exponent, mantissa in [½, 1)
    exponent -= jnp.where(mantissa <= E4M3_MAX / 512, 9, 8)  # 448 = ⅞ · 2⁹
    exponent = jnp.where(finite & (largest > 0), jnp.maximum(exponent, -126), 0)
    rounded = _round_to_e4m3(numbers * power_of_two(-exponent)[..., None])
    return rounded.astype(jnp.float8_e4m3fn), power_of_two(exponent)


def _round_to_e4m3(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """The nearest numbers of e4m3, still in float32; clamped to its range, NaN for what is not finite.

    The cast that follows is exact, so it changes nothing that XLA leaves it out where it is cast back: XLA is free to
    keep more bits than it was told to.
    """
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    rounded = jnp.where(jnp.abs(x) < SMALLEST_NORMAL, jnp.round(x * 512) / 512, normal)
    return jnp.where(jnp.isfinite(x), jnp.clip(rounded, -E4M3_MAX, E4M3_MAX), jnp.nan)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Exactly, where `exp2` may err by a bit; for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
