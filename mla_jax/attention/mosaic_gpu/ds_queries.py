"""Queries for `fp8_ds_mla` on their way from device to shared memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from mla_jax.attention.mosaic_gpu.config import LATENT, ROPE
from mla_jax.attention.mosaic_gpu.ds_layout import LARGEST, SMALLEST
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, TILED, Ref
from mla_jax.attention.mosaic_gpu.ptx import (
    at_byte,
    i32,
    int32,
    ptx,
    times,
    warp_and_lane,
)

QUERY_SIZE = 8  # binary exponent of a query's largest number


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
                _store_query(bases[1:], row, lane, words, scale.registers.item())
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


def _store_query(bases: list[Any], row: Any, lane: Any, words: list[Any], scale: Any) -> None:
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
