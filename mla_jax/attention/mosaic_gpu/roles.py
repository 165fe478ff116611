"""Which warpgroup does what, in every kernel."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from mla_jax.attention.mosaic_gpu.combine import announce_pieces, merge, shares
from mla_jax.attention.mosaic_gpu.persistent import SCORE, VALUES_LEFT, VALUES_RIGHT, set_registers
from mla_jax.attention.mosaic_gpu.work import Side, Work


def run_roles(cta: Work, score: Callable[[Any], None], accumulate: Callable[[Any, Side], None]) -> None:
    """The score role, and a value role for each side; then both sides merge what parts share."""
    role = lax.axis_index("role")

    @pl.when(role == SCORE)
    def _() -> None:
        set_registers(cta.config.score_registers)
        score(cta)
        if not cta.emulate:
            announce_pieces(cta, shares(cta))

    @pl.when(role != SCORE)
    def _() -> None:
        set_registers(cta.config.value_registers)
        pl.when(role == VALUES_LEFT)(lambda: accumulate(cta, Side.LEFT))
        pl.when(role == VALUES_RIGHT)(lambda: accumulate(cta, Side.RIGHT))
        if not cta.emulate:
            ours = shares(cta)  # before the fence of `announce_pieces`, behind which nothing is in the L1 cache
            announce_pieces(cta, ours)
            merge(cta, ours, role - VALUES_LEFT)
