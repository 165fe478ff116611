"""`decode`: checks, packing of query rows, and the kernel under its own jit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from mla_jax.attention.mosaic_gpu.config import ROWS, KernelConfig
from mla_jax.attention.mosaic_gpu.ds_launch import decode_ds_with, ds_config_for
from mla_jax.attention.mosaic_gpu.fp8_launch import decode_fp8_with, fp8_config_for
from mla_jax.attention.mosaic_gpu.kernel import run_kernel
from mla_jax.attention.mosaic_gpu.packing import describe, kernel_inputs, pack, unpack
from mla_jax.attention.mosaic_gpu.requirements import num_sms
from mla_jax.errors import InputError
from mla_jax.schedule import ORDERS, TileSchedule, num_sm_parts, tile_schedule


def decode(
    q: Float[Array, "B S H 576"],
    kv_cache: Float[Array, "P 64 576"] | UInt8[Array, "P 64 656"],
    block_table: Int32[Array, "B max_pages"],
    kv_lens: Int32[Array, " B"],
    *,
    logit_scale: float | Float32[Array, ""] | Float32[Array, "B S H"],
    value_scale: Float32[Array, ""] | None = None,
    causal: bool = True,
    tree_mask: Bool[Array, "B S S"] | None = None,
    schedule: TileSchedule | None = None,
) -> tuple[Float[Array, "B S H 512"], Float32[Array, "B H S"]]:
    """`mla_decode` on a Hopper GPU, for arguments that `cannot_run` has let pass.

    Rows (S * H) are packed and padded to 64. A logit_scale for each row goes with a cache in float8_e4m3fn only.
    Without a schedule one is computed for this call; layers of one step should share theirs.

    Returns:
        out in q's dtype, bf16 for an e4m3 q, lse float32 in natural log; a row that sees no key has out 0 and lse
        -inf.

    Raises:
        ValueError: a schedule of more parts than this GPU runs at once, or with columns in another order.

    Cost: reads every key once per 64 rows; workspace 2 * parts * ceil(S * H / 64) * 64 rows of 1060
    bytes, at most 18 MB. The kernel has its own jit, so layers of equal shapes compile it once.

    Two of these kernels must not run at the same time on one GPU: CTAs that share a request wait for each
    other, so all of a kernel's CTAs must be on the GPU together. XLA runs the calls of a program in turn.
    """
    if schedule is None:
        schedule = schedule_for(q, kv_lens)
    else:
        _check_schedule(schedule, q)
    tokens = q.shape[1]
    row_scale = jnp.asarray(logit_scale, jnp.float32) if jnp.ndim(logit_scale) else None
    scale = jnp.asarray(1 if jnp.ndim(logit_scale) else logit_scale, jnp.float32).reshape(1)
    causal = causal and tokens > 1  # one kernel for one token
    if kv_cache.dtype == jnp.uint8:
        config = ds_config_for(q)
        return decode_ds_with(config, q, kv_cache, block_table, kv_lens, scale, tree_mask, schedule, causal=causal)
    if kv_cache.dtype == jnp.float8_e4m3fn:
        value_scale = jnp.asarray(1 if value_scale is None else value_scale, jnp.float32).reshape(1)
        fp8, arrays = fp8_config_for(q), (q, kv_cache, block_table, kv_lens, scale, value_scale)
        return decode_fp8_with(fp8, *arrays, tree_mask, schedule, causal=causal, row_scale=row_scale)
    return decode_with(config_for(q), q, kv_cache, block_table, kv_lens, scale, tree_mask, schedule, causal=causal)


def schedule_for(
    q: jax.ShapeDtypeStruct | Array, kv_lens: Int32[Array, " B"], config: KernelConfig | None = None
) -> TileSchedule:
    """The schedule of all calls with queries of this shape and these lengths."""
    _, tokens, heads, _ = q.shape
    overhead = (config or config_for(q)).request_overhead
    return tile_schedule(kv_lens, num_sm_parts(num_sms(), tokens, heads), request_overhead=overhead)


def config_for(q: jax.ShapeDtypeStruct | Array) -> KernelConfig:
    """The configuration for calls with queries of this shape."""
    return KernelConfig()


def _check_schedule(schedule: TileSchedule, q: Array) -> None:
    schedule.require_order(ORDERS[0], "mosaic_gpu")
    _, tokens, heads, _ = q.shape
    parts, row_blocks, sms = schedule.metadata.shape[0], -(-tokens * heads // ROWS), num_sms()
    if parts > 1 and parts * row_blocks > sms:
        raise InputError(
            f"schedule has {parts} parts; with {row_blocks} blocks of 64 query rows they exceed this GPU's {sms} "
            f"multiprocessors, and all must run at once; make it with step_schedule, or num_sm_parts({sms}, {tokens}, "
            f"{heads})."
        )


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
    packed = pack(q)
    problem = describe(q, packed.shape[1], schedule, tree_mask, dtype=q.dtype, causal=causal)
    arrays = (packed, kv_cache, block_table, kv_lens, scale)
    inputs = kernel_inputs(*arrays, tree_mask, schedule, problem)
    out, lse = run_kernel(problem, config, inputs, schedule, interpret=interpret)
    return unpack(out, lse, problem)
