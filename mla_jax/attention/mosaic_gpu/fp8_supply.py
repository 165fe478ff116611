"""Keeping the ring of slots full. The value roles do it themselves, each its half of a slot, as in `supply`.

By plain asynchronous copies of 16 bytes: those of a whole tile want rows that their tiles divide, which 576 or 656
bytes do not with tiles wide enough to be fast.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from mla_jax.attention.mosaic_gpu.config import HALF, LATENT, ROPE, ROWS, WARPGROUP
from mla_jax.attention.mosaic_gpu.fp8_hardware import BYTES, at_byte, i32, times
from mla_jax.attention.mosaic_gpu.fp8_work import Fp8Cta
from mla_jax.attention.mosaic_gpu.hardware import SCALAR
from mla_jax.attention.mosaic_gpu.supply import Upcoming
from mla_jax.attention.mosaic_gpu.work import Ref, Side

CHUNK = 16  # bytes that a thread copies at once


def fill(cta: Fp8Cta, side: Side, slot: jax.Array, item: Upcoming) -> Upcoming:
    """Start loading this side's half of an item into a slot that nobody uses; returns the next item."""
    start_copy(cta, side, slot, item)
    return item.after(cta)


def fill_all(cta: Fp8Cta, side: Side) -> Upcoming:
    """Fill the empty ring; returns the first item that found no place."""
    return lax.fori_loop(0, cta.config.slots, lambda slot, item: fill(cta, side, slot, item), Upcoming.start(cta))


def start_copy(cta: Fp8Cta, side: Side, slot: jax.Array, item: Upcoming) -> None:
    """Start loading this side's half of an item into a slot that nobody uses."""

    def copy(source: Ref, index: jax.Array, first_row: jax.Array, rows: int) -> None:
        def part(target: Ref, first: int, columns: int) -> None:
            _copy_rows(source, index, first_row, target.at[slot], first, columns, rows, emulate=cta.emulate)

        if side == Side.LEFT:
            part(cta.slots.left, 0, HALF)
            part(cta.slots.rope, LATENT, ROPE)
        else:
            part(cta.slots.right, HALF, HALF)
        cta.full[side].arrive(slot)

    there = item.request <= cta.end_req
    parts = cta.problem.query_parts
    query = cta.existing(item.request) * parts + lax.max(item.block + parts, jnp.int32(0))
    keys, queries = there & (item.block >= 0), there & (item.block < 0)
    pl.when(keys)(lambda: copy(cta.memory.cache, item.page, jnp.int32(0), ROWS))
    pl.when(queries)(lambda: copy(cta.memory.q, query, cta.row_block * ROWS, cta.problem.copied_rows))


def _copy_rows(
    source: Ref,
    index: jax.Array,
    first_row: jax.Array,
    target: Ref,
    first: int,
    columns: int,
    rows: int,
    *,
    emulate: bool,
) -> None:
    """target[:rows] = source[index, first_row : first_row + rows, first : first + columns], of one byte each."""
    if emulate:
        part = source.at[index, pl.ds(first_row, rows), pl.ds(first, columns)]
        target.at[pl.ds(0, rows)][...] = part[...]
        return
    _, height, pitch = source.shape
    chunks = columns // CHUNK
    rows_at_once = WARPGROUP // chunks

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, plgpu.RefType(BYTES)))
    def copy(ctx: Any, source: Any, index: Any, first_row: Any, target: Any) -> None:
        i64 = ir.IntegerType.get_signless(64)
        thread = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP))
        row, chunk = arith.divui(thread, i32(chunks)), arith.remui(thread, i32(chunks))
        line = arith.addi(arith.addi(times(index.registers.item(), height), first_row.registers.item()), row)
        offset = arith.muli(arith.extsi(i64, line), mgpu_utils.c(pitch, i64))
        begin = arith.extsi(i64, arith.addi(times(chunk, CHUNK), i32(first)))
        origin = at_byte(mgpu_utils.memref_ptr(source), arith.addi(offset, begin))
        # Eight rows of 64 bytes are a tile; two rows share 128 bytes, within which chunks are permuted.
        within = arith.remui(row, i32(8))
        place = arith.xori(arith.remui(chunk, i32(4)), arith.divui(within, i32(2)))
        parts = [
            times(arith.divui(row, i32(8)), 8 * columns),
            times(arith.divui(chunk, i32(4)), 8 * 64),
            times(within, 64),
            times(place, CHUNK),
        ]
        start = arith.addi(arith.addi(parts[0], parts[1]), arith.addi(parts[2], parts[3]))
        destination = at_byte(mgpu_utils.memref_ptr(target), start)
        for done in range(0, rows, rows_at_once):
            ptx = f"cp.async.cg.shared.global.L2::128B [$0 + {done * columns}], [$1 + {done * pitch}], {CHUNK};"
            if done + rows_at_once <= rows:
                mgpu_utils.inline_ptx(ptx, destination, origin, has_side_effects=True)
                continue
            branch: Any = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, row, i32(rows - done)))  # type: ignore[call-arg]
            with ir.InsertionPoint(branch.then_block):
                mgpu_utils.inline_ptx(ptx, destination, origin, has_side_effects=True)
                scf.yield_([])

    copy(source, index, first_row, target)
