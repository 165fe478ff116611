"""What the value roles do for fp8_ds_mla: whole pages that both sides read and the left one refills."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_work import Place
from mla_jax.attention.mosaic_gpu.company import keep_together
from mla_jax.attention.mosaic_gpu.ds_values_hardware import load_values, transposed
from mla_jax.attention.mosaic_gpu.ds_work import DsCta
from mla_jax.attention.mosaic_gpu.supply import Upcoming, fill_all, start_copy
from mla_jax.attention.mosaic_gpu.work import Ref, Side


@dataclasses.dataclass(frozen=True)
class DsValues:
    """One side; see `byte_values.Values`."""

    cta: DsCta
    side: jax.Array
    total_apart = True

    def fill_all(self) -> Upcoming:
        """The left side fills the ring of pages."""
        return fill_all(self.cta, self.cta.config.slots, self._start_copy)

    def await_item(self, place: Place) -> None:
        """The scores of a page, and the page."""
        self.cta.scored.of(self.side).receive(place.buffer)
        plgpu.barrier_wait(self.cta.full.at[place.slot])

    def differs(self, place: Place) -> jax.Array:
        """As the score role says."""
        return self.cta.differs[place.buffer]

    def load(self, place: Place, part: int) -> jax.Array:
        """Bytes and their scales."""
        keys, scales = self.cta.keys.at[place.slot], self.cta.scales.at[place.buffer]
        return load_values(keys, scales, self.side, part, emulate=self.cta.emulate)

    def widen(self, loaded: jax.Array) -> jax.Array:
        """With their scales, divided by the keys' units."""
        return transposed(loaded, emulate=self.cta.emulate)

    def refill(self, place: Place, item: Upcoming) -> None:
        """The left side does, once both have read the page."""
        leads = self.side == Side.LEFT
        pl.when(leads)(lambda: self.cta.slot_read.receive(place.buffer))  # all eight warps have read the slot
        pl.when(~leads)(lambda: self.cta.slot_read.send(place.buffer))
        self._start_copy(place.slot, item)

    def _start_copy(self, slot: jax.Array, item: Upcoming) -> None:
        cta = self.cta

        def copy(source: Ref, rows: int) -> None:
            plgpu.copy_gmem_to_smem(source, cta.keys.at[slot], cta.full.at[slot])

        @pl.when(self.side == Side.LEFT)
        def _() -> None:
            keep_together(cta, item.request, item.block)
            start_copy(cta, item, copy)

    def after(self, item: Upcoming) -> Upcoming:
        """Both count."""
        return item.after(self.cta)

    def scale(self) -> jax.Array:
        """Scales have been applied."""
        return jnp.float32(1)
