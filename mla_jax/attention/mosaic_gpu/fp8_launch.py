"""`decode_fp8_with`: queries in e4m3, packing of query rows, and the kernel under its own jit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.attention.mosaic_gpu.config import DIM, ROWS, padded_rows
from mla_jax.attention.mosaic_gpu.fp8_config import Fp8Config, chosen_for, shared_memory
from mla_jax.attention.mosaic_gpu.fp8_kernel import run_fp8_kernel
from mla_jax.attention.mosaic_gpu.packing import describe, kernel_inputs, pack, unpack
from mla_jax.attention.operands import out_dtype
from mla_jax.attention.queries import power_of_two
from mla_jax.schedule import TileSchedule

LARGEST = 6  # binary exponent of a row's largest number: reduce_precision's 4 bits of exponent end at 240


def fp8_config_for(q: jax.ShapeDtypeStruct | jax.Array) -> Fp8Config:
    """The configuration for calls with queries of this shape and dtype: as many slots as there is room for."""
    rows = min(ROWS, padded_rows(q.shape[1] * q.shape[2]))
    parts = 1 if q.dtype == jnp.float8_e4m3fn else 2
    return Fp8Config(query_parts=parts, **chosen_for(rows, lambda slots: shared_memory(slots, parts, rows)))


@functools.partial(jax.jit, static_argnames=("config", "causal", "interpret"))
def decode_fp8_with(
    config: Fp8Config,
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    kv_lens: jax.Array,
    logit_scale: jax.Array,
    value_scale: jax.Array,
    tree_mask: jax.Array | None,
    schedule: TileSchedule,
    *,
    causal: bool,
    row_scale: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The FP8 kernel with a configuration and without checks; `interpret` is for tests without a GPU.

    `row_scale` float32 [B, S, H], of any sign, is a factor of the logits beside `logit_scale`.
    """
    packed = pack(q)
    rows = packed.shape[1]
    made = {"dtype": out_dtype(q), "causal": causal, "query_parts": config.query_parts}
    problem = describe(q, rows, schedule, tree_mask, **made)
    parts, scale = split_queries(packed)
    if row_scale is not None:
        parts, scale = _with_row_scale(parts, scale, row_scale)
    scale = jnp.pad(scale, ((0, 0), (0, problem.row_blocks * ROWS - rows)))
    arrays = (parts.reshape(-1, rows, DIM), kv_cache, block_table, kv_lens, logit_scale)
    inputs = kernel_inputs(*arrays, tree_mask, schedule, problem)
    out, lse = run_fp8_kernel(problem, config, scale, value_scale, inputs, schedule, interpret=interpret)
    return unpack(out, lse, problem)


def split_queries(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e4m3 numbers [B, parts, rows, D] and a factor for each row, float32 [B, rows], whose sum and product are q.

    bf16 has 8 significant bits, e4m3 4: a number and what rounding it left hold them all. The factor, a power of two,
    brings a row's largest number to 64 … 128; numbers below 2⁻⁸ of that lose bits, by less than 2⁻¹⁶ of the largest.
    """
    if q.dtype == jnp.float8_e4m3fn:
        return q[:, None], jnp.ones(q.shape[:2], jnp.float32)
    numbers = q.astype(jnp.float32)
    largest = jnp.max(jnp.abs(numbers), axis=-1)
    exponent = jnp.where(jnp.isfinite(largest) & (largest > 0), jnp.frexp(largest)[1] - 1, 0)
    exponent = jnp.clip(exponent - LARGEST, -126, 126)
    numbers = numbers * power_of_two(-exponent)[..., None]
    # Not a cast to e4m3 and back, which XLA may leave out: it is free to keep more bits than it was told to.
    high = jax.lax.reduce_precision(numbers, exponent_bits=4, mantissa_bits=3)
    low = (numbers - high).astype(jnp.float8_e4m3fn)
    high = high.astype(jnp.float8_e4m3fn)
    return jnp.stack([high, low], axis=1), power_of_two(exponent)


def _with_row_scale(parts: jax.Array, scale: jax.Array, row_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `split_queries` returned, with a factor [B, S, H] for each row more.

    The kernel's factors of rows are not negative, as it takes the largest product for the largest logit: so the sign
    goes to the numbers.
    """
    used = row_scale.reshape(row_scale.shape[0], -1)
    factor = jnp.pad(used, ((0, 0), (0, scale.shape[1] - used.shape[1])))
    sign = jnp.where(factor < 0, jnp.uint8(0x80), jnp.uint8(0))[:, None, :, None]
    flipped = jax.lax.bitcast_convert_type(parts, jnp.uint8) ^ sign
    return jax.lax.bitcast_convert_type(flipped, jnp.float8_e4m3fn), scale * jnp.abs(factor)
