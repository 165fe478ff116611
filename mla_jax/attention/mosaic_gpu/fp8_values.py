"""What the value roles do for e4m3: halves of slots that arrive, and are refilled, each by themselves."""

import dataclasses

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_work import Place
from mla_jax.attention.mosaic_gpu.fp8_hardware import differs_from_one, load_values, transposed
from mla_jax.attention.mosaic_gpu.fp8_work import Fp8Cta
from mla_jax.attention.mosaic_gpu.hardware import warpgroup_barrier
from mla_jax.attention.mosaic_gpu.supply import Upcoming, fill_all, start_copy
from mla_jax.attention.mosaic_gpu.work import Side


@dataclasses.dataclass(frozen=True)
class Fp8Values:
    """One side; see `byte_values.Values`."""

    cta: Fp8Cta
    side: Side
    total_apart = False

    def fill_all(self) -> Upcoming:
        """Fill this side's half of the ring."""
        return fill_all(self.cta, self.side)

    def await_item(self, place: Place) -> None:
        """The scores of an item, and this side's half of it."""
        self.cta.scored[self.side].receive(place.buffer)
        plgpu.barrier_wait((self.cta.left_full if self.side == Side.LEFT else self.cta.right_full).at[place.slot])

    def differs(self, place: Place) -> jax.Array:
        """Looked up in the decays."""
        decay = self.cta.decay(place.buffer).at[pl.ds(0, self.cta.problem.copied_rows)]
        return differs_from_one(decay, emulate=self.cta.emulate)

    def load(self, place: Place, part: int) -> jax.Array:
        """Bytes."""
        half = self.cta.slots.left if self.side == Side.LEFT else self.cta.slots.right
        return load_values(half.at[place.slot], part, emulate=self.cta.emulate)

    def widen(self, loaded: jax.Array) -> jax.Array:
        """As they are."""
        return transposed(loaded, emulate=self.cta.emulate)

    def refill(self, place: Place, item: Upcoming) -> None:
        """Both do, each its half."""
        warpgroup_barrier(emulate=self.cta.emulate)
        start_copy(self.cta, self.side, place.slot, item)

    def after(self, item: Upcoming) -> Upcoming:
        """Both count."""
        return item.after(self.cta)

    def scale(self) -> jax.Array:
        """That of the whole cache."""
        return self.cta.value_scale[0]
