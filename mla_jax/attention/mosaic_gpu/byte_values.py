"""The two value roles for FP8 caches: each keeps half of Oᵀ, 256 dims of 64 rows, in registers; adds Vᵀ Pᵀ to it.

Transposed, because values are bytes: tensor cores take 16-bit operands only, or bytes that lie the other way. As the
operand in registers they are widened and turned on the way there, which costs no shared memory but the bytes
themselves. And a narrow P, with few rows, costs few cycles.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_work import BytesWork, Place
from mla_jax.attention.mosaic_gpu.config import HALF, PAGE
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.fp8_hardware import (
    COLUMN,
    KEYS_AT_ONCE,
    LAYOUT,
    rescale_columns,
    store_transposed,
)
from mla_jax.attention.mosaic_gpu.pieces import store_columns
from mla_jax.attention.mosaic_gpu.supply import Upcoming
from mla_jax.attention.mosaic_gpu.work import Ref


class Values(Protocol):
    """What one side does as its format wants it."""

    total_apart: bool  # whether a request's total comes in a buffer of its own, or with the last block's probabilities

    def fill_all(self) -> Upcoming:
        """Fill the empty ring; returns the first item that found no place."""

    def await_item(self, place: Place) -> None:
        """Wait until an item has been scored, and see what copies wrote to its slot."""

    def differs(self, place: Place) -> jax.Array:
        """Whether any decay of a block is not 1: 0 or 1."""

    def load(self, place: Place, part: int) -> jax.Array:
        """This side's values of 16 keys of a block, for `widen`."""

    def widen(self, loaded: jax.Array) -> jax.Array:
        """Vᵀ of 16 keys: [256, 16] float16."""

    def refill(self, place: Place, item: Upcoming) -> None:
        """All four warps have read a slot: load an item into it."""

    def after(self, item: Upcoming) -> Upcoming:
        """The item after this one."""

    def scale(self) -> jax.Array:
        """What the output is multiplied with: one number."""


class _Ready(NamedTuple):
    """What is known of a block before its turn."""

    differs: jax.Array  # whether any decay is not 1
    loaded: jax.Array  # the bytes of its first keys


_Carry = tuple[jax.Array, _Ready, Place, Upcoming]


def accumulate(cta: BytesWork, side: jax.Array, values: Values) -> None:
    """Add up the values of every block of every request, write the output, and refill what was used."""
    config = cta.config
    scale = values.scale()
    for buffer in range(BUFFERS):
        cta.buffer_free.send(jnp.int32(buffer))

    def request(r: jax.Array, carry: tuple[Place, Upcoming]) -> tuple[Place, Upcoming]:
        place, item = carry
        segment, whole = cta.segment(r), cta.pieces(r) == 1  # read long before they are needed
        for _part in range(cta.problem.query_parts):
            values.await_item(place)  # the queries have been taken
            values.refill(place, item)
            item = values.after(item)
            cta.buffer_free.send(place.buffer)
            place = place.after(config)

        def block(i: jax.Array, carry: _Carry) -> _Carry:
            output, ready, place, item = carry
            output, ready = _add_block(cta, values, output, ready, place, item, last=False)
            cta.buffer_free.send(place.buffer)
            return output, ready, place.after(config), values.after(item)

        output = plgpu.layout_cast(jnp.zeros((HALF, cta.problem.copied_rows), jnp.float32), LAYOUT)
        start = (output, _await_block(values, place), place, item)
        output, ready, place, item = lax.fori_loop(segment.first, segment.end - 1, block, start)
        output, _ = _add_block(cta, values, output, ready, place, item, last=True)
        if values.total_apart:
            cta.buffer_free.send(place.buffer)
            place = place.after(config)
            cta.scored.of(side).receive(place.buffer)
        inverse = cta.inverse_total(place.buffer).at[pl.ds(0, cta.problem.copied_rows)]
        factor = scale * plgpu.load(inverse, layout=COLUMN, optimized=False)
        cta.buffer_free.send(place.buffer)
        output = output * lax.broadcast_in_dim(factor, output.shape, [1])
        out = cta.memory.out.at[r, cta.rows, pl.ds(side * HALF, HALF)]
        pl.when(whole)(lambda: store_transposed(out, output, emulate=cta.emulate))
        pl.when(~whole)(lambda: store_columns(*cta.piece(r, cta.rows, side), output, emulate=cta.emulate))
        place = place.after_total() if values.total_apart else place.after(config)
        return place, values.after(item)

    cta.for_each_request(request, (Place.start(), values.fill_all()))


def _await_block(values: Values, place: Place) -> _Ready:
    values.await_item(place)
    return _Ready(values.differs(place), values.load(place, 0))


def _decay(cta: BytesWork, place: Place) -> Ref:
    return cta.decay(place.buffer).at[pl.ds(0, cta.problem.copied_rows)]


def _add_block(
    cta: BytesWork, values: Values, output: jax.Array, ready: _Ready, place: Place, item: Upcoming, *, last: bool
) -> tuple[jax.Array, _Ready]:
    """decay * Oᵀ + Vᵀ Pᵀ for this side's half of V; its slot goes to `item` as soon as it has been read.

    Beside it what is ready of the next block: its first values are fetched while the last products are under way.
    """
    output = rescale_columns(output, _decay(cta, place), ready.differs, emulate=cta.emulate)
    following = place.after(cta.config)
    parts = range(PAGE // KEYS_AT_ONCE)
    rows = pl.ds(0, cta.problem.copied_rows)

    def refill() -> _Ready:
        values.refill(place, item)
        return ready if last else _await_block(values, following)

    if cta.emulate:
        for part in parts:
            probabilities = cta.probabilities.at[place.buffer, part, rows][...].astype(jnp.float32)
            operand = values.widen(ready.loaded if part == 0 else values.load(place, part))
            output = output + jnp.dot(operand.astype(jnp.float32), probabilities.T)
        plgpu.commit_smem()  # the slot has been read
        return output, refill()

    def multiply(acc: Ref) -> tuple[jax.Array, _Ready]:
        acc[...] = output
        loaded = ready.loaded
        for part in parts:
            if part > 1:
                plgpu.wgmma_wait(1)  # registers have room for the operands of two products
            operand = values.widen(loaded)
            if part != parts[-1]:
                loaded = values.load(place, part + 1)  # under the products: shared memory answers late
            plgpu.wgmma(acc, operand, cta.probabilities.at[place.buffer, part, rows].transpose((1, 0)))
        following = refill()
        return acc[...], following

    return pl.run_scoped(multiply, plgpu.ACC((HALF, cta.problem.copied_rows), output.dtype))
