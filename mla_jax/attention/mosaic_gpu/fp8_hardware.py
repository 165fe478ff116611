"""Instructions without a name in Pallas that FP8 needs: values transposed on their way to registers, results back."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

from mla_jax.attention.mosaic_gpu.config import HALF, LATENT, PAGE, ROPE, ROWS, WARPGROUP
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, Ref
from mla_jax.attention.mosaic_gpu.ptx import (
    at_byte,
    i32,
    int32,
    opaque,
    pack,
    position,
    ptx,
    pure,
    spot,
    spots,
    times,
    two,
    unpack,
)

# How e4m3 operands of a WGMMA lie in shared memory: in lines of 128 dims, and of 64 for the rope part. The GPU reads
# device memory a fifth slower in lines of 64.
LINE = 128
LINES: Any = (plgpu.TilingTransform((8, LINE)), plgpu.SwizzleTransform(LINE))  # type: ignore[abstract]
ROPE_LINES: Any = (plgpu.TilingTransform((8, ROPE)), plgpu.SwizzleTransform(ROPE))  # type: ignore[abstract]
# The same for copies from rows of 576 dims, which 128 does not divide: no copy takes rows like that in tiles.
COPIED: Any = (plgpu.SwizzleTransform(LINE),)  # type: ignore[abstract]
# Probabilities of some keys of a block.
KEYS_AT_ONCE = 16  # a value role has so many keys of a block in registers at a time
PART: Any = (plgpu.TilingTransform((8, KEYS_AT_ONCE)), plgpu.SwizzleTransform(2 * KEYS_AT_ONCE))  # type: ignore[abstract]
LAYOUT = plgpu.Layout.WGMMA
COLUMN = LAYOUT.reduce(0)  # one value per column of a matrix
DIMS = 8  # neighbouring dims that a thread has of every key
WORDS = HALF * KEYS_AT_ONCE // 4 // WARPGROUP  # of those, in each thread


def load_values(values: Ref, part: int, *, emulate: bool) -> jax.Array:
    """The bytes of 16 keys of V, [2, 64, 128] e4m3, for `transposed`."""
    if emulate:
        keys = slice(part * KEYS_AT_ONCE, (part + 1) * KEYS_AT_ONCE)
        return jnp.concatenate([values[line][keys] for line in range(HALF // LINE)], axis=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(COPIED),), return_type=opaque(WORDS))
    def load(ctx: Any, values: Any) -> Any:
        addresses = _addresses(mgpu_utils.memref_ptr(values))
        words: list[Any] = []
        for keys in range(KEYS_AT_ONCE // 8):
            offset = (part * KEYS_AT_ONCE + 8 * keys) * LINE
            words += ptx(
                f"ld.shared.v2.b32 {{$0, $1}}, [$4 + {offset}]; ld.shared.v2.b32 {{$2, $3}}, [$5 + {offset}];",
                *addresses,
                result_types=[int32()] * 4,
            )
        return pack(words)

    return load(values)


def transposed(loaded: jax.Array, *, emulate: bool) -> jax.Array:
    """Vᵀ of 16 keys as A operand of a product: [256, 16] float16.

    Rows come in the order that costs least: the 8 rows of a thread are neighbouring dims, so that one load brings them
    all, and one store takes what becomes of them. `store_transposed` knows it.
    """
    if emulate:
        return loaded.astype(jnp.float16).T
    result = plgpu.ShapeDtypeStruct((HALF, KEYS_AT_ONCE), jnp.dtype(jnp.float16), layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(opaque(WORDS).layout,), return_type=result)
    def widen(ctx: Any, loaded: Any) -> Any:
        words = unpack(loaded)
        return operand_of(lambda eight: _widen_eight_keys(words[4 * eight : 4 * eight + 4]))

    return widen(loaded)


def operand_of(widen: Callable[[int], list[Any]]) -> Any:
    """Vᵀ of 16 keys from what `widen(eight)` makes of 8 of them: for each of a thread's dims, 2 float16 in a word."""
    pair_of = ir.VectorType.get((2,), ir.F16Type.get())
    registers = spots(HALF, KEYS_AT_ONCE)
    for eight in range(KEYS_AT_ONCE // 8):
        for dim, word in enumerate(widen(eight)):
            registers[spot(dim // 2, eight, dim % 2)] = mgpu_utils.bitcast(word, pair_of)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _addresses(base: Any) -> list[Any]:
    """Where this thread's 8 dims of two neighbouring keys lie: no two of 16 threads meet in a bank."""
    warp, row, pair = position()
    line, chunk = arith.divui(warp, i32(2)), arith.divui(row, i32(2))
    chunk = arith.addi(times(arith.remui(warp, i32(2)), 4), chunk)
    within = times(arith.remui(row, i32(2)), DIMS)
    addresses = []
    for second in range(2):
        key = arith.addi(times(pair, 2), i32(second))
        offset = arith.addi(times(line, PAGE * LINE), times(key, LINE))
        place = times(arith.xori(chunk, key), 16)  # the swizzle
        addresses.append(at_byte(base, arith.addi(offset, arith.addi(place, within))))
    return addresses


def _widen_eight_keys(words: list[Any]) -> list[Any]:
    """For each of 8 dims, this thread's two neighbouring keys among 8: 2 float16."""
    pairs = "".join(
        f"prmt.b32 p, ${DIMS + word}, ${DIMS + 2 + word}, {order}; mov.b32 {{h0, h1}}, p;"
        + f"cvt.rn.f16x2.e4m3x2 ${4 * word + 2 * half}, h0; cvt.rn.f16x2.e4m3x2 ${4 * word + 2 * half + 1}, h1;"
        for word in range(2)
        for half, order in enumerate((0x5140, 0x7362))
    )
    return ptx("{ .reg .b32 p; .reg .b16 h<2>;" + pairs + "}", *words, result_types=[int32()] * DIMS)


def store_transposed(target: Ref, matrix: jax.Array, *, emulate: bool) -> None:
    """target = matrixᵀ for [n, 256] numbers, 512 to a row, in global memory and a matrix [256, n] of products with
    `transposed`."""
    if emulate:
        target[...] = matrix.T.astype(target.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def store(ctx: Any, target: Any, matrix: Any) -> None:
        element = ir.MemRefType(target.type).element_type
        itemsize = mgpu_utils.bytewidth(element)
        warp, row, pair = position()
        dim = arith.addi(times(warp, ROWS), times(row, DIMS))
        offset = arith.addi(times(dim, itemsize), times(pair, 2 * LATENT * itemsize))
        address = at_byte(mgpu_utils.memref_ptr(target), offset)
        for columns in range(matrix.shape[1] // 8):
            for second in range(2):
                numbers = [two(matrix.registers[spot(dim // 2, columns, dim % 2)])[second] for dim in range(DIMS)]
                _store_dims(address, (8 * columns + second) * LATENT * itemsize, numbers, element)

    store(target, matrix)


def _store_dims(address: Any, offset: int, numbers: list[Any], element: Any) -> None:
    """Eight float32 numbers to global memory, in bfloat16 or float16."""
    kind = "bf16" if isinstance(element, ir.BF16Type) else "f16"
    narrow = "".join(f"cvt.rn.{kind}x2.f32 w{i}, ${2 * i + 1}, ${2 * i};" for i in range(4))
    ptx(f"{{ .reg .b32 w<4>; {narrow} st.global.v4.b32 [$8 + {offset}], {{w0, w1, w2, w3}}; }}", *numbers, address)


def store_probabilities(target: Ref, matrix: jax.Array, rows: int, *, emulate: bool) -> None:
    """target = the first rows of a (64, n) matrix in float16; target is [n / 16, rows, 16] in tiles PART."""
    if emulate:
        for part in range(target.shape[0]):
            columns = slice(part * KEYS_AT_ONCE, (part + 1) * KEYS_AT_ONCE)
            target.at[part][...] = matrix[:rows, columns].astype(jnp.float16)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(PART), LAYOUT))
    def store(ctx: Any, target: Any, matrix: Any) -> None:
        warp, row, pair = position()
        line = arith.addi(times(warp, 16 * 32), times(row, 32))
        flipped = times(arith.divui(row, i32(4)), 16)  # the swizzle: rows 4 to 7 of 8 swap their two chunks
        base = at_byte(mgpu_utils.memref_ptr(target), arith.addi(line, times(pair, 4)))
        chunks = [at_byte(base, flipped), at_byte(base, arith.subi(i32(16), flipped))]
        for below in range(2):  # a warp has 8 rows, and 8 below them
            first = arith.addi(times(warp, 16), i32(8 * below))
            used = None if rows == ROWS else arith.cmpi(arith.CmpIPredicate.ult, first, i32(rows))
            for columns in range(matrix.shape[1] // 8):
                register = matrix.registers[spot(0, columns, below)]
                word = pure("cvt.rn.f16x2.f32 $0, $2, $1;", *two(register), result_types=int32())
                offset = (columns // 2) * rows * 32 + below * 8 * 32
                ptx(f"st.shared.b32 [$1 + {offset}], $0;", word, chunks[columns % 2], predicate=used)

    store(target, matrix)


def differs_from_one(factor: Ref, *, emulate: bool) -> jax.Array:
    """Whether any of a few float32 numbers in shared memory is not 1, for the columns of each warp: 0 or 1."""
    if emulate:
        return jnp.any(factor[...] != 1).astype(jnp.int32)
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def look(ctx: Any, factor: Any) -> Any:
        i1 = ir.IntegerType.get_signless(1)
        lane = arith.remui(mgpu_utils.thread_idx(), i32(32))
        count = math.prod(ir.MemRefType(factor.type).shape)
        differs = mgpu_utils.c(0, i1)
        for first in range(0, count, 32):
            index = arith.addi(arith.remui(lane, i32(min(32, count - first))), i32(first))
            address = at_byte(mgpu_utils.memref_ptr(factor), times(index, 4))
            number = ptx("ld.shared.f32 $0, [$1];", address, result_types=ir.F32Type.get())
            one = mgpu_utils.c(1.0, ir.F32Type.get())
            differs = arith.ori(differs, arith.cmpf(arith.CmpFPredicate.UNE, number, one))
        differs = nvvm.vote_sync(i32(0xFFFFFFFF), differs, "any")
        flag = arith.extui(int32(), differs)
        return mgpu.FragmentedArray.splat(flag, (), is_signed=True)

    return look(factor)


def rescale_columns(matrix: jax.Array, factor: Ref, differs: jax.Array, *, emulate: bool) -> jax.Array:
    """matrix * factor[None, :] if `differs`; warps need not agree on that."""
    if emulate:
        return jnp.where(differs != 0, matrix * lax.broadcast_in_dim(factor[...], matrix.shape, [1]), matrix)
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, plgpu.RefType(), SCALAR), return_type=result)
    def multiply(ctx: Any, matrix: Any, factor: Any, differs: Any) -> Any:
        taken = arith.cmpi(arith.CmpIPredicate.ne, differs.registers.item(), i32(0))
        branch: Any = scf.IfOp(taken, [r.type for r in matrix.registers.flat], has_else=True)  # type: ignore[call-arg]
        with ir.InsertionPoint(branch.then_block):
            _, _, pair = position()
            base = at_byte(mgpu_utils.memref_ptr(factor), times(pair, 8))
            products = matrix.registers.copy()
            for columns in range(matrix.shape[1] // 8):
                factors = _load_two(base, 32 * columns)
                for at in np.ndindex(*(n for i, n in enumerate(products.shape) if i != 1)):
                    where = (at[0], columns, *at[1:])
                    products[where] = arith.mulf(products[where], factors)
            scf.yield_(list(products.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(matrix.registers.flat))
        registers = np.array(list(branch.results), dtype=object).reshape(matrix.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=matrix.layout, _is_signed=matrix.is_signed)

    return multiply(matrix, factor, differs)


def _load_two(base: Any, offset: int) -> Any:
    f32 = ir.F32Type.get()
    found = ptx(f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];", base, result_types=[f32, f32])
    return vector.from_elements(ir.VectorType.get((2,), f32), list(found))


def copy_queries(source: Ref, target: Ref, negative: jax.Array, *, emulate: bool) -> None:
    """target = source, or -source, for e4m3 numbers that lie alike in shared memory."""
    if emulate:
        numbers = source[...]
        target[...] = jnp.where(negative, -numbers, numbers)
        return
    size = math.prod(source.shape)

    copied, used = (COPIED, LINES) if source.shape[1] == LINE else (ROPE_LINES, ROPE_LINES)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(copied), plgpu.RefType(used), SCALAR))
    def copy(ctx: Any, source: Any, target: Any, sign: Any) -> None:
        first = times(arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP)), 16)
        addresses = [at_byte(mgpu_utils.memref_ptr(ref), first) for ref in (source, target)]
        for offset in range(0, size, 16 * WARPGROUP):
            flip = "".join(f"xor.b32 w{i}, w{i}, $2;" for i in range(4))
            ptx(
                f"{{ .reg .b32 w<4>; ld.shared.v4.b32 {{w0, w1, w2, w3}}, [$0 + {offset}];"
                + flip
                + f"st.shared.v4.b32 [$1 + {offset}], {{w0, w1, w2, w3}}; }}",
                *addresses,
                sign.registers.item(),
            )

    copy(source, target, jnp.where(negative, jnp.int32(-0x7F7F7F80), 0))


def clear_keys(half: Ref, first: jax.Array, *, emulate: bool) -> None:
    """half[:, first:, :] = 0 for lines [2, 64, 128] in e4m3."""
    if emulate:
        for line in range(half.shape[0]):
            numbers = half[line]
            keys = lax.broadcasted_iota(jnp.int32, numbers.shape, 0)
            half[line] = jnp.where(keys < first, numbers, jnp.zeros((), numbers.dtype))
        return
    chunks = HALF // 16

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(COPIED), SCALAR))
    def clear(ctx: Any, half: Any, first: Any) -> None:
        thread = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP))
        chunk = arith.remui(thread, i32(chunks))
        line, within = arith.divui(chunk, i32(LINE // 16)), arith.remui(chunk, i32(LINE // 16))
        column = arith.addi(times(line, PAGE * LINE), times(within, 16))
        key = arith.addi(first.registers.item(), arith.divui(thread, i32(chunks)))
        loop: Any = scf.ForOp(key, i32(PAGE), i32(WARPGROUP // chunks), [])  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            offset = arith.addi(column, times(loop.induction_variable, LINE))
            ptx("st.shared.v4.b32 [$0], {0, 0, 0, 0};", at_byte(mgpu_utils.memref_ptr(half), offset))
            scf.yield_([])

    clear(half, first)
