"""`decode`: checks, packing of query rows, and the kernel under its own jit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32

from mla_jax.attention.mosaic_gpu.config import DIM, LATENT, PAGE, ROWS, KernelConfig, Problem, padded_rows
from mla_jax.attention.mosaic_gpu.kernel import run_kernel
from mla_jax.schedule import TileSchedule, num_sm_parts, tile_schedule

H200_SMS = 132
MAX_TREE_TOKENS = 32  # a row's tree mask is one 32-bit word


def can_run(q: Any, kv_cache: Any, *, d_v: int = LATENT, tree_mask: Any = None) -> str | None:
    """Why this call cannot run here, in one sentence; None if it can. Reads shapes, dtypes and the device."""
    if reason := _unsupported_call(q, kv_cache, d_v, tree_mask):
        return reason
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != "9.0":
        found = f"{device.device_kind} (compute capability {capability})" if capability else device.platform
        return f"mosaic_gpu needs a Hopper GPU (compute capability 9.0), found {found}"
    return None


def _unsupported_call(q: Any, kv_cache: Any, d_v: int, tree_mask: Any) -> str | None:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"mosaic_gpu computes in bfloat16 or float16, got q in {q.dtype}"
    if kv_cache.dtype != q.dtype:
        return f"mosaic_gpu needs q and kv_cache of one dtype, got {q.dtype} and {kv_cache.dtype}"
    if q.shape[-1] != DIM or d_v != LATENT:
        return f"mosaic_gpu is built for 576 dims with 512 value dims, got {q.shape[-1]} and {d_v}"
    if kv_cache.ndim != 3 or kv_cache.shape[1:] != (PAGE, DIM):
        return f"mosaic_gpu needs kv_cache [pages, 64, 576], got {kv_cache.shape}"
    if tree_mask is not None and q.shape[1] > MAX_TREE_TOKENS:
        return f"mosaic_gpu takes tree masks of up to {MAX_TREE_TOKENS} tokens, got {q.shape[1]}"
    return None


def decode(
    q: Float[Array, "B S H 576"],
    kv_cache: Float[Array, "P 64 576"],
    block_table: Int32[Array, "B max_pages"],
    kv_lens: Int32[Array, " B"],
    *,
    d_v: int = LATENT,
    sm_scale: float | Float32[Array, ""] = DIM**-0.5,
    causal: bool = True,
    tree_mask: Bool[Array, "B S S"] | None = None,
    schedule: TileSchedule | None = None,
) -> tuple[Float[Array, "B S H 512"], Float32[Array, "B H S"]]:
    """Paged MLA decode on a Hopper GPU; the semantics are those of `mla_decode`.

    Rows (S * H) are packed and padded to 64. Without a schedule one is computed for this call; layers of
    one step should share theirs.

    Returns:
        out in q's dtype, lse float32 in natural log; a row that sees no key has out 0 and lse -inf.

    Raises:
        NotImplementedError: the reason of `can_run`, or a schedule of more parts than this GPU runs at once.

    Cost: reads every key once per 64 rows; workspace 2 * parts * ceil(S * H / 64) * 64 * 513 float32, at
    most 35 MB. The kernel has its own jit, so layers of equal shapes compile it once.

    Two of these kernels must not run at the same time on one GPU: CTAs that share a request wait for each
    other, so all of a kernel's CTAs must be on the GPU together. XLA runs the calls of a program in turn.
    """
    if reason := can_run(q, kv_cache, d_v=d_v, tree_mask=tree_mask):
        raise NotImplementedError(reason)
    _, tokens, heads, _ = q.shape
    sms = getattr(jax.devices()[0], "core_count", H200_SMS)
    if schedule is None:
        schedule = tile_schedule(kv_lens, num_sm_parts(sms, tokens, heads))
    parts, row_blocks = schedule.metadata.shape[0], -(-tokens * heads // ROWS)
    if parts > 1 and parts * row_blocks > sms:
        raise NotImplementedError(
            f"all CTAs run at once: a schedule of {parts} parts with {row_blocks} blocks of 64 rows "
            f"exceeds {sms} SMs; make it with num_sm_parts({sms}, {tokens}, {heads})"
        )
    scale = jnp.asarray(sm_scale, jnp.float32).reshape(1)
    config = KernelConfig()
    return decode_with(config, q, kv_cache, block_table, kv_lens, scale, tree_mask, schedule, causal=causal)


@functools.partial(jax.jit, static_argnames=("config", "causal", "interpret"))
def decode_with(
    config: KernelConfig,
    q: Array,
    kv_cache: Array,
    block_table: Array,
    kv_lens: Array,
    scale: Array,
    tree_mask: Array | None,
    schedule: TileSchedule,
    *,
    causal: bool,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """`decode` with a configuration and without checks; `interpret` is for tests without a GPU."""
    batch, tokens, heads, _ = q.shape
    rows = padded_rows(tokens * heads)
    problem = Problem(
        batch=batch,
        tokens=tokens,
        heads=heads,
        rows=rows,
        parts=schedule.metadata.shape[0],
        dtype=jnp.dtype(q.dtype),
        causal=causal and tree_mask is None,
        tree=tree_mask is not None,
    )
    packed = q.reshape(batch, tokens * heads, DIM)
    if rows != tokens * heads:
        packed = jnp.pad(packed, ((0, 0), (0, rows - tokens * heads), (0, 0)))
    inputs = (
        packed,
        kv_cache,
        block_table,
        kv_lens,
        schedule.metadata,
        schedule.num_splits,
        scale,
        _tree_words(tree_mask, problem),
    )
    out, lse = run_kernel(problem, config, inputs, schedule, interpret=interpret)
    out = out[:, : tokens * heads].reshape(batch, tokens, heads, LATENT)
    lse = lse[:, : tokens * heads].reshape(batch, tokens, heads)
    return out, lse.swapaxes(1, 2)


def _tree_words(tree_mask: Array | None, problem: Problem) -> Array:
    """[B, row_blocks * 64] int32: bit i of a row says whether it sees the i-th of the last S keys."""
    if tree_mask is None:
        return jnp.zeros((1, 1), jnp.int32)
    bits = jnp.asarray(np.uint32(1) << np.arange(problem.tokens, dtype=np.uint32))
    words = jnp.sum(jnp.where(tree_mask, bits[None, None, :], jnp.uint32(0)), axis=-1, dtype=jnp.uint32)
    words = jnp.repeat(jax.lax.bitcast_convert_type(words, jnp.int32), problem.heads, axis=1)
    return jnp.pad(words, ((0, 0), (0, problem.row_blocks * ROWS - words.shape[1])))
