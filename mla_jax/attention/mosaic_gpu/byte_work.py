"""What the roles of the kernels for FP8 caches share, whatever the format."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.hardware import Signal
from mla_jax.attention.mosaic_gpu.work import Ref, Work


class Span(NamedTuple):
    """What this part works on, read once: see `TileSchedule.metadata`."""

    begin_req: jax.Array
    end_req: jax.Array
    begin_block: jax.Array
    end_block: jax.Array

    @classmethod
    def load(cls, metadata: Ref, part: jax.Array) -> "Span":
        """The row of a part."""
        return cls(*(metadata[part, column] for column in range(4)))


@dataclasses.dataclass(frozen=True)
class BytesWork(Work):
    """Work of the kernels for FP8 caches. Indices of signals and vectors are buffers of probabilities."""

    config: Any  # with the number of `slots`, and of registers
    probabilities: Ref  # [BUFFERS, 4, copied_rows, 16] float16: 16 keys each
    buffer_free: Signal  # both sides to the score role: this buffer has been used
    span: Span

    @property
    def begin_req(self) -> jax.Array:
        """The first request of this part; B if the part is idle."""
        return self.span.begin_req

    @property
    def begin_block(self) -> jax.Array:
        """The first block of the first request."""
        return self.span.begin_block

    @property
    def end_req(self) -> jax.Array:
        """The last request of this part."""
        return self.span.end_req

    @property
    def end_block(self) -> jax.Array:
        """The end of the last request's blocks in this part."""
        return self.span.end_block


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
