"""Static choices of the Hopper decode kernel for caches in fp8_ds_mla, and the budgets they must fit."""

import dataclasses

from mla_jax.attention.mosaic_gpu.config import DIM, PAGE, REGISTERS, ROWS, SHARED_MEMORY
from mla_jax.attention.mosaic_gpu.ds_layout import GROUPS, ROW_BYTES
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS


@dataclasses.dataclass(frozen=True)
class DsConfig:
    """How one CTA divides its resources: see `Fp8Config`."""

    slots: int = 3
    score_registers: int = 120
    value_registers: int = 192


def shared_memory(slots: int, rows: int) -> int:
    """Bytes per CTA with so many query rows: pages, 16-bit queries, probabilities and scales, vectors, barriers."""
    vectors = -(-(2 * BUFFERS + 2) * ROWS * 4 // 1024) * 1024
    scales = -(-BUFFERS * GROUPS * PAGE * 2 // 1024) * 1024
    queries = -(-2 * rows * (DIM - 64) // 1024) * 1024 + -(-2 * rows * 64 // 1024) * 1024
    probabilities = -(-BUFFERS * 2 * rows * PAGE // 1024) * 1024
    others = 4 * 1024  # factors, maxima, flags, reductions: each takes a whole KiB
    return PAGE * ROW_BYTES * slots + queries + probabilities + scales + vectors + others + 1024
