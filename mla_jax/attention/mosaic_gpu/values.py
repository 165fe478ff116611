"""The two value roles: each keeps half of the output, 64 rows of 256 dims, in registers; adds P V to it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.company import keep_together
from mla_jax.attention.mosaic_gpu.config import HALF, LATENT, ROWS
from mla_jax.attention.mosaic_gpu.hardware import rescale, warpgroup_barrier
from mla_jax.attention.mosaic_gpu.pieces import store_rows
from mla_jax.attention.mosaic_gpu.scores import MATRIX, ROW
from mla_jax.attention.mosaic_gpu.supply import Upcoming, copy_columns, fill_all, start_copy
from mla_jax.attention.mosaic_gpu.work import Cta, Ref, Side, Turn


def accumulate(cta: Cta, side: Side) -> None:
    """Add up the values of every block of every request, write the output, and refill what was used."""
    config = cta.config
    buffer = cta.slots.left if side == Side.LEFT else cta.slots.right

    def request(r: jax.Array, carry: tuple[Turn, Upcoming]) -> tuple[Turn, Upcoming]:
        turn, item = carry
        segment = cta.segment(r)
        cta.scored.of(side).receive(turn.left)  # the queries have been taken
        _start_copy(cta, side, turn.of(side), item)
        item = item.after(cta)

        def block(i: jax.Array, carry: tuple[jax.Array, Turn, Upcoming]) -> tuple[jax.Array, Turn, Upcoming]:
            output, turn, item = carry
            output = _add_block(cta, side, output, turn, buffer)
            item = _reuse(cta, side, turn, item)
            return output, turn.after(config), item

        output = plgpu.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), MATRIX)
        start = (output, turn.after(config), item)
        output, turn, item = lax.fori_loop(segment.first, segment.end - 1, block, start)
        # The last block's slot is kept a little longer: the output is staged in it.
        output = _add_block(cta, side, output, turn, buffer)
        inverse = plgpu.load(cta.inverse_total(turn.left), layout=ROW)
        output = output * lax.broadcast_in_dim(inverse, output.shape, [0])
        whole = cta.pieces(r) == 1
        pl.when(whole)(lambda: _store_whole(cta, r, side, output, buffer.at[turn.of(side)]))
        item = _reuse(cta, side, turn, item)
        pl.when(~whole)(lambda: _store_piece(cta, r, side, output))
        return turn.after(config), item

    slots = config.left_slots if side == Side.LEFT else config.right_slots
    item = fill_all(cta, slots, lambda slot, item: _start_copy(cta, side, slot, item))
    cta.for_each_request(request, (Turn.start(), item))
    plgpu.wait_smem_to_gmem(0)


def _start_copy(cta: Cta, side: Side, slot: jax.Array, item: Upcoming) -> None:
    """Start loading this side's half of an item into a slot that nobody uses."""
    slots = cta.slots

    def copy(source: Ref, rows: int) -> None:
        if side == Side.RIGHT:
            copy_columns(source, rows, HALF, slots.right.at[slot], cta.right_full.at[slot])
            return
        copy_columns(source, rows, 0, slots.left.at[slot], cta.left_full.at[slot])
        copy_columns(source, rows, LATENT, slots.rope.at[slot], cta.left_full.at[slot])

    if side == Side.LEFT:
        keep_together(cta, item.request, item.block)
    start_copy(cta, item, copy)


def _add_block(cta: Cta, side: Side, output: jax.Array, turn: Turn, buffer: Ref) -> jax.Array:
    """decay * output + P V for this side's half of V."""
    cta.scored.of(side).receive(turn.left)
    decay = plgpu.load(cta.decay(turn.left), layout=ROW)
    output = rescale(output, decay, emulate=cta.emulate)
    if side == Side.LEFT:
        cta.next_scores_done.receive(turn.left)
    probabilities, values = cta.slots.rope.at[turn.left], buffer.at[turn.of(side)]
    if cta.emulate:
        output = output + jnp.dot(probabilities[...].astype(jnp.float32), values[...].astype(jnp.float32))
        plgpu.commit_smem()  # the slot has been read
        return output
    return pl.run_state(lambda acc: plgpu.wgmma(acc, probabilities, values))(plgpu.ACC.init(output))


def _reuse(cta: Cta, side: Side, turn: Turn, item: Upcoming) -> Upcoming:
    """Refill this side's half of a slot that this warpgroup is done with."""
    if side == Side.RIGHT:
        cta.right_done.send(turn.left)
        warpgroup_barrier(emulate=cta.emulate)  # one warp issues the copy, all four have read
    else:
        cta.right_done.receive(turn.left)  # the right side, too, has read the probabilities, where rope parts go
    _start_copy(cta, side, turn.of(side), item)
    return item.after(cta)


def _store_whole(cta: Cta, request: jax.Array, side: Side, output: jax.Array, stage: Ref) -> None:
    """A whole request goes out rounded, through `stage`."""
    warpgroup_barrier(emulate=cta.emulate)  # all four warps are done with the values in the stage
    stage[...] = output.astype(cta.problem.dtype)
    plgpu.commit_smem()
    rows = cta.problem.copied_rows
    staged = stage if rows == ROWS else stage.at[pl.ds(0, rows)]
    plgpu.copy_smem_to_gmem(staged, cta.memory.out.at[request, cta.rows, pl.ds(side * HALF, HALF)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_piece(cta: Cta, request: jax.Array, side: Side, output: jax.Array) -> None:
    """A piece of a request goes to the workspace."""
    piece, scale = cta.piece(request, pl.ds(cta.row_block * ROWS, ROWS), side)
    store_rows(piece, scale, output, cta.problem.copied_rows, emulate=cta.emulate)
