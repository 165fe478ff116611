"""The persistent kernel for FP8 caches: 3 warpgroups per CTA, a ring of key blocks between them.

    score           S = Q Kᵀ of a block in e4m3, softmax, P in float16
    values, left    Oᵀ[0:256]   = decay * Oᵀ + Vᵀ Pᵀ of a block, and refill its half of the slot
    values, right   Oᵀ[256:512] = decay * Oᵀ + Vᵀ Pᵀ of a block, and refill its half of the slot

A block passes shared memory once, as bytes. Queries in bf16 are the sum of two e4m3 numbers each, so that their
products, too, take the cache as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_values import accumulate
from mla_jax.attention.mosaic_gpu.config import HALF, PAGE, ROPE, ROWS, Problem
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS, Fp8Config
from mla_jax.attention.mosaic_gpu.fp8_hardware import COPIED, KEYS_AT_ONCE, LINE, LINES, PART, ROPE_LINES
from mla_jax.attention.mosaic_gpu.fp8_scores import score
from mla_jax.attention.mosaic_gpu.fp8_values import Fp8Values
from mla_jax.attention.mosaic_gpu.fp8_work import Fp8Cta, Fp8Items
from mla_jax.attention.mosaic_gpu.persistent import (
    Signals,
    barriers,
    run_persistent,
)
from mla_jax.attention.mosaic_gpu.roles import run_roles
from mla_jax.attention.mosaic_gpu.work import Global, Span
from mla_jax.schedule import TileSchedule


def run_fp8_kernel(
    problem: Problem,
    config: Fp8Config,
    query_scale: jax.Array,
    value_scale: jax.Array,
    inputs: tuple[jax.Array, ...],
    schedule: TileSchedule,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Launch; `inputs` are the first eight fields of `Global`, with q [B * query_parts, rows, 576] in e4m3.

    Returns out [B, rows, 512], lse [B, rows].
    """
    emulate = interpret is not None

    def body(query_scale: Any, value_scale: Any, *refs: Any, **scratch: Any) -> None:
        _cta_body(problem, config, emulate, query_scale, value_scale, Global(*refs), **scratch)

    inputs, scratch = (query_scale, value_scale, *inputs), _scratch(problem, config, emulate=emulate)
    return run_persistent("mla_decode_fp8", problem, body, scratch, inputs, schedule, interpret=interpret)


def _scratch(problem: Problem, config: Fp8Config, *, emulate: bool) -> dict[str, Any]:
    def lines(count: int, transforms: Any) -> Any:
        return plgpu.SMEM((count, HALF // LINE, ROWS, LINE), jnp.float8_e4m3fn, transforms=transforms)

    def rope(count: int) -> Any:
        return plgpu.SMEM((count, ROWS, ROPE), jnp.float8_e4m3fn, transforms=ROPE_LINES)

    slots, parts = config.slots, config.query_parts
    # Two views of the same memory, of which the interpreter needs one.
    halves = lines(2 * slots, LINES)
    halves = halves if emulate else plgpu.RefUnion(lines(2 * slots, COPIED), halves)
    probabilities = (BUFFERS, PAGE // KEYS_AT_ONCE, problem.copied_rows, KEYS_AT_ONCE)
    return {
        "halves": halves,
        "rope": rope(slots),
        "query_halves": lines(2 * parts, LINES),
        "query_rope": rope(parts),
        "probabilities": plgpu.SMEM(probabilities, jnp.float16, transforms=PART),
        "row_vectors": plgpu.SMEM((2 * BUFFERS + 1, ROWS), jnp.float32),
        "half_full": barriers(2 * slots, arrivals=2),  # two lines
        "rope_full": barriers(slots),
        "scored": barriers(2 * BUFFERS),  # these and the following are signals in the interpreter
        "buffer_free": barriers(BUFFERS, arrivals=2),
    }


def _cta_body(
    problem: Problem,
    config: Fp8Config,
    emulate: bool,
    query_scale: Any,
    value_scale: Any,
    memory: Global,
    **scratch: Any,
) -> None:
    signals = Signals(BUFFERS, scratch, emulate=emulate)
    copied, read = (scratch["halves"],) * 2 if emulate else scratch["halves"]
    part = lax.axis_index("part")
    cta = Fp8Cta(
        config=config,
        problem=problem,
        emulate=emulate,
        memory=memory,
        slots=Fp8Items(copied, scratch["rope"]),
        keys=Fp8Items(read, scratch["rope"]),
        half_full=scratch["half_full"],
        rope_full=scratch["rope_full"],
        queries=Fp8Items(scratch["query_halves"], scratch["query_rope"]),
        probabilities=scratch["probabilities"],
        row_vectors=scratch["row_vectors"],
        scored=signals.take_by_side("scored", 2),
        buffer_free=signals.take("buffer_free", 3),
        query_scale=query_scale,
        value_scale=value_scale,
        span=Span.load(memory.metadata, part),
        part=part,
        row_block=lax.axis_index("row_block"),
    )
    run_roles(cta, score, lambda cta, side: accumulate(cta, side, Fp8Values(cta, side)))
