"""Static choices of the Hopper decode kernel, and the budgets they must fit."""

import dataclasses
import math

import jax.numpy as jnp

from mla_jax.attention.mosaic_gpu.requirements import DIM as DIM  # dims of a key: 512 latent + 64 rope
from mla_jax.attention.mosaic_gpu.requirements import LATENT as LATENT  # dims of a value
from mla_jax.attention.mosaic_gpu.requirements import PAGE as PAGE  # tokens per cache page, and keys per block of work

ROWS = 64  # query rows (S * H) per CTA: the M of one WGMMA
HALF = LATENT // 2  # value dims that one warpgroup accumulates; also the widest N of a WGMMA
ROPE = DIM - LATENT
TILE = 64  # dims per swizzled column tile of 128 bytes
WARPGROUP = 128  # threads
GROUP = 64  # dims of a row of a piece that share a scale
WORD = 32  # keys whose visibility is in one number of a tree mask
SHARED_MEMORY = 232_448  # bytes that a CTA may have on Hopper
REGISTERS = 504  # per thread index, over three warpgroups: each thread starts with 168, more do not exist
LOG2E = math.log2(math.e)
VALUE_REGISTERS = 160  # fewest that ptxas accepts for a WGMMA with 128 accumulators
FREE_REGISTERS = 24  # that a role needs beside the operands of its products


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How one CTA divides its resources.

    left_slots, right_slots: key blocks in flight in shared memory; dims 0:256 and the rope part, and dims 256:512.
    register_tiles: query tiles of 64 latent dims that stay in registers, 16 per thread each; the others and the
        rope part lie in shared memory, and a product reads them from there again for every block.
    score_registers, value_registers: per thread of each role.
    request_overhead: for `tile_schedule`: what a request costs beside its blocks.
    """

    left_slots: int = 3
    right_slots: int = 2
    register_tiles: int = 7
    score_registers: int = 184
    value_registers: int = VALUE_REGISTERS
    request_overhead: int = 3

    def __post_init__(self) -> None:
        if not 2 <= self.right_slots <= self.left_slots:
            raise ValueError(
                f"{self.left_slots=}, {self.right_slots=}: one slot loads while another is used, so each must be "
                "at least 2, and the left side, which also keeps the probabilities, must not have fewer"
            )
        if self.register_tiles not in (5, 6, 7):
            raise ValueError(f"{self.register_tiles=}: the left 4 tiles always are in registers; give 5, 6 or 7")
        if (used := self.shared_memory()) > SHARED_MEMORY:
            raise ValueError(
                f"{self.left_slots=}, {self.right_slots=} need {used} bytes of shared memory, a CTA has "
                f"{SHARED_MEMORY}: lower left_slots or right_slots"
            )
        self._check_registers()

    def _check_registers(self) -> None:
        registers = (self.score_registers, self.value_registers)
        if any(r % 8 or not 24 <= r <= 256 for r in registers):
            raise ValueError(f"{registers=}: each must be a multiple of 8 from 24 to 256")
        if self.value_registers < VALUE_REGISTERS:
            raise ValueError(f"{self.value_registers=}: a value role needs at least {VALUE_REGISTERS}")
        needed = 16 * self.register_tiles + PAGE // 2 + FREE_REGISTERS
        if self.score_registers < needed:
            raise ValueError(
                f"{self.score_registers=}: {self.register_tiles} query tiles and the scores of a block need "
                f"{needed}; lower register_tiles"
            )
        if (used := self.score_registers + 2 * self.value_registers) > REGISTERS:
            raise ValueError(
                f"{registers=} with two value warpgroups need {used} registers per thread index, a CTA has "
                f"{REGISTERS} (with more it would wait for them for ever): lower score_registers"
            )

    @property
    def shared_query_dims(self) -> int:
        """Query dims in shared memory: the last of the latent ones, and the rope part."""
        return DIM - self.register_tiles * TILE

    def shared_memory(self) -> int:
        """Bytes per CTA: 16-bit keys and queries, float32 vectors of 64 rows, barriers."""
        keys = self.left_slots * (HALF + ROPE) + self.right_slots * HALF
        vectors = -(-(2 * self.left_slots + 1) * ROWS * 4 // 1024) * 1024  # each allocation takes whole KiB
        barriers = 8 * (5 * self.left_slots + self.right_slots)
        return 2 * ROWS * (keys + self.shared_query_dims) + vectors + barriers


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
    query_parts: int = 1  # arrays that queries are the sum of; 0 where they are no items of the ring

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
