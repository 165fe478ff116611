"""Rotary position embedding as DeepSeek uses it, plain or stretched by YaRN."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mla_jax.config import MLAConfig, YarnConfig


def rope_angles(config: MLAConfig, positions: Int[Array, "*n"]) -> Float[Array, "*n half"]:
    """Angle of each rotated pair at each position, in radians, float32."""
    frequencies = jnp.asarray(inverse_frequencies(config))
    return jnp.einsum("...,h->...h", positions.astype(jnp.float32), frequencies, precision="highest")


def apply_rope(config: MLAConfig, x: Float[Array, "*n R"], angles: Float[Array, "*m half"]) -> Float[Array, "*n R"]:
    """Rotates pairs of x by the angles, and scales them by YaRN's amplitude.

    DeepSeek's weights produce pairs side by side: (x0, x1), (x2, x3), … The result is laid out as Hugging Face
    leaves it in its cache: V2 as it was, V3 with all first members before all second ones. Scores do not see the
    order, because queries and keys share it; a cache that two programs share does.
    """
    if config.rope_layout == "halves":
        first, second = jnp.split(x, 2, axis=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    amplitude = 1.0 if config.yarn is None else config.yarn.amplitude
    cos, sin = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
    rotated = first * cos - second * sin, second * cos + first * sin
    if config.rope_layout == "pairs":
        return jnp.stack(rotated, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def inverse_frequencies(config: MLAConfig) -> np.ndarray:
    """Radians per token of each rotated pair, float32 `[half]`: theta^(−i / half), or YaRN's blend.

    Computed on the host in the order in which Hugging Face does it: at position 100 000 one unit in the last place
    of a frequency is already 0.01 radians.
    """
    dim = config.qk_rope_head_dim
    wavelengths = (config.rope_theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
    plain = np.float32(1) / wavelengths
    if config.yarn is None:
        return plain
    stretched = np.float32(1) / (np.float32(config.yarn.factor) * wavelengths)
    keep = np.float32(1) - _ramp(config.yarn, config.rope_theta, dim)
    return stretched * (1 - keep) + plain * keep


def _ramp(yarn: YarnConfig, theta: float, dim: int) -> np.ndarray:
    """0 for pairs that turn more than beta_fast times in the original context, 1 below beta_slow times."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    return np.clip(ramp, 0, 1)
