"""What the roles of the kernel for caches in e4m3 share."""

import dataclasses
from typing import Any, NamedTuple

import jax

from mla_jax.attention.mosaic_gpu.byte_work import BytesWork
from mla_jax.attention.mosaic_gpu.work import Ref, Side


class Fp8Items(NamedTuple):
    """Items in shared memory, in e4m3: the ring's slots, or a request's queries, the sum of some parts.

    Halves lie in lines of 128 dims; those of the left side come first.
    """

    halves: Ref  # [2 * items, 2, 64, 128]
    rope: Ref  # [items, 64, 64]

    def half(self, side: Any, index: Any) -> Ref:
        """Half of an item, [2, 64, 128]."""
        return self.halves.at[side * self.rope.shape[0] + index]

    def operands(self, index: Any) -> list[Ref]:
        """An item's lines, and its rope part."""
        lines = [self.half(side, index).at[line] for side in Side for line in range(self.halves.shape[1])]
        return [*lines, self.rope.at[index]]


@dataclasses.dataclass(frozen=True)
class Fp8Cta(BytesWork):
    """What the roles of the kernel for e4m3 share."""

    slots: Fp8Items  # as copies write them, and value roles read them
    keys: Fp8Items  # the same, as operands of products
    half_full: Ref  # barriers, by half of a slot: it has arrived
    rope_full: Ref  # barriers, by slot
    queries: Fp8Items
    query_scale: Ref  # [B, row_blocks * 64] float32: factor of a row's logits
    value_scale: Ref  # [1] float32

    def arrived(self, side: Any, slot: jax.Array) -> Ref:
        """The barrier of half of a slot."""
        return self.half_full.at[side * self.config.slots + slot]
