"""Static choices of the Hopper decode kernel for caches in fp8_ds_mla, and the budgets they must fit."""

import dataclasses

from mla_jax.attention.mosaic_gpu.config import LATENT, PAGE, ROPE, ROWS, SHARED_MEMORY
from mla_jax.attention.mosaic_gpu.ds_layout import GROUPS, ROW_BYTES
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS, check_registers

REDUCTION = 1024  # bytes in which warps meet for a maximum


@dataclasses.dataclass(frozen=True)
class DsConfig:
    """How one CTA divides its resources.

    slots: pages in flight in shared memory.
    score_registers, value_registers: per thread of each role.
    """

    slots: int = 3
    score_registers: int = 120
    value_registers: int = 192

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise ValueError(f"{self.slots=}: one slot loads while another is used, so there must be at least 2")
        if (used := shared_memory(self.slots, rows=8)) > SHARED_MEMORY:
            raise ValueError(
                f"{self.slots=} needs {used} bytes of shared memory, a CTA has {SHARED_MEMORY}: lower slots"
            )
        check_registers(self.score_registers, self.value_registers)


def shared_memory(slots: int, rows: int) -> int:
    """Bytes per CTA with so many query rows: pages, 16-bit queries, probabilities and scales, vectors, barriers."""
    queries = (_whole(2 * rows * LATENT), _whole(2 * rows * ROPE), _whole(4 * rows))
    vectors = (_whole((2 * BUFFERS + 1) * ROWS * 4), _whole(4 * rows), _whole(4 * BUFFERS))
    probabilities = (_whole(BUFFERS * 2 * rows * PAGE), _whole(BUFFERS * GROUPS * PAGE * 2))
    return PAGE * ROW_BYTES * slots + sum(queries + vectors + probabilities) + REDUCTION + 8 * (slots + 4 * BUFFERS)


def _whole(size: int) -> int:
    """Each allocation takes whole KiB."""
    return -(-size // 1024) * 1024
