"""Which warpgroup does what, in every kernel."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from mla_jax.attention.mosaic_gpu.combine import announce_pieces, merge, shares
from mla_jax.attention.mosaic_gpu.persistent import SCORE, VALUES_LEFT, set_registers
from mla_jax.attention.mosaic_gpu.work import Work


def run_roles(cta: Work, score: Callable[[Any], None], accumulate: Callable[[Any, jax.Array], None]) -> None:
    """The score role, and a value role for each side; then both sides merge what parts share.

    Sides that do the same should run the same code: what runs once is fetched while everybody waits for it.
    """
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
        accumulate(cta, role - VALUES_LEFT)
        if not cta.emulate:
            ours = shares(cta)  # before the fence of `announce_pieces`, behind which nothing is in the L1 cache
            announce_pieces(cta, ours)
            merge(cta, ours, role - VALUES_LEFT)
