"""How a page of `fp8_ds_mla` lies in memory: 64 rows of 512 e4m3 numbers, 4 float32 scales, 64 bf16 numbers."""

import jax
import jax.numpy as jnp
from jax import lax

from mla_jax.attention.mosaic_gpu.config import LATENT, PAGE, ROPE

GROUP = 128  # dims that share a scale
GROUPS = LATENT // GROUP
SCALES_AT = LATENT  # byte of a row
ROW_BYTES = LATENT + 4 * GROUPS + 2 * ROPE
LINE = 256  # bytes of a line: a page is copied in lines, since no dim of a copy may be longer
LINES = PAGE * ROW_BYTES // LINE
# Bits of the float32 powers of two between which sizes count as what they are. Where queries and keys both have no
# latent part, the product of their rope parts is divided by the smallest of both: it must not overflow.
SMALLEST, LARGEST = (127 - 32) << 23, (127 + 64) << 23


def split_rows(page: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Latents [64, 512] float32 without their scales, scales [64, 4], rope part [64, 64] bf16 of a page of bytes."""
    rows = page.reshape(PAGE, ROW_BYTES)
    latent = lax.bitcast_convert_type(rows[:, :LATENT], jnp.float8_e4m3fn).astype(jnp.float32)
    scales, rope = rows[:, SCALES_AT : SCALES_AT + 4 * GROUPS], rows[:, SCALES_AT + 4 * GROUPS :]
    return (
        latent,
        lax.bitcast_convert_type(scales.reshape(PAGE, GROUPS, 4), jnp.float32),
        lax.bitcast_convert_type(rope.reshape(PAGE, ROPE, 2), jnp.bfloat16),
    )
