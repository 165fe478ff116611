"""Row blocks of a part keep each other company, so that keys are read from device memory once.

They load the same blocks of keys, and the second finds in the L2 cache what the first has loaded, unless that was long
ago: nothing else holds them together. Each says which block it is about to load, and now and then, in requests long
enough for it, waits for its neighbour if that is behind. What was said in an earlier call does no
harm, since every row block says something at the start of every request: a wait may be in vain, and then is short.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.hardware import SCALAR
from mla_jax.attention.mosaic_gpu.ptx import ptx
from mla_jax.attention.mosaic_gpu.work import Work

LEAD = 2  # blocks that a row block may be ahead
EVERY = 128  # blocks it looks round: the answer takes a microsecond or two, and all wait for it
BLOCK_BITS = 20  # of a position: a block, and the lowest bits of its request above


def keep_together(cta: Work, request: jax.Array, block: jax.Array) -> None:
    """Say where this row block is, and wait for the next one if it is far behind. One role's first warp does it."""
    count = cta.problem.row_blocks
    if cta.emulate or count == 1:
        return
    neighbour = lax.rem(cta.row_block + 1, count)
    progress, position = cta.memory.progress.at[cta.part], (request << BLOCK_BITS) | lax.max(block, 0)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def follow(ctx: Any, ours: Any, theirs: Any, position: Any) -> None:
        ptx(
            "{ .reg .pred p; .reg .u32 x;"
            "mov.u32 x, %tid.x; and.b32 x, x, 96; setp.ne.u32 p, x, 0; @p bra DONE;"
            "st.relaxed.gpu.global.u32 [$0], $2;"
            f"shl.b32 x, $2, {32 - BLOCK_BITS}; setp.eq.u32 p, x, 0; @p bra DONE;"  # the first block
            f"and.b32 x, $2, {EVERY - 1}; setp.ne.u32 p, x, 0; @p bra DONE;"
            "AGAIN: ld.relaxed.gpu.global.u32 x, [$1];"
            f"add.u32 x, x, {LEAD}; setp.ge.u32 p, x, $2; @p bra DONE;"
            f"xor.b32 x, x, $2; shr.u32 x, x, {BLOCK_BITS}; setp.eq.u32 p, x, 0; @p bra AGAIN;"
            "DONE: }",
            mgpu_utils.memref_ptr(ours),
            mgpu_utils.memref_ptr(theirs),
            position.registers.item(),
        )

    follow(progress.at[cta.row_block], progress.at[neighbour], position)
