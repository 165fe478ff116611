"""Keeping the ring of slots full. The value roles do it themselves: each its half of a slot, or the left one pages.

A WGMMA with 128 accumulators per thread only fits a CTA of three warpgroups, so there is none to spare for
loads. None is needed: a value role knows when it has used a slot, and waits at most for the other one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.config import PAGE, ROWS
from mla_jax.attention.mosaic_gpu.hardware import one_warp
from mla_jax.attention.mosaic_gpu.work import Ref, Work

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


def fill_all(cta: Work, slots: int, start: Callable[[jax.Array, Upcoming], None]) -> Upcoming:
    """`start(slot, item)` for each slot of an empty ring; returns the first item that found no place."""

    def fill(slot: jax.Array, item: Upcoming) -> Upcoming:
        start(slot, item)
        return item.after(cta)

    return lax.fori_loop(0, slots, fill, Upcoming.start(cta))


def start_copy(cta: Work, item: Upcoming, copy: Callable[[Ref, int], None]) -> None:
    """`copy(source, rows)` in one warp: a page of the cache, or queries, of which there may be fewer than 64 rows."""
    there = item.request <= cta.span.end_req
    keys = there & (item.block >= 0)
    queries = there & (item.block < 0)
    parts = cta.problem.query_parts
    query = cta.existing(item.request) * parts + lax.max(item.block + parts, jnp.int32(0))

    def issue() -> None:
        pl.when(keys)(lambda: copy(cta.memory.cache.at[item.page], ROWS))
        if parts:
            pl.when(queries)(lambda: copy(cta.memory.q.at[query, cta.rows], cta.problem.copied_rows))

    one_warp(issue, emulate=cta.emulate)


def copy_columns(source: Ref, rows: int, first: Any, target: Ref, full: Ref) -> None:
    """Some rows of a slot's part from the columns of `source` from `first` on."""
    columns = target.shape[-1]
    target = target if rows == ROWS else target.at[pl.ds(0, rows)]
    plgpu.copy_gmem_to_smem(source.at[:, pl.ds(first, columns)], target, full)
