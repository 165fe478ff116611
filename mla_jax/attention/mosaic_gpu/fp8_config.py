"""Static choices of the Hopper decode kernel for FP8 caches, and the budgets they must fit."""

import dataclasses
from collections.abc import Callable

from mla_jax.attention.mosaic_gpu.config import HALF, PAGE, REGISTERS, ROPE, ROWS, SHARED_MEMORY

BUFFERS = 2  # of probabilities, in turn
FEW_ROWS = 32  # accumulators for so many leave registers to the score role


@dataclasses.dataclass(frozen=True)
class Fp8Config:
    """How one CTA divides its resources.

    query_parts: e4m3 arrays that queries are the sum of: 1 for e4m3 queries, 2 for bf16 ones.
    slots: key blocks in flight in shared memory, as bytes of the cache.
    score_registers, value_registers: per thread of each role.
    """

    query_parts: int = 1
    slots: int = 4
    score_registers: int = 120
    value_registers: int = 192

    def __post_init__(self) -> None:
        if self.query_parts not in (1, 2):
            raise ValueError(f"{self.query_parts=}: it must be 1 or 2")
        if self.slots < 2:
            raise ValueError(f"{self.slots=}: one slot loads while another is used, so there must be at least 2")
        if (used := shared_memory(self.slots, self.query_parts, rows=8)) > SHARED_MEMORY:
            raise ValueError(
                f"{self.slots=} needs {used} bytes of shared memory, a CTA has {SHARED_MEMORY}: lower slots"
            )
        check_registers(self.score_registers, self.value_registers)


def chosen_for(rows: int, shared_memory: Callable[[int], int]) -> dict[str, int]:
    """Fields for so many query rows per CTA: as many slots as there is room for, registers as roles need them."""
    fits = [slots for slots in range(2, 6) if shared_memory(slots) <= SHARED_MEMORY]
    few = {"score_registers": 184, "value_registers": 160} if rows <= FEW_ROWS else {}
    return {"slots": fits[-1]} | few


def check_registers(score_registers: int, value_registers: int) -> None:
    """Raise ValueError if one score role and two value roles cannot have so many."""
    registers = (score_registers, value_registers)
    if any(r % 8 or not 24 <= r <= 256 for r in registers):
        raise ValueError(f"{registers=}: each must be a multiple of 8 from 24 to 256")
    if (used := score_registers + 2 * value_registers) > REGISTERS:
        raise ValueError(
            f"{registers=} with two value warpgroups need {used} registers per thread index, a CTA has "
            f"{REGISTERS} (with more it would wait for them for ever): lower value_registers"
        )


def shared_memory(slots: int, query_parts: int, rows: int) -> int:
    """Bytes per CTA with so many query rows: keys and queries of one byte, 16-bit probabilities, float32 vectors of 64
    rows, barriers."""
    keys = ROWS * (2 * HALF + ROPE) * (slots + query_parts)
    vectors = -(-(2 * BUFFERS + 1) * ROWS * 4 // 1024) * 1024
    return keys + BUFFERS * 2 * rows * PAGE + vectors + 8 * (3 * slots + 3 * BUFFERS)
