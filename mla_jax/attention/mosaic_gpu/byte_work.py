"""What the roles of the kernels for FP8 caches share, whatever the format."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.hardware import Signal
from mla_jax.attention.mosaic_gpu.work import Ref, Work


@dataclasses.dataclass(frozen=True)
class BytesWork(Work):
    """Work of the kernels for FP8 caches. Indices of signals and vectors are buffers of probabilities."""

    probabilities: Ref  # [BUFFERS, 4, copied_rows, 16] float16: 16 keys each
    buffer_free: Signal  # both sides to the score role: this buffer has been used


class Place(NamedTuple):
    """Where an item is: its slot in the rings, and the buffer for its probabilities."""

    slot: jax.Array
    buffer: jax.Array

    @classmethod
    def start(cls) -> "Place":
        """Of the first item."""
        return cls(jnp.int32(0), jnp.int32(0))

    def after(self, config: Any) -> "Place":
        """Of the next item."""
        return Place(jnp.where(self.slot == config.slots - 1, 0, self.slot + 1), BUFFERS - 1 - self.buffer)

    def after_total(self) -> "Place":
        """Behind a request's total, which takes a buffer and no slot."""
        return Place(self.slot, BUFFERS - 1 - self.buffer)
