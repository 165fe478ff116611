"""The persistent kernel: 3 warpgroups per CTA, a ring of key blocks between them.

    score           S = Q K^T of a block, softmax, P into the slot of its rope part
    values, left    O[:, 0:256]   = decay * O + P V of a block, then refill its slot
    values, right   O[:, 256:512] = decay * O + P V of a block, then refill its slot

Why so. A WGMMA whose A operand lies in shared memory reads it again for every 64 columns of B, so that
S = Q K^T alone fills the bandwidth of shared memory. Here one warpgroup does nothing but scores and keeps most
of Q in registers: shared memory traffic per block of 64 keys drops to about the 2176 cycles that tensor cores
need. Q travels through the rings; what remains of it in shared memory is small, so that five halves of key blocks
fit.

Who does what when, in blocks i, i + 1, ...:

    score           | softmax i    | Q K^T of i + 1 | softmax i + 1 | Q K^T of i + 2 |
    values, right   |              | P V of i       |               | P V of i + 1   |
    values, left    | P V of i - 1 |                | P V of i      |                |

Signals: `scored` (score role to both sides: P of i is there); `next_scores_done` (score role to the left side, which
waits for it, as its products would delay those that everybody waits for); `right_done` (right side to left: P has been
read, so the rope part's place, where it lies, can be refilled). A side refills its own half of a slot; `left_full` and
`right_full` say that it has arrived.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.config import (
    HALF,
    PAGE,
    ROPE,
    ROWS,
    KernelConfig,
    Problem,
)
from mla_jax.attention.mosaic_gpu.hardware import TILED
from mla_jax.attention.mosaic_gpu.persistent import (
    Signals,
    barriers,
    run_persistent,
)
from mla_jax.attention.mosaic_gpu.roles import run_roles
from mla_jax.attention.mosaic_gpu.scores import score
from mla_jax.attention.mosaic_gpu.values import accumulate
from mla_jax.attention.mosaic_gpu.work import Cta, Global, Side, Slots, SpanInMemory
from mla_jax.schedule import TileSchedule


def run_kernel(
    problem: Problem,
    config: KernelConfig,
    inputs: tuple[jax.Array, ...],
    schedule: TileSchedule,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Launch; `inputs` are the first eight fields of `Global`. Returns out [B, rows, 512], lse [B, rows]."""
    emulate = interpret is not None

    def body(*refs: Any, **scratch: Any) -> None:
        _cta_body(problem, config, emulate, Global(*refs), **scratch)

    scratch = _scratch(problem, config)
    return run_persistent("mla_decode", problem, body, scratch, inputs, schedule, interpret=interpret)


def _scratch(problem: Problem, config: KernelConfig) -> dict[str, Any]:
    def tile(*shape: int) -> Any:
        return plgpu.SMEM(shape, problem.dtype, transforms=TILED)

    left, right = config.left_slots, config.right_slots
    return {
        "left": tile(left, PAGE, HALF),
        "right": tile(right, PAGE, HALF),
        "rope": tile(left, PAGE, ROPE),
        "queries": tile(ROWS, config.shared_query_dims),
        "row_vectors": plgpu.SMEM((2 * left + 1, ROWS), jnp.float32),  # one array, as each takes whole KiB
        "left_full": barriers(left, arrivals=2),  # left half and rope
        "right_full": barriers(right),
        "scored": barriers(2 * left),  # these and the following are signals in the interpreter
        "next_scores_done": barriers(left),
        "right_done": barriers(left),
    }


def _cta_body(problem: Problem, config: KernelConfig, emulate: bool, memory: Global, **scratch: Any) -> None:
    signals = Signals(config.left_slots, scratch, emulate=emulate)
    part = lax.axis_index("part")
    cta = Cta(
        config=config,
        problem=problem,
        emulate=emulate,
        memory=memory,
        slots=Slots(*(scratch[name] for name in Slots._fields)),
        queries=scratch["queries"],
        row_vectors=scratch["row_vectors"],
        left_full=scratch["left_full"],
        right_full=scratch["right_full"],
        scored=signals.take_by_side("scored", 2),
        next_scores_done=signals.take("next_scores_done", 2),
        right_done=signals.take("right_done", 2),
        span=SpanInMemory(memory.metadata, part),
        part=part,
        row_block=lax.axis_index("row_block"),
    )

    def values(cta: Cta, side: jax.Array) -> None:  # the sides do not have the same slots
        for each in Side:
            pl.when(side == each)(functools.partial(accumulate, cta, each))

    run_roles(cta, score, values)
