"""The two value roles for FP8 caches: each keeps half of Oᵀ, 256 dims of 64 rows, in registers; adds Vᵀ Pᵀ to it.

Transposed, because values are bytes: tensor cores take 16-bit operands only, or bytes that lie the other way. As the
operand in registers they are widened and turned on the way there, which costs no shared memory but the bytes
themselves. And a narrow P, with few rows, costs few cycles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.config import HALF, PAGE
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.fp8_hardware import (
    COLUMN,
    KEYS_AT_ONCE,
    LAYOUT,
    differs_from_one,
    load_values,
    rescale_columns,
    store_transposed,
    transposed,
)
from mla_jax.attention.mosaic_gpu.fp8_work import Fp8Cta, Place
from mla_jax.attention.mosaic_gpu.hardware import warpgroup_barrier
from mla_jax.attention.mosaic_gpu.scores import nonzero
from mla_jax.attention.mosaic_gpu.supply import Upcoming, fill, fill_all, start_copy
from mla_jax.attention.mosaic_gpu.work import Ref, Side


class _Ready(NamedTuple):
    """What is known of a block before its turn."""

    differs: jax.Array  # whether any decay is not 1
    loaded: jax.Array  # the bytes of its first keys


_Carry = tuple[jax.Array, _Ready, Place, Upcoming]


def accumulate(cta: Fp8Cta, side: Side) -> None:
    """Add up the values of every block of every request, write the output, and refill what was used."""
    config = cta.config
    value_scale = cta.value_scale[0]
    for buffer in range(BUFFERS):
        cta.buffer_free.send(jnp.int32(buffer))

    def request(r: jax.Array, carry: tuple[Place, Upcoming]) -> tuple[Place, Upcoming]:
        place, item = carry
        segment, whole = cta.segment(r), cta.pieces(r) == 1  # read long before they are needed
        for _part in range(config.query_parts):
            _await(cta, side, place)  # the queries have been taken
            item = fill(cta, side, place.slot, item)
            cta.buffer_free.send(place.buffer)
            place = place.after(config)

        def block(i: jax.Array, carry: _Carry) -> _Carry:
            output, ready, place, item = carry
            output, ready = _add_block(cta, side, output, ready, place, item, last=False)
            cta.buffer_free.send(place.buffer)
            return output, ready, place.after(config), item.after(cta)

        output = plgpu.layout_cast(jnp.zeros((HALF, cta.problem.copied_rows), jnp.float32), LAYOUT)
        start = (output, _await_block(cta, side, place), place, item)
        output, ready, place, item = lax.fori_loop(segment.first, segment.end - 1, block, start)
        output, _ = _add_block(cta, side, output, ready, place, item, last=True)
        total = plgpu.load(
            cta.total(place.buffer).at[pl.ds(0, cta.problem.copied_rows)], layout=COLUMN, optimized=False
        )
        factor = value_scale / nonzero(total)
        cta.buffer_free.send(place.buffer)
        output = output * lax.broadcast_in_dim(factor, output.shape, [1])
        rows, columns = cta.rows, pl.ds(side * HALF, HALF)
        out, piece = cta.memory.out.at[r, rows, columns], cta.memory.part_out.at[cta.partial_slot(r), rows, columns]
        pl.when(whole)(lambda: store_transposed(out, output, emulate=cta.emulate))
        pl.when(~whole)(lambda: store_transposed(piece, output, emulate=cta.emulate))
        return place.after(config), item.after(cta)

    cta.for_each_request(request, (Place.start(), fill_all(cta, side)))


def _await(cta: Fp8Cta, side: Side, place: Place) -> None:
    """Wait until an item has been scored, and see what copies wrote to its slot."""
    cta.scored[side].receive(place.buffer)
    plgpu.barrier_wait((cta.left_full if side == Side.LEFT else cta.right_full).at[place.slot])


def _await_block(cta: Fp8Cta, side: Side, place: Place) -> _Ready:
    _await(cta, side, place)
    differs = differs_from_one(_decay(cta, place), emulate=cta.emulate)
    return _Ready(differs, load_values(_values(cta, side, place), 0, emulate=cta.emulate))


def _values(cta: Fp8Cta, side: Side, place: Place) -> Ref:
    return (cta.slots.left if side == Side.LEFT else cta.slots.right).at[place.slot]


def _decay(cta: Fp8Cta, place: Place) -> Ref:
    return cta.decay(place.buffer).at[pl.ds(0, cta.problem.copied_rows)]


def _add_block(
    cta: Fp8Cta, side: Side, output: jax.Array, ready: _Ready, place: Place, item: Upcoming, *, last: bool
) -> tuple[jax.Array, _Ready]:
    """decay * Oᵀ + Vᵀ Pᵀ for this side's half of V; its slot goes to `item` as soon as it has been read.

    Beside it what is ready of the next block: its first values are fetched while the last products are under way.
    """
    output = rescale_columns(output, _decay(cta, place), ready.differs, emulate=cta.emulate)
    values, following = _values(cta, side, place), place.after(cta.config)
    parts = range(PAGE // KEYS_AT_ONCE)
    rows = pl.ds(0, cta.problem.copied_rows)

    def load(part: int) -> jax.Array:
        return load_values(values, part, emulate=cta.emulate)

    def refill() -> _Ready:
        warpgroup_barrier(emulate=cta.emulate)  # all four warps have read the slot
        start_copy(cta, side, place.slot, item)
        return ready if last else _await_block(cta, side, following)

    if cta.emulate:
        for part in parts:
            probabilities = cta.probabilities.at[place.buffer, part, rows][...].astype(jnp.float32)
            operand = transposed(ready.loaded if part == 0 else load(part), emulate=True)
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
                loaded = load(part + 1)  # under the products: shared memory answers late
            plgpu.wgmma(acc, operand, cta.probabilities.at[place.buffer, part, rows].transpose((1, 0)))
        following = refill()
        return acc[...], following

    return pl.run_scoped(multiply, plgpu.ACC((HALF, cta.problem.copied_rows), output.dtype))
