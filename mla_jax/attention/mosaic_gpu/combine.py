"""Merging the pieces of requests that several parts share."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mla_jax.attention.mosaic_gpu.config import GROUP, LATENT, LOG2E, ROWS
from mla_jax.attention.mosaic_gpu.hardware import add_one, count_out, publish, wait_for_count
from mla_jax.attention.mosaic_gpu.merge_rows import WARPS, Where, merge_few, merge_many
from mla_jax.attention.mosaic_gpu.work import Side, Work
from mla_jax.schedule import TileSchedule

SIGNALS_PER_PIECE = 3  # the score role and both value roles
# Of pieces: with few, several rows at once keep enough loads in flight, with more, several pieces of a row.
FEW, SOME = 8, 32


class Share(NamedTuple):
    """The rows of a shared request that a part merges, and where the pieces are."""

    request: jax.Array
    pieces: jax.Array  # 1 where there is nothing to merge
    first_slot: jax.Array  # workspace slot of the first piece
    second_slot: jax.Array  # of the piece after it; the others follow
    begin: jax.Array  # rows `begin` to `end` of the row block
    end: jax.Array


def shares(cta: Work) -> tuple[Share, Share]:
    """Of this part's first request, and of its last if that is another one."""
    first, last = cta.span.begin_req, cta.span.end_req
    mine = cta.memory.metadata[cta.part, 4]  # the index of this part's piece of its first request
    mine = jnp.where(first <= last, lax.max(lax.min(mine, cta.part), jnp.int32(0)), 0)  # an idle part's means nothing
    return _share(cta, first, mine, first <= last), _share(cta, last, jnp.int32(0), first < last)


def _share(cta: Work, request: jax.Array, mine: jax.Array, there: jax.Array) -> Share:
    request = cta.existing(request)
    pieces = jnp.where(there, cta.pieces(request), 1)
    first_part = cta.part - mine
    first_slot = first_part + jnp.where(request == cta.memory.metadata[first_part, 0], 0, cta.problem.parts)
    begin = lax.div(cta.problem.copied_rows * mine, pieces)
    end = lax.div(cta.problem.copied_rows * (mine + 1), pieces)
    return Share(request, pieces, first_slot, first_part + 1, begin, end)


def announce_pieces(cta: Work, ours: tuple[Share, Share]) -> None:
    """Say of all pieces at once that this role has left them in the workspace."""
    publish()
    for share in ours:
        pl.when(share.pieces > 1)(functools.partial(add_one, cta.counter(share.request)))


def merge(cta: Work, ours: tuple[Share, Share], side: jax.Array) -> None:
    """Merge this part's shares of the rows of its first and its last request.

    Every part of a shared request merges 1 / pieces of its rows once all pieces are there. This cannot
    deadlock: all CTAs of the grid are on the GPU together, and each leaves its pieces before it waits. Two shares
    are merged at the same time, one by each value role; of one share, each role merges half of the value dims.
    """
    first, last = ours
    both = (first.pieces > 1) & (last.pieces > 1)
    mine = jnp.where(both, side == Side.LEFT, first.pieces > 1)
    share = Share(*(jnp.where(mine, *pair) for pair in zip(first, last, strict=True)))

    @pl.when(share.pieces > 1)
    def _() -> None:
        counter, signals = cta.counter(share.request), share.pieces * SIGNALS_PER_PIECE
        wait_for_count(counter, signals)
        leave = functools.partial(count_out, counter, signals, share.pieces * len(Side))
        leave()
        pl.when(both)(leave)  # for the other role, which has another share
        _merge_share(cta, share, both, side)


def _merge_share(cta: Work, share: Share, both: jax.Array, side: jax.Array) -> None:
    """`both` sides of it, or one."""
    rows = share.end - share.begin
    halves = jnp.where(both, 2 * rows, rows)
    few, some = share.pieces <= FEW, share.pieces <= SOME
    at_once = 8 if cta.problem.query_parts < 2 else 4  # for each warp; queries in two parts leave no registers
    wide = few & (halves > 4 * WARPS)
    first_row = cta.row_block * ROWS + share.begin
    memory = cta.memory
    out, lse = memory.out.at[share.request], memory.lse.at[share.request]
    refs = (out, lse, memory.part_out, memory.part_lse, memory.part_scale)

    def in_tiles(size: int, merge: Callable[..., None]) -> None:
        def tile(t: jax.Array, nothing: int) -> int:
            slots = (share.first_slot, share.second_slot, share.pieces)
            where = Where(*slots, first_row, first_row + rows - 1, t * size, both.astype(jnp.int32), side)
            merge(refs, where, by_thread=cta.pieces_by_thread)
            return nothing

        lax.fori_loop(0, lax.div(halves + (size - 1), jnp.int32(size)), tile, 0)

    def several(count: int, unroll: int) -> None:
        in_tiles(count * WARPS, functools.partial(merge_few, count=count, unroll=unroll))

    pl.when(wide)(lambda: several(count=at_once, unroll=2))
    pl.when(few & ~wide)(lambda: several(count=4, unroll=2))
    pl.when(some & ~few)(lambda: several(count=1, unroll=8))
    pl.when(~some)(lambda: in_tiles(1, merge_many))


def merge_outside(
    out: jax.Array,
    lse: jax.Array,
    part_out: jax.Array,
    part_lse: jax.Array,
    part_scale: jax.Array,
    schedule: TileSchedule,
) -> tuple[jax.Array, jax.Array]:
    """The same merge in plain JAX, for the interpreter, which has no flags in global memory."""
    part_out = part_out.astype(jnp.float32) * jnp.repeat(part_scale, GROUP, axis=-1)
    parts = schedule.metadata.shape[0]
    batch, rows, _ = out.shape
    pieces = jnp.diff(schedule.num_splits)
    request = jnp.concatenate([schedule.metadata[:, 0], schedule.metadata[:, 1]])  # of each workspace slot
    second = jnp.arange(2 * parts) >= parts
    both = jnp.concatenate([schedule.metadata[:, 0] == schedule.metadata[:, 1]] * 2)
    inside = (request >= 0) & (request < batch) & (jnp.concatenate([schedule.metadata[:, 0]] * 2) < batch)
    live = inside & (pieces[jnp.clip(request, 0, batch - 1)] > 1) & ~(second & both)
    target = jnp.where(live, request, batch)
    weight = jnp.where(live[:, None], part_lse[:, :rows], -jnp.inf)
    top = jnp.full((batch + 1, rows), -jnp.inf).at[target].max(weight)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.where(live[:, None], jnp.exp2(weight - top[target]), 0.0)
    total = jnp.zeros((batch + 1, rows)).at[target].add(weight)[:batch]
    values = jnp.where((weight > 0)[..., None], part_out[:, :rows] * weight[..., None], 0.0)
    merged = jnp.zeros((batch + 1, rows, LATENT)).at[target].add(values)[:batch]
    safe = jnp.where(total == 0, 1.0, total)
    merged_lse = jnp.where(total == 0, -jnp.inf, (top[:batch] + jnp.log2(safe)) / LOG2E)
    split = (pieces > 1)[:, None]
    merged = (merged / safe[..., None]).astype(out.dtype)
    return jnp.where(split[..., None], merged, out), jnp.where(split, merged_lse, lse)
