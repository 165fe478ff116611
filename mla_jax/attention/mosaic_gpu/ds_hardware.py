"""Instructions without a name in Pallas that rows of 656 bytes need (see `KEYS`): numbers on their way to registers.

A page of the cache lies in shared memory as it does in the cache. Rows of 656 bytes are 4 banks apart, so that neither
`ldmatrix` of 16 bytes of 8 keys nor 8 bytes of 4 keys meet in a bank.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector

from mla_jax.attention.mosaic_gpu.config import HALF, LATENT, PAGE, ROPE, WARPGROUP
from mla_jax.attention.mosaic_gpu.ds_layout import GROUP, GROUPS, ROW_BYTES, SCALES_AT, split_rows
from mla_jax.attention.mosaic_gpu.fp8_hardware import KEYS_AT_ONCE, LAYOUT, PART, WORDS
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, TILED, Ref
from mla_jax.attention.mosaic_gpu.ptx import (
    at_byte,
    i32,
    int32,
    only,
    opaque,
    pack,
    position,
    ptx,
    times,
    two,
    unpack,
    warp_and_lane,
)

ROW = LAYOUT.reduce(1)  # one value per key
OPERAND = 64  # dims of keys in registers at a time
# Bits of the float32 powers of two between which sizes count as what they are. Where queries and keys both have no
# latent part, the product of their rope parts is divided by the smallest of both: it must not overflow.
SMALLEST, LARGEST = (127 - 32) << 23, (127 + 64) << 23
SCALE_SIZE = 6  # binary exponent of a key's largest scale / unit: 448 times 2**7 fits float16, and so does 2**-14
QUERY_SIZE = 8  # binary exponent of a query's largest number
FACTORS = 2 * GROUPS + 2


class KeyScales(NamedTuple):
    """What a block's keys are multiplied with. A key's numbers are its unit times numbers of moderate size.

    Its unit is a power of two, so that numbers of 16 bits hold what is left of any scale.
    """

    unit: jax.Array  # [64]
    exponent: jax.Array  # [64] its binary logarithm
    factors: jax.Array  # for each key and group, scale / unit; and 1 / unit


def load_scales(keys: Ref, *, emulate: bool) -> KeyScales:
    """The scales of a page of keys."""
    if emulate:
        _, scales, _ = split_rows(keys[...])
        bits = lax.bitcast_convert_type(scales, jnp.int32) & 0x7F800000
        bits = jnp.clip(bits.max(axis=1), SMALLEST, LARGEST) - (SCALE_SIZE << 23)
        unit = lax.bitcast_convert_type(bits, jnp.float32)
        return KeyScales(
            unit,
            ((bits >> 23) - 127).astype(jnp.float32),
            (scales / unit[:, None]).astype(jnp.float16).astype(jnp.float32),
        )
    number = plgpu.ShapeDtypeStruct((PAGE,), jnp.dtype(jnp.float32), layout=ROW)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(number, number, opaque(FACTORS)))
    def load(ctx: Any, keys: Any) -> Any:
        warp, row, _ = position()
        offset = times(arith.addi(times(warp, 16), row), ROW_BYTES)
        address = at_byte(mgpu_utils.memref_ptr(keys), offset)
        units, exponents, factors, inverses = [], [], [], []
        for below in range(2):
            found = ptx(
                "{ .reg .b32 s<4>, t<4>, m, n; .reg .f32 v;"
                f"ld.shared.v4.b32 {{s0, s1, s2, s3}}, [$7 + {below * 8 * ROW_BYTES + SCALES_AT}];"
                + "".join(f"and.b32 t{i}, s{i}, 0x7f800000;" for i in range(4))
                + "max.s32 m, t0, t1; max.s32 n, t2, t3; max.s32 m, m, n;"
                + f"max.s32 m, m, {SMALLEST}; min.s32 m, m, {LARGEST}; sub.s32 m, m, {SCALE_SIZE << 23};"
                + "mov.b32 $0, m; shr.u32 n, m, 23; cvt.rn.f32.s32 v, n; sub.f32 $1, v, 0f42FE0000;"
                + "sub.s32 m, 0x7f000000, m;"  # bits of 1 / unit
                + "".join(
                    f"{{ .reg .f32 a, b; mov.b32 a, s{i}; mov.b32 b, m; mul.f32 a, a, b;"
                    f"cvt.rn.f16x2.f32 ${2 + i}, a, a; }}"
                    for i in range(4)
                )
                + "prmt.b32 $6, m, m, 0x3232; }",
                address,
                result_types=[ir.F32Type.get()] * 2 + [int32()] * 5,
            )
            units.append(found[0])
            exponents.append(found[1])
            factors += found[2:6]
            inverses.append(found[6])
        return _row_vector(units), _row_vector(exponents), pack(factors + inverses)

    return KeyScales(*load(keys))


def _row_vector(numbers: list[Any]) -> Any:
    layout = mgpu.WGMMA_LAYOUT.reduce((1,))
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.array([vector.from_elements(one, [x]) for x in numbers], dtype=object)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((PAGE,))), _layout=layout, _is_signed=None
    )


def store_scales(target: Ref, scales: KeyScales, *, emulate: bool) -> None:
    """target[g, key] = scale / unit in float16, for value roles."""
    if emulate:
        target[...] = scales.factors.T.astype(jnp.float16)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), opaque(FACTORS).layout))
    def store(ctx: Any, target: Any, factors: Any) -> None:
        warp, row, pair = position()
        words = unpack(factors)
        key = arith.addi(times(warp, 16), row)
        address = at_byte(mgpu_utils.memref_ptr(target), times(arith.addi(times(pair, PAGE), key), 2))
        for below in range(2):
            word = words[GROUPS * below]
            for group in range(1, GROUPS):
                is_it = arith.cmpi(arith.CmpIPredicate.eq, pair, i32(group))
                word = arith.select(is_it, words[GROUPS * below + group], word)
            ptx(f"{{ .reg .b16 h, g; mov.b32 {{h, g}}, $0; st.shared.b16 [$1 + {16 * below}], h; }}", word, address)

    store(target, scales.factors)


def load_latents(address: Any, part: int) -> list[Any]:
    """The bytes of 64 dims of this warp's 16 keys, in words for `latent_registers`; address is `matrix_address`."""
    return [word for at in range(0, OPERAND, 32) for word in _load_matrices(address, part * OPERAND + at)]


