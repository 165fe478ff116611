"""The persistent kernel: 3 warpgroups per CTA, a ring of key blocks between them.

    score           S = Q K^T of a slot, softmax, P into the slot's rope part
    values, left    O[:, 0:256]   = decay * O + P V of a slot, then refill this half of the slot
    values, right   O[:, 256:512] = decay * O + P V of a slot, then refill this half of the slot

Why so. A WGMMA whose A operand lies in shared memory reads it again for every 64 columns of B, so that
S = Q K^T alone fills the bandwidth of shared memory. Here one warpgroup keeps the latent dims of Q in
registers (128 of them) and does nothing but scores; shared memory traffic per block of 64 keys drops to 1920
cycles, below the 2176 that tensor cores need. Q passes through the ring and then needs 8 KiB only, so three
blocks of keys fit.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.combine import merge, merge_outside
from mla_jax.attention.mosaic_gpu.config import (
    HALF,
    LATENT,
    PAGE,
    ROPE,
    ROWS,
    WARPGROUP,
    KernelConfig,
    Problem,
)
from mla_jax.attention.mosaic_gpu.hardware import FIRST_FREE_BARRIER, TILED, Signal
from mla_jax.attention.mosaic_gpu.scores import score
from mla_jax.attention.mosaic_gpu.values import accumulate
from mla_jax.attention.mosaic_gpu.work import Cta, Global, Side, Slots
from mla_jax.schedule import TileSchedule

ROLES = 3
SCORE, VALUES_LEFT, VALUES_RIGHT = range(ROLES)


def run_kernel(
    problem: Problem,
    config: KernelConfig,
    inputs: tuple[jax.Array, ...],
    schedule: TileSchedule,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Launch; `inputs` are the first nine fields of `Global`. Returns out [B, rows, 512], lse [B, rows]."""
    emulate = interpret is not None

    def body(*refs: Any, **scratch: Any) -> None:
        _cta_body(problem, config, emulate, Global(*refs), **scratch)

    body.__name__ = "mla_decode"
    workspace = (2 * problem.parts, problem.row_blocks * ROWS)
    out, lse, part_out, part_lse = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((problem.batch, problem.rows, LATENT), problem.dtype),
            jax.ShapeDtypeStruct((problem.batch, problem.rows), jnp.float32),
            jax.ShapeDtypeStruct((*workspace, LATENT), jnp.float32),
            jax.ShapeDtypeStruct(workspace, jnp.float32),
        ],
        scratch_types=_scratch(problem, config),
        # Row blocks of a part are neighbours, so that the second finds the keys in L2.
        grid=(problem.parts, problem.row_blocks),
        grid_names=("part", "row_block"),
        num_threads=ROLES,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=not emulate,
            reduction_scratch_bytes=0
            if not emulate
            else 2048,  # rows lie within a warp: no scratch is needed
        ),
        interpret=interpret,
    )(*inputs)
    if emulate:
        return merge_outside(out, lse, part_out, part_lse, schedule)
    return out, lse


def _scratch(problem: Problem, config: KernelConfig) -> dict[str, Any]:
    def tile(columns: int) -> Any:
        return plgpu.SMEM((config.slots, PAGE, columns), problem.dtype, transforms=TILED)

    def barriers(arrivals: int = 1, count: int = config.slots) -> Any:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

    return {
        "left": tile(HALF),
        "right": tile(HALF),
        "rope": tile(ROPE),
        "query_rope": plgpu.SMEM((ROWS, ROPE), problem.dtype, transforms=TILED),
        "row_vectors": plgpu.SMEM((2 * config.slots + 1, ROWS), jnp.float32),
        "left_full": barriers(),
        "right_full": barriers(arrivals=2),  # right half and rope
        "scored": barriers(),
        "next_scores_done": barriers(count=2),
        "left_done": barriers(),
    }


def _cta_body(problem: Problem, config: KernelConfig, emulate: bool, memory: Global, **scratch: Any) -> None:
    next_id = FIRST_FREE_BARRIER

    def signal(name: str, threads: int) -> Signal:
        nonlocal next_id
        made = Signal(next_id, threads, scratch[name] if emulate else None)
        next_id += 2 if name == "next_scores_done" else config.slots
        return made

    cta = Cta(
        config=config,
        problem=problem,
        emulate=emulate,
        memory=memory,
        slots=Slots(*(scratch[name] for name in Slots._fields)),
        query_rope=scratch["query_rope"],
        row_vectors=scratch["row_vectors"],
        left_full=scratch["left_full"],
        right_full=scratch["right_full"],
        scored=signal("scored", 3 * WARPGROUP),
        next_scores_done=signal("next_scores_done", 2 * WARPGROUP),
        left_done=signal("left_done", 2 * WARPGROUP),
        part=lax.axis_index("part"),
        row_block=lax.axis_index("row_block"),
    )
    role = lax.axis_index("role")

    @pl.when(role == SCORE)
    def _() -> None:
        plgpu.set_max_registers(config.score_registers, action="increase")
        score(cta)

    def values(side: Side) -> None:
        plgpu.set_max_registers(config.value_registers, action="decrease")
        accumulate(cta, side)
        if not emulate:
            merge(cta, side, workers=2)

    pl.when(role == VALUES_LEFT)(lambda: values(Side.LEFT))
    pl.when(role == VALUES_RIGHT)(lambda: values(Side.RIGHT))
