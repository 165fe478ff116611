"""Keys of a page of `fp8_ds_mla` on their way to registers, and their scales.

A page lies in shared memory as it does in the cache. Rows of 656 bytes are 4 banks apart, so that neither `ldmatrix` of
16 bytes of 8 keys nor 8 bytes of 4 keys meet in a bank.
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

from mla_jax.attention.mosaic_gpu.config import PAGE, ROPE, WARPGROUP
from mla_jax.attention.mosaic_gpu.ds_layout import GROUP, GROUPS, LARGEST, ROW_BYTES, SCALES_AT, SMALLEST, split_rows
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, Ref
from mla_jax.attention.mosaic_gpu.ptx import (
    at_byte,
    i32,
    int32,
    opaque,
    pack,
    position,
    ptx,
    spot,
    spots,
    times,
    unpack,
    warp_and_lane,
)
from mla_jax.attention.mosaic_gpu.scores import ROW

OPERAND = 64  # dims of keys in registers at a time
SCALE_SIZE = 6  # binary exponent of a key's largest scale / unit: 448 times 2**7 fits float16, and so does 2**-14
FACTORS = 2 * GROUPS + 2  # words of a thread, for its two keys


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
    registers = spots(PAGE, OPERAND)
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
                registers[spot(0, 2 * step + eight, below)] = mgpu_utils.bitcast(number, pair_of)
    return registers


def rope_registers(address: Any, factors: list[Any]) -> np.ndarray:
    """The rope dims as operand of a product, [64, 64] bfloat16, divided by the keys' units."""
    inverse = factors[2 * GROUPS :]
    pair_of = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = spots(PAGE, ROPE)
    for step in range(ROPE // 16):
        found = _load_matrices(address, SCALES_AT + 4 * GROUPS + 32 * step)
        for right in range(2):
            for below in range(2):
                number = ptx(
                    "mul.rn.bf16x2 $0, $1, $2;", found[2 * right + below], inverse[below], result_types=int32()
                )
                registers[spot(0, 2 * step + right, below)] = mgpu_utils.bitcast(number, pair_of)
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
