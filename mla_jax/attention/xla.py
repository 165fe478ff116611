"""Decode in plain XLA, anywhere JAX runs: walks the cache in chunks with an online softmax."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mla_jax.attention.operands import HIGHEST, as_numbers, out_dtype, product_dtype
from mla_jax.attention.visibility import visible

CHUNK_PAGES = 8  # pages; on 2 CPU cores 4, 8 and 16 differ by less than the noise, 1 and 2 are slower


class _Running(NamedTuple):
    """Online softmax over the chunks seen so far; R = S·H query rows."""

    out: Float[Array, "B R D"]  # unnormalized
    maximum: Float[Array, "B R"]
    total: Float[Array, "B R"]


def decode(
    q: Float[Array, "B S H D"],
    kv_cache: Shaped[Array, "P T W"],
    block_table: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    *,
    logit_scale: Float[Array, ""] | Float[Array, "B S H"],
    value_scale: Float[Array, ""] | None,
    d_v: int,
    causal: bool,
    tree_mask: Bool[Array, "B S S"] | None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """`mla_decode` for checked arguments.

    Reads ceil(max(kv_lens) / 512) chunks of every request, and only pages that a request owns. Temporaries:
    B · 512 · (D + S·H) numbers, whatever the context. Products are made in
    `product_dtype` and accumulate in float32.
    """
    num_requests, num_queries, num_heads, d = q.shape
    page_size = kv_cache.shape[1]
    dtype = product_dtype(q, kv_cache)
    rows = q.reshape(num_requests, num_queries * num_heads, d).astype(dtype)
    if logit_scale.ndim:
        logit_scale = logit_scale.reshape(*rows.shape[:2], 1)
    chunk_tokens = CHUNK_PAGES * page_size
    readable_lens = jnp.minimum(kv_lens, block_table.shape[1] * page_size)

    def step(chunk: Int[Array, ""], running: _Running) -> _Running:
        positions = chunk * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
        keys = _read_chunk(kv_cache, block_table, readable_lens, positions, dtype)
        seen = visible(positions, kv_lens, num_queries, causal, tree_mask)
        seen &= (positions[None] < readable_lens[:, None])[:, None]
        return _absorb_chunk(running, rows, keys, jnp.repeat(seen, num_heads, axis=1), logit_scale)

    start = _Running(
        out=jnp.zeros(rows.shape, jnp.float32),
        maximum=jnp.full(rows.shape[:2], -jnp.inf, jnp.float32),
        total=jnp.zeros(rows.shape[:2], jnp.float32),
    )
    if block_table.shape[1] <= CHUNK_PAGES:
        end = step(jnp.int32(0), start)  # a GPU captures straight-line code into a graph, and loops not
    else:
        start = _varying_as((rows, kv_cache, block_table, kv_lens, tree_mask, logit_scale), start)
        num_chunks = (jnp.max(readable_lens, initial=0) + chunk_tokens - 1) // chunk_tokens
        end = jax.lax.fori_loop(0, num_chunks, step, start)

    out = end.out[..., :d_v] / jnp.where(end.total == 0, 1, end.total)[..., None]
    out = out if value_scale is None else out * value_scale
    lse = _finite(end.maximum) + jnp.log(end.total)  # log 0 = −inf: a row that saw no key
    lse = lse.reshape(num_requests, num_queries, num_heads)
    return out.reshape(num_requests, num_queries, num_heads, d_v).astype(out_dtype(q)), lse.transpose(0, 2, 1)


def _varying_as(inputs: Any, start: _Running) -> _Running:
    """What a loop over these inputs can start from inside `shard_map`, where it varies over the same mesh axes."""
    firsts = [x[(0,) * x.ndim] for x in jax.tree.leaves(inputs)]
    zero = sum(((x != x) & False).astype(jnp.float32) for x in firsts)  # whatever numbers they are
    return jax.tree.map(lambda x: x + zero, start)


def _read_chunk(
    kv_cache: Shaped[Array, "P T W"],
    block_table: Int[Array, "B M"],
    lens: Int[Array, "B"],
    positions: Int[Array, "C"],
    dtype: Any,
) -> Float[Array, "B C D"]:
    """The cache rows at positions of every request as numbers, zero past its length.

    Table entries past a request's length hold anything, and pages without an owner may hold NaN. There we read a
    page that somebody owns (the first of the longest request) and clear it.
    """
    page_size = kv_cache.shape[1]
    blocks = positions[::page_size] // page_size
    pages = jnp.take(block_table, blocks, axis=1, mode="clip")
    somebodys = block_table[jnp.argmax(lens), 0]
    pages = jnp.where(blocks[None] * page_size < lens[:, None], pages, somebodys)
    rows = as_numbers(jnp.take(kv_cache, pages, axis=0, mode="clip"), dtype)
    rows = rows.reshape(lens.shape[0], positions.shape[0], -1)
    return jnp.where((positions[None] < lens[:, None])[..., None], rows, 0)


def _absorb_chunk(
    running: _Running,
    rows: Float[Array, "B R D"],
    keys: Float[Array, "B C D"],
    seen: Bool[Array, "B R C"],
    logit_scale: Float[Array, ""] | Float[Array, "B R 1"],
) -> _Running:
    scores = jnp.einsum("brd,bcd->brc", rows, keys, preferred_element_type=jnp.float32, precision=HIGHEST)
    scores = jnp.where(seen, scores * logit_scale, -jnp.inf)
    maximum = jnp.maximum(running.maximum, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - _finite(maximum)[..., None])
    rescale = jnp.exp(running.maximum - _finite(maximum))
    # The value is the key's first d_v numbers. Multiplying by all D and cutting at the end costs D/d_v more
    # arithmetic and saves a copy of the chunk, which is slower on a CPU.
    gained = jnp.einsum(
        "brc,bcd->brd", weights.astype(keys.dtype), keys, preferred_element_type=jnp.float32, precision=HIGHEST
    )
    return _Running(
        out=running.out * rescale[..., None] + gained,
        maximum=maximum,
        total=running.total * rescale + jnp.sum(weights, axis=-1),
    )


def _finite(maximum: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """0 in place of −inf, so that a row that has seen nothing yet gives exp(−inf − 0) = 0 and not NaN."""
    return jnp.where(jnp.isneginf(maximum), 0, maximum)
