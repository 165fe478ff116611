"""Merging attention over disjoint sets of keys by their log-sum-exp."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_jax.errors import InputError


def merge_states(
    outs: Sequence[Float[Array, "B S H V"]], lses: Sequence[Float[Array, "B H S"]]
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """Attention over the union of disjoint key sets, from the attention over each.

    lse = log Σᵢ exp(lseᵢ), out = Σᵢ exp(lseᵢ − lse) · outᵢ. A part that saw no key has lse −inf and counts for
    nothing, whatever its out holds; if all are empty, out is 0 and lse −inf.

    Args:
        outs: one or more arrays `[B, S, H, V]` of one shape and dtype.
        lses: as many arrays `[B, H, S]`, float32, natural logarithm.

    Returns:
        out `[B, S, H, V]` in the dtype of `outs`, lse float32 `[B, H, S]`.

    Raises:
        ValueError: no parts, as many outs as lses not given, or shapes that do not belong together.

    Cost: reads every part once; accumulates in float32.
    """
    if not outs or len(outs) != len(lses):
        raise InputError(f"merge_states needs as many outs as lses and at least one, got {len(outs)} and {len(lses)}.")
    shape = outs[0].shape
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != shape or len(shape) != 4 or lse.shape != (shape[0], shape[2], shape[1]):
            raise InputError(
                f"merge_states: every out must be [B, S, H, V] = {shape} and every lse [B, H, S], "
                f"got {out.shape} and {lse.shape}."
            )
    stacked = jnp.stack([lse.astype(jnp.float32) for lse in lses])  # [parts, B, H, S]
    maximum = jnp.max(stacked, axis=0, keepdims=True)
    maximum = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(stacked - maximum)
    total = jnp.sum(weights, axis=0, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).transpose(0, 1, 3, 2)[..., None]  # [parts, B, S, H, 1]
    merged = jnp.zeros(shape, jnp.float32)
    for weight, out in zip(weights, outs, strict=True):
        merged += jnp.where(weight > 0, weight * out.astype(jnp.float32), 0)
    return merged.astype(outs[0].dtype), (maximum + jnp.log(total))[0]
