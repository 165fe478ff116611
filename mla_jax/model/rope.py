"""Rotary position embedding as DeepSeek uses it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.config import MLAConfig


def rope_angles(config: MLAConfig, positions: Int[Array, "*n"]) -> Float[Array, "*n half"]:
    """Angle of each rotated pair at each position, in radians, float32."""
    half = config.qk_rope_head_dim // 2
    inverse_frequency = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.einsum("...,h->...h", positions.astype(jnp.float32), inverse_frequency, precision="highest")


def apply_rope(config: MLAConfig, x: Float[Array, "*n R"], angles: Float[Array, "*m half"]) -> Float[Array, "*n R"]:
    """Rotates pairs of x by the angles. The result holds all first members, then all second members.

    DeepSeek-V3's weights produce pairs side by side (x0, x1), (x2, x3), …; like Hugging Face we leave the result
    in halves, which is the order that the cache keeps. Scores do not see the order, because queries and keys
    share it; a cache that two programs share does.
    """
    if config.rope_layout == "pairs_to_halves":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = jnp.split(x, 2, axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
