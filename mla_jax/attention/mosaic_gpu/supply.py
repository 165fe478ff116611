"""Keeping the ring of slots full. The value roles do it themselves, each its half of a slot.

A WGMMA with 128 accumulators per thread only fits a CTA of three warpgroups, so there is none to spare for
loads. None is needed: the slot that a value role has just used is its own to refill, and no signal is waited
for.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.company import keep_together
from mla_jax.attention.mosaic_gpu.config import HALF, LATENT, PAGE, ROPE, ROWS
from mla_jax.attention.mosaic_gpu.hardware import one_warp
from mla_jax.attention.mosaic_gpu.work import HalvesWork, Ref, Side, Work

# Items before a request's first block are its queries: number -1, and -2, ... where they have several parts; none where
# the score role fetches them itself.


class Upcoming(NamedTuple):
    """The next item to load: a block of keys of a request, or its queries."""

    request: jax.Array
    block: jax.Array
    end: jax.Array  # of the request's blocks in this part
    page: jax.Array  # of the block; asked for early, because the table is far away

    @classmethod
    def start(cls, cta: Work) -> "Upcoming":
        """The queries of the first request, or its first block where queries are no items."""
        request = cta.span.begin_req
        if cta.problem.query_parts == 0:
            before = cls(request, cta.span.begin_block - 1, cta.segment(cta.existing(request)).end, jnp.int32(0))
            return before.after(cta)
        return cls(request, jnp.int32(-cta.problem.query_parts), cta.segment(cta.existing(request)).end, jnp.int32(0))

    def after(self, cta: Work) -> "Upcoming":
        """The item after this one; a request behind `cta.span.end_req` says that there is none."""
        first = jnp.where(self.request == cta.span.begin_req, cta.span.begin_block, 0)
        block = jnp.where(self.block == -1, first, self.block + 1)
        over = block >= self.end
        request = self.request + jnp.where(over, 1, 0)
        segment = cta.segment(cta.existing(request))
        block = jnp.where(over, -cta.problem.query_parts, block)
        # Entries behind a request's keys hold anything: page 0 stands in and is masked. They are read nevertheless,
        # since waiting for the length first would double the time until the page is known.
        width = cta.memory.table.shape[1]
        page = cta.memory.table[segment.request, lax.max(lax.min(block, jnp.int32(width - 1)), jnp.int32(0))]
        page = jnp.where((block >= 0) & (block * PAGE < segment.length), page, 0)
        return Upcoming(request, block, segment.end, page)


def fill(cta: HalvesWork, side: Side, slot: jax.Array, item: Upcoming) -> Upcoming:
    """Start loading this side's half of an item into a slot that nobody uses; returns the next item."""
    start_copy(cta, side, slot, item)
    return item.after(cta)


def start_copy(cta: HalvesWork, side: Side, slot: jax.Array, item: Upcoming) -> None:
    """Start loading this side's half of an item into a slot that nobody uses."""

    def copy(source: Ref, rows: int) -> None:
        def part(target: Ref, first: int, columns: int, full: Ref) -> None:
            target = target if rows == ROWS else target.at[pl.ds(0, rows)]
            plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, columns)], target, full.at[slot])

        def half(buffer: Ref, first: int, full: Ref) -> None:
            if len(buffer.shape) == 3:
                part(buffer.at[slot], first, HALF, full)
                return
            lines, width = buffer.shape[1], buffer.shape[3]
            for line in range(lines):
                part(buffer.at[slot, line], first + line * width, width, full)

        if side == Side.LEFT:
            half(cta.slots.left, 0, cta.left_full)
            part(cta.slots.rope.at[slot], LATENT, ROPE, cta.left_full)
        else:
            half(cta.slots.right, HALF, cta.right_full)

    there = item.request <= cta.span.end_req
    keys = there & (item.block >= 0)
    queries = there & (item.block < 0)
    parts = cta.problem.query_parts
    query = cta.existing(item.request) * parts + lax.max(item.block + parts, jnp.int32(0))

    def issue() -> None:
        pl.when(keys)(lambda: copy(cta.memory.cache.at[item.page], ROWS))
        pl.when(queries)(lambda: copy(cta.memory.q.at[query, cta.rows], cta.problem.copied_rows))

    if side == Side.LEFT:
        keep_together(cta, item.request, item.block)
    one_warp(issue, emulate=cta.emulate)


def fill_all(cta: HalvesWork, side: Side) -> Upcoming:
    """Fill the empty ring; returns the first item that found no place."""
    slots = (cta.slots.left if side == Side.LEFT else cta.slots.right).shape[0]
    return lax.fori_loop(0, slots, lambda slot, item: fill(cta, side, slot, item), Upcoming.start(cta))
