"""Latents to cache bytes and back: one owner for both directions of every format.

FlashMLA reads the same bytes: `fp8_e4m3` is 576 values of e4m3 with one scale per tensor, `fp8_ds_mla` (DeepSeek-V3.2)
is a row of 656 bytes: 512 values of e4m3, 4 float32 scales (one per 128 values), and 64 values of bf16 for the rotated
key, which is not quantized.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from mla_jax.cache import formats
from mla_jax.cache.formats import DS_LATENT, DS_ROPE, DS_ROW, DS_TILE, KVFormat
from mla_jax.errors import InputError

E4M3_MAX = 448.0  # JAX turns larger numbers into NaN, where torch saturates: clamp first


def quantize_kv(
    x: Float[Array, "*n D"],
    kv_format: str,
    scale: float | Float[Array, ""] | None = None,
    *,
    power_of_two: bool = False,
) -> Shaped[Array, "*n W"]:
    """Latents as they lie in a cache.

    fp8_e4m3 stores x / scale; fp8_ds_mla stores each 128 values divided by their own scale, largest magnitude / 448.
    Values beyond the range saturate, infinities too; NaN stays NaN and touches no other value. A tile of zeros has
    scale 1.

    Args:
        x: `[..., D]`; D is 576 for `fp8_ds_mla`, anything for the others.
        kv_format: `"bf16" | "fp16" | "fp32" | "fp8_e4m3" (alias "fp8") | "fp8_ds_mla"`.
        scale: of `fp8_e4m3`, default 1; may be traced. None for the other formats.
        power_of_two: round the scales of `fp8_ds_mla` up to powers of two, the other convention in use.

    Returns:
        `[..., D]` in the format's dtype, or uint8 `[..., 656]` for `fp8_ds_mla`.

    Raises:
        ValueError: an unknown format, a scale where there is none or that is known not to be positive, a D that the
            format cannot hold.

    Cost: one pass over x, jitted; inside another jitted function XLA fuses it with what made x and with the write.
    """
    chosen = formats.kv_format(kv_format)
    _check_scale(scale, chosen)
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise InputError("x must be [..., D], got one number.")
    chosen.row_width(x.shape[-1])
    return _quantize(x, _scale_or_one(scale), chosen=chosen, power_of_two=power_of_two)


@partial(jax.jit, static_argnames=("chosen", "power_of_two"))
def _quantize(
    x: Float[Array, "*n D"], scale: Float[Array, ""], *, chosen: KVFormat, power_of_two: bool
) -> Shaped[Array, "*n W"]:
    if chosen.name == "fp8_e4m3":
        return _to_e4m3(x.astype(jnp.float32) / scale)
    if chosen.name != "fp8_ds_mla":
        return x.astype(chosen.dtype)
    tiles = x[..., :DS_LATENT].astype(jnp.float32).reshape(*x.shape[:-1], DS_LATENT // DS_TILE, DS_TILE)
    scales = _tile_scales(tiles, power_of_two)
    values = _to_e4m3(tiles / scales[..., None]).reshape(*x.shape[:-1], DS_LATENT)
    rope = x[..., DS_LATENT:].astype(jnp.bfloat16)
    return jnp.concatenate([_bytes(values), _bytes(scales), _bytes(rope)], axis=-1)


def dequantize_kv(
    cache_rows: Shaped[Array, "*n W"],
    kv_format: str,
    scale: float | Float[Array, ""] | None = None,
    dtype: Any = jnp.float32,
) -> Float[Array, "*n D"]:
    """Latents from cache rows: the inverse of `quantize_kv`, but for what the format rounds away.

    Args:
        cache_rows: `[..., D]` in the format's dtype, or uint8 `[..., 656]` for `fp8_ds_mla`.
        kv_format, scale: as for `quantize_kv`.
        dtype: of the result. Values are multiplied by their scale in float32; for bf16 the scales of `fp8_ds_mla` are
            rounded to bf16 first, as FlashMLA's kernel does, so that both give the same numbers.

    Raises:
        ValueError: as `quantize_kv`, or rows that are not of the format.
    """
    chosen = formats.kv_format(kv_format)
    _check_scale(scale, chosen)
    is_ds_mla = chosen.name == "fp8_ds_mla"
    if cache_rows.dtype != chosen.dtype or (is_ds_mla and cache_rows.shape[-1] != DS_ROW):
        width = f" and {DS_ROW} bytes wide" if is_ds_mla else ""
        raise InputError(
            f"Rows in {chosen.name} must be {jnp.dtype(chosen.dtype).name}{width}, got "
            f"{cache_rows.dtype.name} {cache_rows.shape}."
        )
    return _dequantize(cache_rows, _scale_or_one(scale), chosen=chosen, dtype=jnp.dtype(dtype))


@partial(jax.jit, static_argnames=("chosen", "dtype"))
def _dequantize(
    cache_rows: Shaped[Array, "*n W"], scale: Float[Array, ""], *, chosen: KVFormat, dtype: Any
) -> Float[Array, "*n D"]:
    if chosen.name == "fp8_e4m3":
        return (cache_rows.astype(jnp.float32) * scale).astype(dtype)
    if chosen.name != "fp8_ds_mla":
        return cache_rows.astype(dtype)
    values = jax.lax.bitcast_convert_type(cache_rows[..., :DS_LATENT], jnp.float8_e4m3fn)
    scales = _from_bytes(cache_rows[..., DS_LATENT : DS_ROW - 2 * DS_ROPE], jnp.float32)
    if dtype == jnp.bfloat16:  # a cast and back would be optimized away
        scales = jax.lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=7)
    rope = _from_bytes(cache_rows[..., DS_ROW - 2 * DS_ROPE :], jnp.bfloat16)
    latent = values.astype(jnp.float32).reshape(*scales.shape, DS_TILE) * scales[..., None]
    return jnp.concatenate([latent.reshape(values.shape).astype(dtype), rope.astype(dtype)], axis=-1)


def _check_scale(scale: Any, chosen: KVFormat) -> None:
    if scale is None:
        return
    if not chosen.has_scale:
        raise InputError(f"scale must be None for {chosen.name}, which has no scale per tensor.")
    if np.ndim(scale) != 0 or isinstance(scale, str):
        raise InputError(f"scale must be one number, got {scale!r:.60}.")
    known = isinstance(scale, int | float | np.number | np.ndarray)
    if known and not 0 < scale < float("inf"):
        raise InputError(f"scale must be a positive number, got {scale}.")


def _scale_or_one(scale: Any) -> Float[Array, ""]:
    """None means 1, and so does a traced 0, which could only come from a tensor of zeros."""
    scale = jnp.asarray(1 if scale is None else scale, jnp.float32)
    return jnp.where(scale == 0, 1, scale)


def _tile_scales(tiles: Float[Array, "*n tiles 128"], power_of_two: bool) -> Float[Array, "*n tiles"]:
    magnitude = jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), 0)  # an infinity or NaN must not decide the scale
    scales = jnp.max(magnitude, axis=-1) / E4M3_MAX
    if power_of_two:
        mantissa, exponent = jnp.frexp(scales)  # scales = mantissa · 2^exponent, mantissa in [½, 1)
        scales = jnp.ldexp(jnp.ones_like(scales), exponent - (mantissa == 0.5).astype(exponent.dtype))
    # Below the smallest normal number a division by the scale would overflow; such tiles are zeros to e4m3.
    return jnp.where(magnitude.max(axis=-1) / E4M3_MAX < jnp.finfo(jnp.float32).tiny, 1, scales)


def _to_e4m3(x: Float[Array, "*n"]) -> Shaped[Array, "*n"]:
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def _bytes(x: Shaped[Array, "*n W"]) -> Shaped[Array, "*n bytes"]:
    """The bytes of each row, in little-endian order."""
    as_bytes = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return as_bytes.reshape(*x.shape[:-1], x.shape[-1] * x.dtype.itemsize)


def _from_bytes(rows: Shaped[Array, "*n bytes"], dtype: Any) -> Shaped[Array, "*n W"]:
    size = jnp.dtype(dtype).itemsize
    grouped = rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(grouped, dtype)