def latent_registers(loaded: list[Any], factors: list[Any], part: int) -> np.ndarray:
    """What was loaded as operand of a product, [64, 64] float16, divided by the keys' units.

    Within 16 dims they come in the order in which 4 neighbouring bytes belong to a thread; `take_queries` knows it.
    """
    group = part * OPERAND // GROUP
    factor = [factors[group], factors[GROUPS + group]]
    pair_of = ir.VectorType.get((2,), ir.F16Type.get())
    registers = np.empty((1, OPERAND // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for step in range(OPERAND // 16):
        for below in range(2):
            numbers = ptx(
                "{ .reg .b16 h<2>; .reg .b32 a, b; mov.b32 {h0, h1}, $2;"
                "cvt.rn.f16x2.e4m3x2 a, h0; cvt.rn.f16x2.e4m3x2 b, h1;"
                "mul.rn.f16x2 $0, a, $3; mul.rn.f16x2 $1, b, $3; }",
                loaded[2 * step + below],
                factor[below],
                result_types=[int32()] * 2,
            )
            for eight, number in enumerate(numbers):
                registers[0, 2 * step + eight, 0, 0, below, 0, 0, 0, 0] = mgpu_utils.bitcast(number, pair_of)
    return registers


def rope_registers(address: Any, factors: list[Any]) -> np.ndarray:
    """The rope dims as operand of a product, [64, 64] bfloat16, divided by the keys' units."""
    inverse = factors[2 * GROUPS :]
    pair_of = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty((1, ROPE // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for step in range(ROPE // 16):
        found = _load_matrices(address, SCALES_AT + 4 * GROUPS + 32 * step)
        for right in range(2):
            for below in range(2):
                number = ptx(
                    "mul.rn.bf16x2 $0, $1, $2;", found[2 * right + below], inverse[below], result_types=int32()
                )
                registers[0, 2 * step + right, 0, 0, below, 0, 0, 0, 0] = mgpu_utils.bitcast(number, pair_of)
    return registers


def matrix_address(keys: Any) -> Any:
    """What this lane tells `ldmatrix`: 16 keys of this warp, 16 bytes each, and the 16 bytes behind those."""
    warp, lane = warp_and_lane()
    key = arith.addi(times(warp, 16), arith.remui(lane, i32(16)))
    offset = arith.addi(times(key, ROW_BYTES), times(arith.divui(lane, i32(16)), 16))
    return at_byte(mgpu_utils.memref_ptr(keys), offset)


def _load_matrices(address: Any, offset: int) -> Any:
    """Four words: of 4 bytes in 16, of this thread's key and the one 8 below it; of the next 16 bytes likewise."""
    return ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];",
        address,
        result_types=[int32()] * 4,
    )


def take_queries(source: Ref, latent: Ref, rope: Ref, factor: Ref, scale: jax.Array, *, emulate: bool) -> None:
    """Split queries [rows, 576] in bf16 into latent [rows, 512] float16 and rope [rows, 64], by a power of two each.

    factor[row] is what brings its products to their size, times `scale`.
    """
    rows = latent.shape[0]
    if emulate:
        q = source[...].astype(jnp.float32)
        largest = jnp.max(jnp.abs(q[:, :LATENT]), axis=1)
        bits = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
        bits = jnp.clip(bits, SMALLEST, LARGEST) - (QUERY_SIZE << 23)
        unit = lax.bitcast_convert_type(bits, jnp.float32)
        q = q / unit[:, None]
        latent[...], rope[...] = q[:, :LATENT].astype(jnp.float16), q[:, LATENT:].astype(jnp.bfloat16)
        factor[...] = unit * scale
        return

    at_once = 4 if rows % 16 == 0 else 2

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TILED), plgpu.RefType(TILED), plgpu.RefType(), SCALAR))
    def take(ctx: Any, source: Any, latent: Any, rope: Any, factor: Any, scale: Any) -> None:
        warp, lane = warp_and_lane()
        bases = [mgpu_utils.memref_ptr(ref) for ref in (source, latent, rope, factor)]
        loop: Any = scf.ForOp(warp, i32(rows), i32(4 * at_once), [])  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            some = [arith.addi(loop.induction_variable, i32(4 * i)) for i in range(at_once)]
            loaded = [_load_query(bases[0], row, lane) for row in some]
            for row, words in zip(some, loaded, strict=True):
                _store_query(bases[1:], row, lane, words, scale.registers.item(), rows)
            scf.yield_([])

    take(source, latent, rope, factor, scale)


