"""Static choices of the Hopper decode kernel, and the budgets they must fit."""

import dataclasses
import math

import jax.numpy as jnp

PAGE = 64  # tokens per cache page, and keys per block of work
ROWS = 64  # query rows (S * H) per CTA: the M of one WGMMA
DIM = 576  # dims of a key: 512 latent + 64 rope
LATENT = 512  # dims of a value
HALF = LATENT // 2  # value dims that one warpgroup accumulates; also the widest N of a WGMMA
ROPE = DIM - LATENT
WARPGROUP = 128  # threads
SHARED_MEMORY = 232_448  # bytes that a CTA may have on Hopper
REGISTERS = 512  # per thread index of a warpgroup, over all warpgroups: 65 536 in all
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How one CTA divides its resources.

    slots: key blocks in flight in shared memory, each 64 keys of 576 dims.
    score_registers, value_registers: per thread of each role.
    stagger: hold the right values back until the next scores are done, so that tensor cores never wait for a
        softmax.
    """

    slots: int = 3
    score_registers: int = 192
    value_registers: int = 160
    stagger: bool = True

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise ValueError(f"{self.slots=}: one slot loads while another is used, so at least 2 are needed")
        if (used := self.shared_memory()) > SHARED_MEMORY:
            raise ValueError(
                f"{self.slots=} need {used} bytes of shared memory, a CTA has {SHARED_MEMORY}: lower slots"
            )
        registers = (self.score_registers, self.value_registers)
        if any(r % 8 or not 24 <= r <= 256 for r in registers):
            raise ValueError(f"{registers=}: each must be a multiple of 8 from 24 to 256")
        used = self.score_registers + 2 * self.value_registers
        if used > REGISTERS:
            raise ValueError(
                f"{registers=} with two value warpgroups need {used} registers per thread index, an SM has "
                f"{REGISTERS}: lower score_registers or value_registers"
            )

    def shared_memory(self) -> int:
        """Bytes per CTA: 16-bit key slots, the queries' rope part, float32 vectors of 64 rows, barriers."""
        vectors = -(-(2 * self.slots + 1) * ROWS * 4 // 1024) * 1024
        return self.slots * PAGE * DIM * 2 + ROWS * ROPE * 2 + vectors + 8 * (4 * self.slots + 2)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static shape of one call."""

    batch: int
    tokens: int  # S: query tokens per request
    heads: int  # H
    rows: int  # S * H, rounded up to what a copy can address
    parts: int
    dtype: jnp.dtype
    causal: bool
    tree: bool

    @property
    def row_blocks(self) -> int:
        """CTAs that share a part's work: one per 64 query rows."""
        return -(-self.rows // ROWS)

    @property
    def copied_rows(self) -> int:
        """Query rows that one CTA loads and stores."""
        return min(ROWS, self.rows)


def padded_rows(rows: int) -> int:
    """Rows that copies can address: multiples of 8 within a block of 64, or whole blocks."""
    return -(-rows // 8) * 8 if rows < ROWS else -(-rows // ROWS) * ROWS
