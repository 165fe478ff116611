"""The small parts of a decoder layer."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_jax.attention.operands import HIGHEST
from mla_jax.model.params import MLPParams

# float32 means float32: on a GPU JAX would otherwise use TF32 for it. bf16 and fp16 products are not affected.
einsum = partial(jnp.einsum, precision=HIGHEST)


def linear(x: Float[Array, "*n I"], weight: Float[Array, "O I"]) -> Float[Array, "*n O"]:
    """x weightᵀ, with the weight as checkpoints hold it."""
    return einsum("...i,oi->...o", x, weight)


def rms_norm(x: Float[Array, "*n E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "*n E"]:
    """x / rms(x) · weight, the statistics in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return scale_last(normed.astype(x.dtype), weight)


def scale_last(x: Float[Array, "*n E"], weight: Float[Array, "E"]) -> Float[Array, "*n E"]:
    """x · weight along the last axis (explicit, since implicit rank promotion may be forbidden)."""
    return x * jnp.expand_dims(weight, range(x.ndim - 1))


def mlp(p: MLPParams, x: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
    """SwiGLU feed-forward."""
    return linear(jax.nn.silu(linear(x, p.gate_proj)) * linear(x, p.up_proj), p.down_proj)
