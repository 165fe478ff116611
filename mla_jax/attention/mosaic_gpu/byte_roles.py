"""Which warpgroup of the kernels for FP8 caches does what."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from mla_jax.attention.mosaic_gpu.byte_values import Values, accumulate
from mla_jax.attention.mosaic_gpu.byte_work import BytesWork
from mla_jax.attention.mosaic_gpu.combine import announce_pieces, merge
from mla_jax.attention.mosaic_gpu.persistent import SCORE, VALUES_LEFT, VALUES_RIGHT, set_registers
from mla_jax.attention.mosaic_gpu.work import Side


def run_roles(cta: BytesWork, score: Callable[[Any], None], values: Callable[[Any, Side], Values]) -> None:
    """The score role, and a value role for each side with what `values(cta, side)` does for it."""
    role = lax.axis_index("role")

    @pl.when(role == SCORE)
    def _() -> None:
        set_registers(cta.config.score_registers)
        score(cta)
        announce_pieces(cta)

    @pl.when(role != SCORE)
    def _() -> None:
        set_registers(cta.config.value_registers)
        pl.when(role == VALUES_LEFT)(lambda: accumulate(cta, Side.LEFT, values(cta, Side.LEFT)))
        pl.when(role == VALUES_RIGHT)(lambda: accumulate(cta, Side.RIGHT, values(cta, Side.RIGHT)))
        announce_pieces(cta)
        if not cta.emulate:
            merge(cta, role - VALUES_LEFT, workers=2)
