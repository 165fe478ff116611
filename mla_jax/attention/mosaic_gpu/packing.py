"""Query rows as the kernels take them: S * H of them, packed and padded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from mla_jax.attention.mosaic_gpu.config import DIM, LATENT, ROWS, WORD, Problem, padded_rows
from mla_jax.schedule import TileSchedule


def describe(
    q: Float[Array, "B S H 576"],
    rows: int,
    schedule: TileSchedule,
    tree_mask: Bool[Array, "B S S"] | None,
    *,
    dtype: Any,
    causal: bool,
    query_parts: int = 1,
) -> Problem:
    """The static shape of a call with so many packed rows and results in dtype."""
    batch, tokens, heads, _ = q.shape
    return Problem(
        batch=batch,
        tokens=tokens,
        heads=heads,
        rows=rows,
        parts=schedule.metadata.shape[0],
        dtype=jnp.dtype(dtype),
        causal=causal and tree_mask is None,
        tree=tree_mask is not None,
        query_parts=query_parts,
    )


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


def tree_words(tree_mask: Bool[Array, "B S S"] | None, problem: Problem) -> Int32[Array, "B words padded"]:
    """[B, ceil(S / 32), row_blocks * 64]: bit i of word w of a row says whether it sees key 32 w + i of the last S.

    [1, 1, 1] without a mask.
    """
    if tree_mask is None:
        return jnp.zeros((1, 1, 1), jnp.int32)
    tokens = problem.tokens
    count = -(-tokens // WORD)
    seen = jnp.pad(tree_mask, ((0, 0), (0, 0), (0, count * WORD - tokens))).reshape(-1, tokens, count, WORD)
    bits = jnp.asarray(np.uint32(1) << np.arange(WORD, dtype=np.uint32))
    words = jnp.sum(jnp.where(seen, bits, jnp.uint32(0)), axis=-1, dtype=jnp.uint32).swapaxes(1, 2)
    words = jnp.repeat(jax.lax.bitcast_convert_type(words, jnp.int32), problem.heads, axis=2)
    return jnp.pad(words, ((0, 0), (0, 0), (0, problem.row_blocks * ROWS - words.shape[2])))


def kernel_inputs(
    q: Array,
    kv_cache: Array,
    block_table: Array,
    kv_lens: Array,
    scale: Array,
    tree_mask: Bool[Array, "B S S"] | None,
    schedule: TileSchedule,
    problem: Problem,
) -> tuple[Array, ...]:
    """The first eight fields of `work.Global`."""
    parts = (schedule.metadata, schedule.num_splits)
    return (q, kv_cache, block_table, kv_lens, *parts, scale, tree_words(tree_mask, problem))
