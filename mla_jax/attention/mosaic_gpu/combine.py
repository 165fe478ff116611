"""Merging the pieces of requests that several parts share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.config import LATENT, LOG2E, ROWS
from mla_jax.attention.mosaic_gpu.hardware import add_one, count_out, publish, wait_for_count
from mla_jax.attention.mosaic_gpu.scores import LOWEST
from mla_jax.attention.mosaic_gpu.work import Work
from mla_jax.schedule import TileSchedule

VECTOR = plgpu.Layout.WG_STRIDED((LATENT,), vec_size=4)
SIGNALS_PER_PIECE = 3  # the score role and both value roles


class _State(NamedTuple):
    """A row's merge so far."""

    top: jax.Array  # largest lse, base 2
    total: jax.Array  # sum of exp2(lse - top)
    output: jax.Array  # [512] weighted sum


class _Share(NamedTuple):
    """The rows of a shared request that one warpgroup merges, and where the pieces are."""

    request: jax.Array
    pieces: jax.Array
    first_slot: jax.Array  # workspace slot of the first piece
    second_part: jax.Array  # slot of the piece after it; the others follow
    begin: jax.Array  # rows `begin` to `end` of the row block
    end: jax.Array

    def slot(self, piece: jax.Array) -> jax.Array:
        return jnp.where(piece == 0, self.first_slot, self.second_part + piece - 1)


def announce_pieces(cta: Work) -> None:
    """Say of all pieces at once that this role has left them in the workspace; roles that count each one need not."""
    if cta.emulate:
        return
    publish()

    def one(which: jax.Array, nothing: int) -> int:
        _, request, there = _first_or_last(cta, which)
        pl.when(there & (cta.pieces(request) > 1))(lambda: add_one(cta.counter(request)))
        return nothing

    lax.fori_loop(0, 2, one, 0)


def merge(cta: Work, worker: jax.Array, workers: int) -> None:
    """Merge a share of the rows of the first and the last request of this part, if others share them.

    Every part of a shared request merges 1 / pieces of its rows once all pieces are there. This cannot
    deadlock: all CTAs of the grid are on the GPU together, and each leaves its pieces before it waits.
    """

    def one(which: jax.Array, nothing: int) -> int:
        first, request, there = _first_or_last(cta, which)
        share = _share(cta, request, first, worker, workers)

        @pl.when(there & (share.pieces > 1))
        def _() -> None:
            counter, signals = cta.counter(share.request), share.pieces * SIGNALS_PER_PIECE
            wait_for_count(counter, signals)
            count_out(counter, signals, share.pieces * workers)
            # Few pieces: several rows at once keep enough loads in flight. Many: one row, many pieces.
            few = share.pieces <= 4
            pl.when(few)(lambda: _merge_rows(cta, share, rows=8, unroll=2))
            pl.when(~few)(lambda: _merge_rows(cta, share, rows=1, unroll=16))

        return nothing

    lax.fori_loop(0, 2, one, 0)


def _first_or_last(cta: Work, which: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether `which`, 0 or 1, means this part's first request; that one or the last; whether there is such a one."""
    first = which == 0
    there = jnp.where(first, cta.begin_req <= cta.end_req, cta.begin_req < cta.end_req)
    return first, cta.existing(jnp.where(first, cta.begin_req, cta.end_req)), there


def _share(cta: Work, request: jax.Array, first: jax.Array, worker: jax.Array, workers: int) -> _Share:
    memory, problem = cta.memory, cta.problem
    pieces = cta.pieces(request)
    mine = jnp.where(first, memory.metadata[cta.part, 4], 0)  # the index of this part's piece
    mine = lax.max(lax.min(mine, cta.part), jnp.int32(0))  # that of an idle part means nothing
    first_part = cta.part - mine
    first_slot = first_part + jnp.where(request == memory.metadata[first_part, 0], 0, problem.parts)
    share = mine * workers + worker
    begin = lax.div(problem.copied_rows * share, workers * pieces)
    end = lax.div(problem.copied_rows * (share + 1), workers * pieces)
    return _Share(request, pieces, first_slot, first_part + 1, begin, end)


def _merge_rows(cta: Work, share: _Share, *, rows: int, unroll: int) -> None:
    """Merge a share, `rows` at a time, reading `unroll` pieces of each at once."""
    memory, problem, pieces = cta.memory, cta.problem, share.pieces

    def tile(t: jax.Array, nothing: int) -> int:
        row = [cta.row_block * ROWS + lax.min(share.begin + t * rows + j, share.end - 1) for j in range(rows)]

        def step(i: jax.Array, states: tuple[_State, ...]) -> tuple[_State, ...]:
            piece = [i * unroll + u for u in range(unroll)]
            slot = [share.slot(lax.min(p, pieces - 1)) for p in piece]  # only what was written is read
            output = [[plgpu.load(memory.part_out.at[s, r], layout=VECTOR) for s in slot] for r in row]
            lse = [
                [jnp.where(p < pieces, memory.part_lse[s, r], -jnp.inf) for p, s in zip(piece, slot, strict=True)]
                for r in row
            ]
            return tuple(_add(*args) for args in zip(states, lse, output, strict=True))

        zeros = plgpu.layout_cast(jnp.zeros((LATENT,), jnp.float32), VECTOR)
        states = tuple(_State(jnp.float32(LOWEST), jnp.float32(0), zeros) for _ in range(rows))
        states = lax.fori_loop(0, lax.div(pieces + (unroll - 1), jnp.int32(unroll)), step, states)
        for r, state in zip(row, states, strict=True):
            empty = state.total == 0
            total = jnp.where(empty, 1.0, state.total)
            memory.out.at[share.request, r][...] = (state.output * (1.0 / total)).astype(problem.dtype)
            lse = (state.top + jnp.log2(total)) * (1 / LOG2E)
            memory.lse[share.request, r] = jnp.where(empty, -jnp.inf, lse)
        return nothing

    lax.fori_loop(0, lax.div(share.end - share.begin + (rows - 1), jnp.int32(rows)), tile, 0)


def _add(state: _State, lse: list[jax.Array], output: list[jax.Array]) -> _State:
    top = state.top
    for x in lse:
        top = jnp.maximum(top, x)
    decay = jnp.exp2(state.top - top)
    total, merged = state.total * decay, state.output * decay
    for x, o in zip(lse, output, strict=True):
        weight = jnp.exp2(x - top)
        total, merged = total + weight, merged + o * weight
    return _State(top, total, merged)


def merge_outside(
    out: jax.Array, lse: jax.Array, part_out: jax.Array, part_lse: jax.Array, schedule: TileSchedule
) -> tuple[jax.Array, jax.Array]:
    """The same merge in plain JAX, for the interpreter, which has no flags in global memory."""
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
