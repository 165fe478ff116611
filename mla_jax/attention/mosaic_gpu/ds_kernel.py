"""The persistent kernel for caches in fp8_ds_mla: 3 warpgroups per CTA, a ring of pages between them.

    score           Sᵀ = K Qᵀ of a block in 16 bits, softmax, P in float16
    values, left    Oᵀ[0:256]   = decay * Oᵀ + Vᵀ Pᵀ of a block, and refill its slot
    values, right   Oᵀ[256:512] = decay * Oᵀ + Vᵀ Pᵀ of a block

A page is one copy, and lies in shared memory as it does in the cache. Every role widens what it needs on the way to
registers. A key's scales are split into its unit, a power of two, and numbers of about 1 that fit 16 bits: the unit's
exponent joins the key's logit, so that values count with it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_values import accumulate
from mla_jax.attention.mosaic_gpu.config import LATENT, PAGE, ROPE, ROWS, Problem
from mla_jax.attention.mosaic_gpu.ds_config import REDUCTION, DsConfig
from mla_jax.attention.mosaic_gpu.ds_layout import GROUPS, LINE, LINES
from mla_jax.attention.mosaic_gpu.ds_scores import score
from mla_jax.attention.mosaic_gpu.ds_values import DsValues
from mla_jax.attention.mosaic_gpu.ds_work import DsCta, DsQueries
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.fp8_hardware import KEYS_AT_ONCE, PART
from mla_jax.attention.mosaic_gpu.hardware import TILED
from mla_jax.attention.mosaic_gpu.persistent import (
    Signals,
    barriers,
    run_persistent,
)
from mla_jax.attention.mosaic_gpu.roles import run_roles
from mla_jax.attention.mosaic_gpu.work import Global, Span
from mla_jax.schedule import TileSchedule


def run_ds_kernel(
    problem: Problem,
    config: DsConfig,
    inputs: tuple[jax.Array, ...],
    schedule: TileSchedule,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Launch; `inputs` are the first eight fields of `Global`, the cache as lines [P, LINES, LINE] of bytes.

    Returns out [B, rows, 512], lse [B, rows].
    """
    emulate = interpret is not None

    def body(*refs: Any, **scratch: Any) -> None:
        _cta_body(problem, config, emulate, Global(*refs), **scratch)

    scratch = _scratch(problem, config)
    return run_persistent(
        "mla_decode_ds_mla", problem, body, scratch, inputs, schedule, interpret=interpret, reduction_bytes=REDUCTION
    )


def _scratch(problem: Problem, config: DsConfig) -> dict[str, Any]:
    rows = problem.copied_rows
    return {
        "keys": plgpu.SMEM((config.slots, LINES, LINE), jnp.uint8),
        "latent": plgpu.SMEM((rows, LATENT), jnp.float16, transforms=TILED),
        "rope": plgpu.SMEM((rows, ROPE), jnp.bfloat16, transforms=TILED),
        "factor": plgpu.SMEM((rows,), jnp.float32),
        "probabilities": plgpu.SMEM((BUFFERS, PAGE // KEYS_AT_ONCE, rows, KEYS_AT_ONCE), jnp.float16, transforms=PART),
        "scales": plgpu.SMEM((BUFFERS, GROUPS, PAGE), jnp.float16),
        "row_vectors": plgpu.SMEM((2 * BUFFERS + 1, ROWS), jnp.float32),
        "top": plgpu.SMEM((rows,), jnp.float32),
        "differs": plgpu.SMEM((BUFFERS,), jnp.int32),
        "full": barriers(config.slots),
        "scored": barriers(2 * BUFFERS),  # these and the following are signals in the interpreter
        "buffer_free": barriers(BUFFERS, arrivals=2),
        "slot_read": barriers(BUFFERS),
    }


def _cta_body(problem: Problem, config: DsConfig, emulate: bool, memory: Global, **scratch: Any) -> None:
    signals = Signals(BUFFERS, scratch, emulate=emulate)
    part, keys, full = lax.axis_index("part"), scratch["keys"], scratch["full"]
    cta = DsCta(
        config=config,
        problem=problem,
        emulate=emulate,
        memory=memory,
        queries=DsQueries(*(scratch[name] for name in DsQueries._fields)),
        probabilities=scratch["probabilities"],
        row_vectors=scratch["row_vectors"],
        scored=signals.take_by_side("scored", 2),
        buffer_free=signals.take("buffer_free", 3),
        slot_read=signals.take("slot_read", 2),
        vote_barrier=signals.take_barrier(),
        span=Span.load(memory.metadata, part),
        part=part,
        row_block=lax.axis_index("row_block"),
        keys=keys,
        full=full,
        **{name: scratch[name] for name in ("scales", "top", "differs")},
    )
    run_roles(cta, score, lambda cta, side: accumulate(cta, side, DsValues(cta, side)))
