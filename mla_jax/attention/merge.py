"""Merging attention over disjoint sets of keys by their log-sum-exp."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        ValueError: no parts, not as many outs as lses, or shapes or dtypes that do not belong together.

    Cost: reads every part once; accumulates in float32.
    """
    _check_parts(outs, lses)
    shape = outs[0].shape
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


def _check_parts(outs: Any, lses: Any) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, list | tuple) and np.ndim(parts) == 0:
            raise InputError(f"merge_states: {name} must be a sequence of arrays, got {type(parts).__name__}.")
    if not len(outs) or len(outs) != len(lses):
        raise InputError(f"merge_states needs as many outs as lses and one at least, got {len(outs)} and {len(lses)}.")
    for part in (*outs, *lses):
        if not isinstance(part, jax.Array | np.ndarray) or not jnp.issubdtype(part.dtype, jnp.floating):
            found = getattr(part, "dtype", type(part).__name__)
            raise InputError(f"merge_states: every out and lse must be an array of floats, got {found}.")
    first = outs[0]
    for out, lse in zip(outs, lses, strict=True):
        if out.dtype != first.dtype:
            raise InputError(f"merge_states: all outs must be of one dtype, got {first.dtype} and {out.dtype}.")
        if out.ndim != 4 or out.shape != first.shape or lse.shape != (out.shape[0], out.shape[2], out.shape[1]):
            raise InputError(
                f"merge_states: every out must be [B, S, H, V] like the first, {first.shape}, and every lse "
                f"[B, H, S], got {out.shape} and {lse.shape}."
            )
