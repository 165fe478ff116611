"""The two value roles for caches in fp8_ds_mla: as in `fp8_values`, but values are multiplied with their scales."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.config import HALF, PAGE
from mla_jax.attention.mosaic_gpu.ds_hardware import load_values, transposed
from mla_jax.attention.mosaic_gpu.ds_work import DsCta
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.fp8_hardware import (
    COLUMN,
    KEYS_AT_ONCE,
    LAYOUT,
    rescale_columns,
    store_transposed,
)
from mla_jax.attention.mosaic_gpu.fp8_work import Place
from mla_jax.attention.mosaic_gpu.hardware import one_warp, warpgroup_barrier
from mla_jax.attention.mosaic_gpu.scores import nonzero
from mla_jax.attention.mosaic_gpu.supply import Upcoming
from mla_jax.attention.mosaic_gpu.work import Ref, Side


class _Ready(NamedTuple):
    """What is known of a block before its turn."""

    differs: jax.Array  # whether any decay is not 1
    loaded: jax.Array  # the bytes of its first keys


_Carry = tuple[jax.Array, _Ready, Place, Upcoming]


def accumulate(cta: DsCta, side: Side) -> None:
    """Add up the values of every block of every request, write the output; the left side refills what was used."""
    config, rows = cta.config, cta.problem.copied_rows
    for buffer in range(BUFFERS):
        cta.buffer_free.send(jnp.int32(buffer))

    def request(r: jax.Array, carry: tuple[Place, Upcoming]) -> tuple[Place, Upcoming]:
        place, item = carry
        segment, whole = cta.segment(r), cta.pieces(r) == 1  # read long before they are needed

        def block(i: jax.Array, carry: _Carry) -> _Carry:
            output, ready, place, item = carry
            output, ready = _add_block(cta, side, output, ready, place, item, last=False)
            cta.buffer_free.send(place.buffer)
            return output, ready, place.after(config), _after(cta, side, item)

        output = plgpu.layout_cast(jnp.zeros((HALF, rows), jnp.float32), LAYOUT)
        start = (output, _await_block(cta, side, place), place, item)
        output, ready, place, item = lax.fori_loop(segment.first, segment.end - 1, block, start)
        output, _ = _add_block(cta, side, output, ready, place, item, last=True)
        cta.buffer_free.send(place.buffer)
        place = place.after(config)
        cta.scored[side].receive(place.buffer)
        total = plgpu.load(cta.total(place.buffer).at[pl.ds(0, rows)], layout=COLUMN, optimized=False)
        factor = 1.0 / nonzero(total)
        cta.buffer_free.send(place.buffer)
        output = output * lax.broadcast_in_dim(factor, output.shape, [1])
        out_rows, columns = cta.rows, pl.ds(side * HALF, HALF)
        out, piece = cta.memory.out.at[r, out_rows, columns], cta.memory.part_out.at[cta.partial_slot(r), out_rows, columns]
        pl.when(whole)(lambda: store_transposed(out, output, emulate=cta.emulate))
        pl.when(~whole)(lambda: store_transposed(piece, output, emulate=cta.emulate))
        return place.after_total(), _after(cta, side, item)

    cta.for_each_request(request, (Place.start(), _fill_all(cta, side)))


def _fill_all(cta: DsCta, side: Side) -> Upcoming:
    begin = cta.begin_req
    first = Upcoming(begin, cta.begin_block - 1, cta.segment(cta.existing(begin)).end, jnp.int32(0)).after(cta)
    if side == Side.RIGHT:
        return first

    def fill(slot: jax.Array, item: Upcoming) -> Upcoming:
        _start_copy(cta, slot, item)
        return item.after(cta)

    return lax.fori_loop(0, cta.config.slots, fill, first)


def _after(cta: DsCta, side: Side, item: Upcoming) -> Upcoming:
    return item.after(cta) if side == Side.LEFT else item


def _start_copy(cta: DsCta, slot: jax.Array, item: Upcoming) -> None:
    def issue() -> None:
        @pl.when(item.request <= cta.end_req)
        def _() -> None:
            plgpu.copy_gmem_to_smem(cta.memory.cache.at[item.page], cta.keys.at[slot], cta.full.at[slot])

    one_warp(issue, emulate=cta.emulate)


def _refill(cta: DsCta, side: Side, place: Place, item: Upcoming) -> None:
    if side == Side.RIGHT:
        cta.slot_read.send(place.buffer)
    else:
        cta.slot_read.receive(place.buffer)  # all eight warps have read the slot
        _start_copy(cta, place.slot, item)


def _await_block(cta: DsCta, side: Side, place: Place) -> _Ready:
    cta.scored[side].receive(place.buffer)
    plgpu.barrier_wait(cta.full.at[place.slot])  # sees what copies wrote
    return _Ready(cta.differs[place.buffer], _load(cta, side, place, 0))


def _load(cta: DsCta, side: Side, place: Place, part: int) -> jax.Array:
    return load_values(cta.keys.at[place.slot], cta.scales.at[place.buffer], side, part, emulate=cta.emulate)


def _decay(cta: DsCta, place: Place) -> Ref:
    return cta.decay(place.buffer).at[pl.ds(0, cta.problem.copied_rows)]


def _add_block(
    cta: DsCta, side: Side, output: jax.Array, ready: _Ready, place: Place, item: Upcoming, *, last: bool
) -> tuple[jax.Array, _Ready]:
    """decay * Oᵀ + Vᵀ Pᵀ for this side's half of V.

    Beside it what is ready of the next block: its first values are fetched while the last products are under way.
    """
    output = rescale_columns(output, _decay(cta, place), ready.differs, emulate=cta.emulate)
    following = place.after(cta.config)
    parts = range(PAGE // KEYS_AT_ONCE)
    rows = pl.ds(0, cta.problem.copied_rows)

    def refill() -> _Ready:
        _refill(cta, side, place, item)
        return ready if last else _await_block(cta, side, following)

    if cta.emulate:
        for part in parts:
            probabilities = cta.probabilities.at[place.buffer, part, rows][...].astype(jnp.float32)
            operand = transposed(ready.loaded if part == 0 else _load(cta, side, place, part), emulate=True)
            output = output + jnp.dot(operand.astype(jnp.float32), probabilities.T)
        plgpu.commit_smem()  # the slot has been read
        return output, refill()

    def multiply(acc: Ref) -> tuple[jax.Array, _Ready]:
        acc[...] = output
        loaded = ready.loaded
        for part in parts:
            if part > 1:
                plgpu.wgmma_wait(1)  # registers have room for the operands of two products
            operand = transposed(loaded, emulate=False)
            if part != parts[-1]:
                loaded = _load(cta, side, place, part + 1)  # under the products: shared memory answers late
            plgpu.wgmma(acc, operand, cta.probabilities.at[place.buffer, part, rows].transpose((1, 0)))
        following = refill()
        return acc[...], following

    return pl.run_scoped(multiply, plgpu.ACC((HALF, cta.problem.copied_rows), output.dtype))
