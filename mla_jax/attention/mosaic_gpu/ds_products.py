"""K Qᵀ with keys that are widened on their way to registers, as one piece of code.

As separate products it computes a descriptor for each of them anew, a chain of uniform instructions that none of the
others hides; here all are one number plus constants.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.mosaic.gpu.wgmma import WGMMAAccumulator, wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from mla_jax.attention.mosaic_gpu.config import LATENT, PAGE
from mla_jax.attention.mosaic_gpu.ds_keys import (
    FACTORS,
    OPERAND,
    KeyScales,
    latent_registers,
    load_latents,
    matrix_address,
    rope_registers,
)
from mla_jax.attention.mosaic_gpu.ds_layout import GROUP, split_rows
from mla_jax.attention.mosaic_gpu.fp8_hardware import LAYOUT
from mla_jax.attention.mosaic_gpu.hardware import SCALAR, TILED, Ref
from mla_jax.attention.mosaic_gpu.ptx import i32, int32, opaque, ptx, unpack

ROW_TILE = 8 * 128  # bytes of 8 rows in a tile of 128 bytes


def key_products(
    keys: Ref, latent: Ref, rope: Ref, scales: KeyScales, changing: jax.Array, *, emulate: bool
) -> jax.Array:
    """[64, rows] float32, divided by the keys' units. For latent [rows, 512] and rope [rows, 64] in the layout TILED.

    `changing` is a number ≥ 0 that differs from call to call: descriptors would stay in registers otherwise.
    """
    rows = latent.shape[0]
    if emulate:
        numbers, _, key_rope = split_rows(keys[...])
        numbers = (numbers * jnp.repeat(scales.factors, GROUP, axis=1)).astype(jnp.float16)
        key_rope = (key_rope.astype(jnp.float32) / scales.unit[:, None]).astype(jnp.bfloat16)

        def dot(k: jax.Array, q: Ref) -> jax.Array:
            return jnp.dot(k.astype(jnp.float32), q[...].astype(jnp.float32).T)

        return dot(numbers, latent) + dot(key_rope, rope)
    result = plgpu.ShapeDtypeStruct((PAGE, rows), jnp.dtype(jnp.float32), layout=LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(TILED), plgpu.RefType(TILED), opaque(FACTORS).layout, SCALAR),
        return_type=result,
    )
    def multiply(ctx: Any, keys: Any, latent: Any, rope: Any, factors: Any, changing: Any) -> Any:
        zero = ptx("shr.u32 $0, $1, 31;", changing.registers.item(), result_types=int32())
        factor, address = unpack(factors), matrix_address(keys)
        acc = WGMMAAccumulator.zero(PAGE, rows, ir.F32Type.get())
        parts = range(LATENT // OPERAND)
        loaded = load_latents(address, 0)
        acc = _multiply(acc, rope_registers(address, factor), _descriptor(rope, zero, ROW_TILE), 0)
        start = _descriptor(latent, zero, LATENT // 64 * ROW_TILE)
        for part in parts:
            if part > 0:
                nvvm.wgmma_wait_group_sync_aligned(1)  # registers have room for the operands of two products
            operand = latent_registers(loaded, factor, part)
            if part != parts[-1]:
                loaded = load_latents(address, part + 1)
            acc = _multiply(acc, operand, start, part * ROW_TILE >> 4)
        nvvm.wgmma_wait_group_sync_aligned(0)
        return mgpu.optimization_barrier(acc.value)

    return multiply(keys, latent, rope, scales.factors, changing)


def _descriptor(tiles: Any, zero: Any, eight_rows: int) -> tuple[Any, Any]:
    """Two halves of what a product is told of its operand: 8 rows are `eight_rows` bytes, tiles are 128 wide."""
    address = arith.addi(llvm.ptrtoint(int32(), mgpu_utils.memref_ptr(tiles)), zero)
    low = arith.andi(arith.shrui(address, i32(4)), i32(0x3FFF))
    return low, i32((1 << 30) | (eight_rows >> 4))


def _multiply(acc: Any, registers: np.ndarray, descriptor: tuple[Any, Any], offset: int) -> Any:
    element = ir.VectorType(registers.flat[0].type).element_type
    operand = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    low, high = descriptor
    both = ir.IntegerType.get_signless(64)
    low = arith.extui(both, arith.addi(low, i32(offset)))
    found = wgmma_m64(
        acc._value.registers,
        wgmma_fence(operand),
        arith.ori(low, arith.shli(arith.extui(both, high), mgpu_utils.c(32, both))),
        a_transpose=None,
        b_transpose=False,
        a_k_stride=None,
        b_k_stride=32,
        n=acc._value.shape[1],
        swizzle=128,
        a_element_type=element,
        b_element_type=element,
    )
    nvvm.wgmma_commit_group_sync_aligned()
    value = mgpu.FragmentedArray(_registers=found, _layout=acc._value.layout, _is_signed=None)
    return WGMMAAccumulator(_value=value, _original_layout=acc._original_layout, _sync=False)
