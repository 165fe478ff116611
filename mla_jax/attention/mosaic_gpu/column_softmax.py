"""Pieces of the softmax over the rows of a matrix of products: keys are rows there, and queries columns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from mla_jax.attention.mosaic_gpu.config import PAGE, WARPGROUP
from mla_jax.attention.mosaic_gpu.fp8_hardware import KEYS_AT_ONCE, LAYOUT, PART
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, Ref
from mla_jax.attention.mosaic_gpu.ptx import (
    at_byte,
    i32,
    int32,
    only,
    opaque,
    pack,
    position,
    ptx,
    spot,
    spots,
    times,
    two,
    unpack,
    warp_and_lane,
)
from mla_jax.attention.mosaic_gpu.scores import ROW


def any_above(matrix: jax.Array, top: Ref, slack: float, barrier: int, *, emulate: bool) -> jax.Array:
    """Whether any number of a [64, rows] matrix is above top[row] + slack, as this warpgroup sees it: 0 or 1."""
    if emulate:
        return jnp.any(matrix > top[...][None, :] + slack).astype(jnp.int32)
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType()), return_type=result)
    def look(ctx: Any, matrix: Any, top: Any) -> Any:
        _, _, pair = position()
        base = at_byte(mgpu_utils.memref_ptr(top), times(pair, 8))
        above = mgpu_utils.c(0, ir.IntegerType.get_signless(1))
        for columns in range(matrix.shape[1] // 8):
            f32 = ir.F32Type.get()
            limits = ptx(
                f"{{ ld.shared.v2.f32 {{$0, $1}}, [$2 + {32 * columns}]; add.f32 $0, $0, $3; add.f32 $1, $1, $3; }}",
                base,
                mgpu_utils.c(slack, f32),
                result_types=[f32, f32],
            )
            for below in range(2):
                for number, limit in zip(two(matrix.registers[spot(0, columns, below)]), limits, strict=True):
                    above = arith.ori(above, arith.cmpf(arith.CmpFPredicate.OGT, number, limit))
        found = ptx(
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0;"
            f"bar.red.or.pred q, {barrier}, {WARPGROUP}, p; selp.b32 $0, 1, 0, q; }}",
            arith.extui(int32(), above),
            result_types=int32(),
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return look(matrix, top)


def no_totals(rows: int, *, emulate: bool) -> jax.Array:
    """Sums over no keys, for each thread and row: what `add_totals` adds to."""
    if emulate:
        return jnp.zeros((PAGE, rows), jnp.float32)

    @plgpu.inline_mgpu(return_type=opaque(rows // 4))
    def zeros(ctx: Any) -> Any:
        return pack([i32(0)] * (rows // 4))

    return zeros()


def add_totals(totals: jax.Array, matrix: jax.Array, unit: jax.Array, *, emulate: bool) -> jax.Array:
    """totals plus matrix / unit[:, None], where a thread adds up what it has of a row."""
    if emulate:
        return totals + matrix / unit[:, None]
    layout = opaque(matrix.shape[1] // 4).layout

    @plgpu.inline_mgpu(arg_types=(layout, LAYOUT, ROW), return_type=opaque(matrix.shape[1] // 4))
    def add(ctx: Any, totals: Any, matrix: Any, unit: Any) -> Any:
        words = unpack(totals)
        inverse = [
            ptx("{ .reg .b32 m; mov.b32 m, $1; sub.s32 m, 0x7f000000, m; mov.b32 $0, m; }", x, result_types=x.type)
            for x in (only(r) for r in unit.registers.flat)
        ]
        for columns in range(matrix.shape[1] // 8):
            for below in range(2):
                numbers = two(matrix.registers[spot(0, columns, below)])
                for i, number in enumerate(numbers):
                    at = 2 * columns + i
                    words[at] = ptx(
                        "{ .reg .f32 t; mov.b32 t, $1; fma.rn.f32 t, $2, $3, t; mov.b32 $0, t; }",
                        words[at],
                        number,
                        inverse[below],
                        result_types=int32(),
                    )
        return pack(words)

    return add(totals, matrix, unit)


def scale_totals(totals: jax.Array, factor: jax.Array, *, emulate: bool) -> jax.Array:
    """totals times factor[row]."""
    if emulate:
        return totals * factor[None, :]
    count = factor.shape[0] // 4

    @plgpu.inline_mgpu(arg_types=(opaque(count).layout, LAYOUT.reduce(0)), return_type=opaque(count))
    def scale(ctx: Any, totals: Any, factor: Any) -> Any:
        factors = [x for register in factor.registers.flat for x in two(register)]
        return pack(
            [
                ptx("{ .reg .f32 t; mov.b32 t, $1; mul.f32 t, t, $2; mov.b32 $0, t; }", w, f, result_types=int32())
                for w, f in zip(unpack(totals), factors, strict=True)
            ]
        )

    return scale(totals, factor)


def sum_totals(totals: jax.Array, rows: int, *, emulate: bool) -> jax.Array:
    """[rows]"""
    if emulate:
        return totals.sum(axis=0)
    result = plgpu.ShapeDtypeStruct((PAGE, rows), jnp.dtype(jnp.float32), layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(opaque(rows // 4).layout,), return_type=result)
    def spread(ctx: Any, totals: Any) -> Any:
        f32 = ir.F32Type.get()
        pair_of, zero = ir.VectorType.get((2,), f32), mgpu_utils.c(0.0, f32)
        words = [mgpu_utils.bitcast(word, f32) for word in unpack(totals)]
        registers = spots(PAGE, rows)
        for columns in range(rows // 8):
            registers[spot(0, columns, 0)] = vector.from_elements(pair_of, words[2 * columns : 2 * columns + 2])
            registers[spot(0, columns, 1)] = vector.from_elements(pair_of, [zero, zero])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return spread(totals).sum(axis=0)


def store_probabilities_by_key(target: Ref, matrix: jax.Array, *, emulate: bool) -> None:
    """target = matrixᵀ in float16; matrix is [64, rows], target [4, rows, 16], 16 keys to a tile PART."""
    rows = matrix.shape[1]
    if emulate:
        for part in range(target.shape[0]):
            keys = slice(part * KEYS_AT_ONCE, (part + 1) * KEYS_AT_ONCE)
            target.at[part][...] = matrix[keys].T.astype(jnp.float16)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(PART), LAYOUT))
    def store(ctx: Any, target: Any, matrix: Any) -> None:
        warp, lane = warp_and_lane()
        row, half, later = (
            arith.remui(lane, i32(8)),
            arith.remui(arith.divui(lane, i32(8)), i32(2)),
            arith.divui(lane, i32(16)),
        )
        place = arith.xori(half, arith.divui(row, i32(4)))  # the swizzle
        offset = arith.addi(times(warp, rows * 32), arith.addi(times(row, 32), times(place, 16)))
        address = at_byte(mgpu_utils.memref_ptr(target), arith.addi(offset, times(later, 8 * 32)))
        for first in range(0, rows // 8, 2):
            count = min(2, rows // 8 - first)
            numbers = []
            for column in range(first, first + count):
                for below in range(2):
                    register = matrix.registers[spot(0, column, below)]
                    numbers += two(register)
            packs = "".join(f"cvt.rn.f16x2.f32 w{i}, ${2 * i + 1}, ${2 * i};" for i in range(2 * count))
            listed = ", ".join(f"w{i}" for i in range(2 * count))
            ptx(
                f"{{ .reg .b32 w<4>; {packs} stmatrix.sync.aligned.m8n8.x{2 * count}.trans.shared.b16 "
                f"[${4 * count} + {first * 8 * 32}], {{{listed}}}; }}",
                *numbers,
                address,
            )

    store(target, matrix)