def _load_query(base: Any, row: Any, lane: Any) -> list[Any]:
    """This lane's 8 + 8 dims of the latent part and 2 of the rope part, in bf16."""
    line = at_byte(base, times(row, 2 * (LATENT + ROPE)))
    found = list(
        ptx(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$8]; ld.global.v4.b32 {$4, $5, $6, $7}, [$8 + 512];",
            at_byte(line, times(lane, 16)),
            result_types=[int32()] * 8,
        )
    )
    return [*found, ptx("ld.global.b32 $0, [$1 + 1024];", at_byte(line, times(lane, 4)), result_types=int32())]


def _store_query(bases: list[Any], row: Any, lane: Any, words: list[Any], scale: Any, rows: int) -> None:
    latent, rope, factor = bases
    largest = "and.b32 m, $2, 0x7fff7fff;" + "".join(
        f"and.b32 t, ${2 + i}, 0x7fff7fff; max.u16x2 m, m, t;" for i in range(1, 8)
    )
    largest += "".join(f"shfl.sync.bfly.b32 t, m, {1 << i}, 31, -1; max.u16x2 m, m, t;" for i in range(5))
    inverse, unit = ptx(
        "{ .reg .b32 m, t, u; " + largest + "shl.b32 t, m, 16; max.u32 m, m, t; and.b32 m, m, 0x7f800000;"
        f"max.s32 m, m, {SMALLEST}; min.s32 m, m, {LARGEST}; sub.s32 m, m, {QUERY_SIZE << 23};"
        "mov.b32 $1, m; sub.s32 t, 0x7f000000, m; mov.b32 $0, t; }",
        *words[:8],
        result_types=[ir.F32Type.get()] * 2,
    )
    eight_rows, within = arith.divui(row, i32(8)), arith.remui(row, i32(8))

    def pair(word: Any) -> Any:
        return ptx(
            "{ .reg .b32 t; .reg .f32 a, b; shl.b32 t, $1, 16; mov.b32 a, t; and.b32 t, $1, 0xffff0000; mov.b32 b, t;"
            "mul.f32 a, a, $2; mul.f32 b, b, $2; cvt.rn.f16x2.f32 $0, b, a; }",
            word,
            inverse,
            result_types=int32(),
        )

    second = arith.remui(lane, i32(2))  # which 8 of 16 dims
    for half in range(2):
        sixteen = arith.addi(arith.divui(lane, i32(2)), i32(16 * half))  # which 16 dims
        tile, chunk = arith.divui(sixteen, i32(4)), times(arith.remui(sixteen, i32(4)), 2)
        line = arith.addi(
            arith.addi(times(eight_rows, 8 * 2 * LATENT), times(tile, 1024)),
            arith.addi(times(within, 128), times(second, 8)),
        )
        w = [pair(word) for word in words[4 * half : 4 * half + 4]]
        for right, numbers in enumerate(((w[0], w[2]), (w[1], w[3]))):
            place = times(arith.xori(arith.addi(chunk, i32(right)), within), 16)  # the swizzle
            ptx("st.shared.v2.b32 [$0], {$1, $2};", at_byte(latent, arith.addi(line, place)), *numbers)
    place = arith.xori(arith.divui(lane, i32(4)), within)
    line = arith.addi(times(row, 128), arith.addi(times(place, 16), times(arith.remui(lane, i32(4)), 4)))
    ptx(
        "{ .reg .b32 t, u; .reg .f32 f; mov.b32 t, $1; shr.u32 u, t, 16; prmt.b32 u, u, u, 0x1010;"
        "mul.rn.bf16x2 t, $2, u; st.shared.b32 [$0], t;"
        " mul.f32 f, $3, $4; st.shared.f32 [$5], f; }",
        at_byte(rope, line),
        inverse,
        words[8],
        unit,
        scale,
        at_byte(factor, times(row, 4)),
    )


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
                for number, limit in zip(
                    two(matrix.registers[0, columns, 0, 0, below, 0, 0, 0, 0]), limits, strict=True
                ):
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
                numbers = two(matrix.registers[0, columns, 0, 0, below, 0, 0, 0, 0])
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
        registers = np.empty((1, rows // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for columns in range(rows // 8):
            registers[0, columns, 0, 0, 0, 0, 0, 0, 0] = vector.from_elements(
                pair_of, words[2 * columns : 2 * columns + 2]
            )
            registers[0, columns, 0, 0, 1, 0, 0, 0, 0] = vector.from_elements(pair_of, [zero, zero])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return spread(totals).sum(axis=0)


def store_probabilities_transposed(target: Ref, matrix: jax.Array, *, emulate: bool) -> None:
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
                    register = matrix.registers[0, column, 0, 0, below, 0, 0, 0, 0]
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


def load_values(keys: Ref, scales: Ref, side: int, part: int, *, emulate: bool) -> jax.Array:
    """The bytes of 16 keys of one half of V, and their scales, for `transposed`."""
    if emulate:
        latent, _, _ = split_rows(keys[...])
        some = slice(part * KEYS_AT_ONCE, (part + 1) * KEYS_AT_ONCE)
        factors = jnp.repeat(scales[...].astype(jnp.float32).T[some], GROUP, axis=1)
        return (latent[some] * factors)[:, side * HALF : (side + 1) * HALF]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=opaque(WORDS + 2))
    def load(ctx: Any, keys: Any, scales: Any) -> Any:
        warp, row, pair = position()
        dims = arith.addi(times(warp, 64), times(row, 8))
        start = arith.addi(times(pair, 2 * ROW_BYTES), arith.addi(dims, i32(side * HALF)))
        address = at_byte(mgpu_utils.memref_ptr(keys), start)
        found: list[Any] = []
        for eight in range(KEYS_AT_ONCE // 8):
            offset = (part * KEYS_AT_ONCE + 8 * eight) * ROW_BYTES
            found += ptx(
                f"ld.shared.v2.b32 {{$0, $1}}, [$4 + {offset}];"
                f"ld.shared.v2.b32 {{$2, $3}}, [$4 + {offset + ROW_BYTES}];",
                address,
                result_types=[int32()] * 4,
            )
        group = arith.addi(arith.divui(warp, i32(2)), i32(2 * side))
        where = at_byte(mgpu_utils.memref_ptr(scales), arith.addi(times(group, 2 * PAGE), times(pair, 4)))
        first = part * KEYS_AT_ONCE * 2
        found += ptx(
            f"ld.shared.b32 $0, [$2 + {first}]; ld.shared.b32 $1, [$2 + {first + 16}];",
            where,
            result_types=[int32()] * 2,
        )
        return pack(found)

    return load(keys, scales)


def transposed(loaded: jax.Array, *, emulate: bool) -> jax.Array:
    """Vᵀ of 16 keys, divided by their units, as A operand of a product: [256, 16] float16, rows in the order of
    `fp8_hardware.transposed`."""
    if emulate:
        return loaded.astype(jnp.float16).T
    result = plgpu.ShapeDtypeStruct((HALF, KEYS_AT_ONCE), jnp.dtype(jnp.float16), layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(opaque(WORDS + 2).layout,), return_type=result)
    def widen(ctx: Any, loaded: Any) -> Any:
        found = unpack(loaded)
        pair_of = ir.VectorType.get((2,), ir.F16Type.get())
        registers = np.empty((HALF // 64, KEYS_AT_ONCE // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for eight in range(KEYS_AT_ONCE // 8):
            numbers = _widen_eight_dims(found[4 * eight : 4 * eight + 4], found[WORDS + eight])
            for dim, number in enumerate(numbers):
                registers[dim // 2, eight, 0, 0, dim % 2, 0, 0, 0, 0] = mgpu_utils.bitcast(number, pair_of)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return widen(loaded)


def _widen_eight_dims(words: list[Any], factor: Any) -> Any:
    """For each of 8 dims, this thread's two neighbouring keys: 2 float16."""
    pairs = "".join(
        f"prmt.b32 p, ${8 + word}, ${10 + word}, {order}; mov.b32 {{h0, h1}}, p;"
        + "cvt.rn.f16x2.e4m3x2 a, h0; cvt.rn.f16x2.e4m3x2 b, h1;"
        + f"mul.rn.f16x2 ${4 * word + 2 * half}, a, $12; mul.rn.f16x2 ${4 * word + 2 * half + 1}, b, $12;"
        for word in range(2)
        for half, order in enumerate(("0x5140", "0x7362"))
    )
    return ptx("{ .reg .b32 p, a, b; .reg .b16 h<2>;" + pairs + "}", *words, factor, result_types=[int32()] * 8)


def clear_keys(keys: Ref, first: jax.Array, *, emulate: bool) -> None:
    """keys[first:] = 0 for the rows of a page."""
    if emulate:
        rows = keys[...].reshape(PAGE, ROW_BYTES)
        key = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        keys[...] = jnp.where(key < first, rows, jnp.zeros((), rows.dtype)).reshape(keys.shape)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def clear(ctx: Any, keys: Any, first: Any) -> None:
        thread = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP))
        begin = arith.addi(times(first.registers.item(), ROW_BYTES), times(thread, 16))
        loop: Any = scf.ForOp(begin, i32(PAGE * ROW_BYTES), i32(16 * WARPGROUP), [])  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            address = at_byte(mgpu_utils.memref_ptr(keys), loop.induction_variable)
            ptx("st.shared.v4.b32 [$0], {0, 0, 0, 0};", address)
            scf.yield_([])

    clear(keys, first)
