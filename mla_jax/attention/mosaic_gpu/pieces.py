"""How pieces of shared requests lie in the workspace, and how the value roles store theirs.

Parts write pieces and read those of others while the whole GPU waits for it, so their bytes are time. Numbers are
float16, 11 bits where outputs in bf16 have 8; a power of two for each 64 dims of a row keeps them in range:

    part_out    [2 * parts, row_blocks * 64, 512] float16
    part_scale  [2 * parts, row_blocks * 64, 8] float32
    part_lse    [2 * parts, row_blocks * 64] float32, base 2
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from mla_jax.attention.mosaic_gpu.config import GROUP, HALF, LATENT, ROWS
from mla_jax.attention.mosaic_gpu.ptx import at_byte, f32, float32, i32, int32, position, ptx, pure, spot, times, two

Ref = Any
MATRIX = plgpu.Layout.WGMMA
LARGEST = 14  # binary exponent of the largest number of a group in float16
LEAST = LARGEST + 1  # biased exponent: the scale must not be subnormal
BIAS = 127
GROUPS = HALF // GROUP  # in half a row
WORDS = 4  # of two numbers that one store takes
ROW_BYTES = 2 * LATENT
AT_ONCE = 8  # columns of a matrix whose largest numbers lanes exchange together


def store_rows(piece: Ref, scale: Ref, matrix: jax.Array, rows: int, *, emulate: bool) -> None:
    """piece * scale = the first `rows` of a (64, 256) MATRIX, and maybe of some more: a warp has 16.

    piece: [64, 256] float16, half of rows of the workspace; scale: [64, 4] float32. What a thread has of 32 columns
    stays together: columns 8 i + 2 p, + 1 of thread p of a quad lie at 8 p + 2 i (in the interpreter, where they were).
    """
    if emulate:
        _store_emulated(piece, scale, matrix)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), MATRIX))
    def store(ctx: Any, piece: Any, scale: Any, matrix: Any) -> None:
        warp, row, pair = position()
        # Of stores alone, which become predicates: accumulators are spilled where more than that is in a branch.
        used = None if rows == ROWS else arith.cmpi(arith.CmpIPredicate.ult, warp, i32(-(-rows // 16)))
        first = arith.addi(times(warp, 16), row)
        numbers_at = at_byte(mgpu_utils.memref_ptr(piece), arith.addi(times(first, ROW_BYTES), times(pair, 4 * WORDS)))
        scales_at = at_byte(mgpu_utils.memref_ptr(scale), times(first, 4 * 2 * GROUPS))
        for below in range(2):  # a thread has a row, and the one 8 below
            registers = [matrix.registers[spot(0, i, below)] for i in range(HALF // 8)]
            numbers = [number for register in registers for number in two(register)]
            per_group = len(numbers) // GROUPS
            groups = [numbers[i : i + per_group] for i in range(0, len(numbers), per_group)]
            for group, (mine, (down, up)) in enumerate(zip(groups, _powers(groups, (1, 2)), strict=True)):
                offset = 8 * below * ROW_BYTES + 2 * GROUP * group
                for i in range(0, per_group, 2 * WORDS):
                    _store_words(numbers_at, offset + 8 * i, mine[i : i + 2 * WORDS], down, used)
                store_scale = f"st.global.f32 [$0 + {4 * (8 * below * 2 * GROUPS + group)}], $1;"
                ptx(store_scale, scales_at, up, predicate=used)

    store(piece, scale, matrix)


def store_columns(piece: Ref, scale: Ref, matrix: jax.Array, *, emulate: bool) -> None:
    """piece * scale = matrixᵀ for a matrix [256, n] of products with `fp8_hardware.transposed`.

    piece: [n, 256] float16, half of rows of the workspace; scale: [n, 4] float32.
    """
    if emulate:
        _store_emulated(piece, scale, matrix.T)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), MATRIX))
    def store(ctx: Any, piece: Any, scale: Any, matrix: Any) -> None:
        warp, row, pair = position()
        dims = arith.addi(times(warp, 2 * GROUP), times(row, 4 * WORDS))
        numbers_at = at_byte(mgpu_utils.memref_ptr(piece), arith.addi(dims, times(pair, 2 * ROW_BYTES)))
        scales_at = arith.addi(times(warp, 4), times(pair, 2 * 4 * 2 * GROUPS))
        scales_at = at_byte(mgpu_utils.memref_ptr(scale), scales_at)
        columns = [
            [two(matrix.registers[spot(dim // 2, eight, dim % 2)])[second] for dim in range(2 * WORDS)]
            for eight in range(matrix.shape[1] // 8)
            for second in range(2)
        ]
        for first in range(0, len(columns), AT_ONCE):
            some = columns[first : first + AT_ONCE]
            for column, (numbers, (down, up)) in enumerate(zip(some, _powers(some, (4, 8, 16)), strict=True), first):
                below = 8 * (column // 2) + column % 2
                _store_words(numbers_at, below * ROW_BYTES, numbers, down)
                store_scale = f"st.global.f32 [$0 + {below * 4 * 2 * GROUPS}], $1;"
                ptx(store_scale, scales_at, up)

    store(piece, scale, matrix)


def _store_emulated(piece: Ref, scale: Ref, matrix: jax.Array) -> None:
    for group in range(GROUPS):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        numbers = matrix[:, columns]
        largest = jnp.max(jnp.abs(numbers), axis=1)
        power = jnp.exp2(jnp.floor(jnp.log2(jnp.where(largest > 0, largest, 1.0))) - LARGEST)
        piece[:, columns] = (numbers / jax.lax.broadcast_in_dim(power, numbers.shape, [0])).astype(jnp.float16)
        scale[:, group] = power


def _largest(numbers: Sequence[Any]) -> Any:
    """The largest magnitude of an even number of numbers; NaN counts as nothing."""
    code = "{ .reg .f32 a; .reg .f32 b; abs.f32 a, $2; abs.f32 b, $3; max.f32 a, a, b; max.f32 $0, $1, a; }"
    largest = f32(0.0)
    for i in range(0, len(numbers), 2):
        largest = pure(code, largest, *numbers[i : i + 2], result_types=float32())
    return largest


def _powers(groups: Sequence[Sequence[Any]], distances: Sequence[int]) -> list[tuple[Any, Any]]:
    """For each group: what brings its largest number, of some lanes', to 2¹⁴ … 2¹⁵, and its inverse.

    Lanes exchange the numbers of all groups at once: an exchange takes as long as many.
    """
    largest = [_largest(numbers) for numbers in groups]
    for distance in distances:
        others = [mgpu_utils.shfl_bfly(x, distance) for x in largest]
        largest = [arith.maxnumf(*pair) for pair in zip(largest, others, strict=True)]
    return [_power(x) for x in largest]


def _power(largest: Any) -> tuple[Any, Any]:
    exponent = arith.shrui(arith.bitcast(int32(), largest), i32(23))
    exponent = arith.maxui(exponent, i32(LEAST))
    down = arith.shli(arith.subi(i32(2 * BIAS + LARGEST), exponent), i32(23))
    up = arith.shli(arith.subi(exponent, i32(LARGEST)), i32(23))
    return arith.bitcast(float32(), down), arith.bitcast(float32(), up)


def _store_words(address: Any, offset: int, numbers: Sequence[Any], factor: Any, used: Any = None) -> None:
    """Eight numbers times a factor, as float16."""
    code = "{ .reg .f32 a; .reg .f32 b; mul.f32 a, $1, $3; mul.f32 b, $2, $3; cvt.rn.f16x2.f32 $0, b, a; }"
    pairs = [numbers[i : i + 2] for i in range(0, 2 * WORDS, 2)]
    words = [pure(code, *pair, factor, result_types=int32()) for pair in pairs]
    store = f"st.global.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
    ptx(store, address, *words, predicate=used)
