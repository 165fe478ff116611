"""Query rows as the kernels take them: S * H of them, packed and padded."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from mla_jax.attention.mosaic_gpu.config import DIM, LATENT, ROWS, Problem, padded_rows


def pack(q: Float[Array, "B S H 576"]) -> Float[Array, "B rows 576"]:
    """S * H rows and zeros, as many as copies can address."""
    batch, tokens, heads, _ = q.shape
    rows = padded_rows(tokens * heads)
    packed = q.reshape(batch, tokens * heads, DIM)
    return packed if rows == tokens * heads else jnp.pad(packed, ((0, 0), (0, rows - tokens * heads), (0, 0)))


def unpack(
    out: Float[Array, "B rows 512"], lse: Float32[Array, "B rows"], problem: Problem
) -> tuple[Float[Array, "B S H 512"], Float32[Array, "B H S"]]:
    """The results of the rows that were packed."""
    shape = (problem.batch, problem.tokens, problem.heads)
    used = problem.tokens * problem.heads
    return out[:, :used].reshape(*shape, LATENT), lse[:, :used].reshape(shape).swapaxes(1, 2)


def tree_words(tree_mask: Bool[Array, "B S S"] | None, problem: Problem) -> Int32[Array, "B padded"]:
    """[B, row_blocks * 64]: bit i of a row says whether it sees the i-th of the last S keys; [1, 1] without a mask."""
    if tree_mask is None:
        return jnp.zeros((1, 1), jnp.int32)
    bits = jnp.asarray(np.uint32(1) << np.arange(problem.tokens, dtype=np.uint32))
    words = jnp.sum(jnp.where(tree_mask, bits[None, None, :], jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    words = jnp.repeat(jax.lax.bitcast_convert_type(words, jnp.int32), problem.heads, axis=1)
    return jnp.pad(words, ((0, 0), (0, problem.row_blocks * ROWS - words.shape[1])))
