"""Values of a page of `fp8_ds_mla` on their way to registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from mla_jax.attention.mosaic_gpu.config import HALF, PAGE
from mla_jax.attention.mosaic_gpu.ds_layout import GROUP, ROW_BYTES, split_rows
from mla_jax.attention.mosaic_gpu.fp8_hardware import KEYS_AT_ONCE, LAYOUT, WORDS, operand_of
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, Ref
from mla_jax.attention.mosaic_gpu.ptx import (
    at_byte,
    i32,
    int32,
    opaque,
    pack,
    position,
    ptx,
    times,
    unpack,
)


def load_values(keys: Ref, scales: Ref, side: jax.Array, part: int, *, emulate: bool) -> jax.Array:
    """The bytes of 16 keys of one half of V, and their scales, for `transposed`."""
    if emulate:
        latent, _, _ = split_rows(keys[...])
        some = slice(part * KEYS_AT_ONCE, (part + 1) * KEYS_AT_ONCE)
        factors = jnp.repeat(scales[...].astype(jnp.float32).T[some], GROUP, axis=1)
        return jax.lax.dynamic_slice_in_dim(latent[some] * factors, side * HALF, HALF, axis=1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=opaque(WORDS + 2))
    def load(ctx: Any, keys: Any, scales: Any, side: Any) -> Any:
        warp, row, pair = position()
        side = side.registers.item()
        dims = arith.addi(times(warp, 64), times(row, 8))
        start = arith.addi(times(pair, 2 * ROW_BYTES), arith.addi(dims, times(side, HALF)))
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
        group = arith.addi(arith.divui(warp, i32(2)), times(side, 2))
        where = at_byte(mgpu_utils.memref_ptr(scales), arith.addi(times(group, 2 * PAGE), times(pair, 4)))
        first = part * KEYS_AT_ONCE * 2
        found += ptx(
            f"ld.shared.b32 $0, [$2 + {first}]; ld.shared.b32 $1, [$2 + {first + 16}];",
            where,
            result_types=[int32()] * 2,
        )
        return pack(found)

    return load(keys, scales, side)


def transposed(loaded: jax.Array, *, emulate: bool) -> jax.Array:
    """Vᵀ of 16 keys, divided by their units, as A operand of a product: [256, 16] float16, rows in the order of
    `fp8_hardware.transposed`."""
    if emulate:
        return loaded.astype(jnp.float16).T
    result = plgpu.ShapeDtypeStruct((HALF, KEYS_AT_ONCE), jnp.dtype(jnp.float16), layout=LAYOUT)

    @plgpu.inline_mgpu(arg_types=(opaque(WORDS + 2).layout,), return_type=result)
    def widen(ctx: Any, loaded: Any) -> Any:
        found = unpack(loaded)
        return operand_of(lambda eight: _widen_eight_keys(found[4 * eight : 4 * eight + 4], found[WORDS + eight]))

    return widen(loaded)


def _widen_eight_keys(words: list[Any], factor: Any) -> Any:
    """For each of 8 dims, this thread's two neighbouring keys: 2 float16."""
    pairs = "".join(
        f"prmt.b32 p, ${8 + word}, ${10 + word}, {order}; mov.b32 {{h0, h1}}, p;"
        + "cvt.rn.f16x2.e4m3x2 a, h0; cvt.rn.f16x2.e4m3x2 b, h1;"
        + f"mul.rn.f16x2 ${4 * word + 2 * half}, a, $12; mul.rn.f16x2 ${4 * word + 2 * half + 1}, b, $12;"
        for word in range(2)
        for half, order in enumerate(("0x5140", "0x7362"))
    )
    return ptx("{ .reg .b32 p, a, b; .reg .b16 h<2>;" + pairs + "}", *words, factor, result_types=[int32()] * 8)
