"""Words for code in PTX inside Pallas kernels: constants, addresses, where a thread stands, what it passes on."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from mla_jax.attention.mosaic_gpu.config import WARPGROUP


def ptx(code: str, *args: Any, result_types: Any = None, predicate: Any = None) -> Any:
    """Instructions that are neither dropped nor moved; one instruction may have a predicate."""
    return mgpu_utils.inline_ptx(code, *args, result_types=result_types, predicate=predicate, has_side_effects=True)


def pure(code: str, *args: Any, result_types: Any) -> Any:
    """Instructions that may be dropped or moved: their results are all they do."""
    return mgpu_utils.inline_ptx(code, *args, result_types=result_types)


def int32() -> Any:
    """The type."""
    return ir.IntegerType.get_signless(32)


def float32() -> Any:
    """The type."""
    return ir.F32Type.get()


def f32(value: float) -> Any:
    """A constant."""
    return mgpu_utils.c(value, float32())


def i32(value: int) -> Any:
    """A constant."""
    return mgpu_utils.c(value, int32())


def times(x: Any, value: int) -> Any:
    """x * value."""
    return arith.muli(x, i32(value))


def at_byte(base: Any, offset: Any) -> Any:
    """The address `offset` bytes behind another."""
    return mgpu_utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))


def warp_and_lane() -> tuple[Any, Any]:
    """This thread's warp in its warpgroup, and its place in the warp."""
    thread = arith.remui(mgpu_utils.thread_idx(), i32(WARPGROUP))
    return arith.divui(thread, i32(32)), arith.remui(thread, i32(32))


def position() -> tuple[Any, Any, Any]:
    """This thread's warp in its warpgroup, and its row of 8 and its pair of columns of 4 in a WGMMA fragment."""
    warp, lane = warp_and_lane()
    return warp, arith.divui(lane, i32(4)), arith.remui(lane, i32(4))


def only(register: Any) -> Any:
    """The number in a vector of one."""
    return vector.extract(register, dynamic_position=[], static_position=[0])


def two(register: Any) -> list[Any]:
    """The numbers in a vector of two."""
    return [vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2)]


def spot(tile: int, eight: int, below: int) -> tuple[int, ...]:
    """Which of a FragmentedArray's registers, in the layout WGMMA, has this thread's two neighbouring columns.

    tile: of 64 rows; eight: columns 8 eight to 8 eight + 7, of which the thread's pair is `position`'s; below: 0 for
    the thread's row of the upper 8 of its warp's 16, 1 for the one 8 below it.
    """
    return tile, eight, 0, 0, below, 0, 0, 0, 0


def spots(rows: int, columns: int) -> np.ndarray:
    """Room for the registers of a matrix in the layout WGMMA."""
    return np.empty((rows // 64, columns // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)


def opaque(words: int) -> Any:
    """The type of so many 32-bit words of each thread, which only those know that made them."""
    shape = (words * WARPGROUP,)
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_STRIDED(shape, vec_size=1))


def pack(words: list[Any]) -> Any:
    """What `opaque` is the type of."""
    one = ir.VectorType.get((1,), int32())
    registers = np.array([vector.from_elements(one, [word]) for word in words], dtype=object)
    layout = mgpu.WGStridedFragLayout(shape=(len(words) * WARPGROUP,), vec_size=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def unpack(array: Any) -> list[Any]:
    """The words again."""
    return [only(register) for register in array.registers.flat]
