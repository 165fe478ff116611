"""What the value roles do for e4m3: halves of slots that arrive, and are refilled, each by themselves."""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_work import Place
from mla_jax.attention.mosaic_gpu.company import keep_together
from mla_jax.attention.mosaic_gpu.config import HALF, LATENT
from mla_jax.attention.mosaic_gpu.fp8_hardware import LINE, differs_from_one, load_values, transposed
from mla_jax.attention.mosaic_gpu.fp8_work import Fp8Cta
from mla_jax.attention.mosaic_gpu.hardware import warpgroup_barrier
from mla_jax.attention.mosaic_gpu.supply import Upcoming, copy_columns, fill_all, start_copy
from mla_jax.attention.mosaic_gpu.work import Ref, Side


@dataclasses.dataclass(frozen=True)
class Fp8Values:
    """One side; see `byte_values.Values`."""

    cta: Fp8Cta
    side: jax.Array
    total_apart = False

    def fill_all(self) -> Upcoming:
        """Fill this side's half of the ring."""
        return fill_all(self.cta, self.cta.config.slots, self._start_copy)

    def await_item(self, place: Place) -> None:
        """The scores of an item, and this side's half of it."""
        self.cta.scored.of(self.side).receive(place.buffer)
        plgpu.barrier_wait(self.cta.arrived(self.side, place.slot))

    def differs(self, place: Place) -> jax.Array:
        """Looked up in the decays."""
        decay = self.cta.decay(place.buffer).at[pl.ds(0, self.cta.problem.copied_rows)]
        return differs_from_one(decay, emulate=self.cta.emulate)

    def load(self, place: Place, part: int) -> jax.Array:
        """Bytes."""
        return load_values(self.cta.slots.half(self.side, place.slot), part, emulate=self.cta.emulate)

    def widen(self, loaded: jax.Array) -> jax.Array:
        """As they are."""
        return transposed(loaded, emulate=self.cta.emulate)

    def refill(self, place: Place, item: Upcoming) -> None:
        """Both do, each its half."""
        warpgroup_barrier(emulate=self.cta.emulate)
        self._start_copy(place.slot, item)

    def after(self, item: Upcoming) -> Upcoming:
        """Both count."""
        return item.after(self.cta)

    def scale(self) -> jax.Array:
        """That of the whole cache."""
        return self.cta.value_scale[0]

    def _start_copy(self, slot: jax.Array, item: Upcoming) -> None:
        cta, leads = self.cta, self.side == Side.LEFT
        half = cta.slots.half(self.side, slot)

        def copy(source: Ref, rows: int) -> None:
            for line in range(HALF // LINE):
                first = self.side * HALF + line * LINE
                copy_columns(source, rows, first, half.at[line], cta.arrived(self.side, slot))

            @pl.when(leads)
            def _() -> None:
                copy_columns(source, rows, LATENT, cta.slots.rope.at[slot], cta.rope_full.at[slot])

        pl.when(leads)(lambda: keep_together(cta, item.request, item.block))
        start_copy(cta, item, copy)
