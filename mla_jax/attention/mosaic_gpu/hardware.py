"""Instructions without a name in Pallas: named barriers, flags in global memory, clearing swizzled rows."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

from mla_jax.attention.mosaic_gpu.config import PAGE, WARPGROUP

Ref = Any
SCALAR = plgpu.Layout.WG_SPLAT
# How 16-bit operands of a WGMMA lie in shared memory.
TILED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
FIRST_FREE_BARRIER = 4  # hardware barriers 0 to 3 belong to Mosaic: one per CTA and one per warpgroup


class Signal:
    """One-way signals between warpgroups, one per index; an index may be sent again once it was received.

    On a GPU a hardware barrier: one instruction per warp, where a barrier in shared memory costs 128 serial
    atomics. The interpreter does not know those, and is given barriers in shared memory.
    """

    def __init__(self, first_id: Any, threads: int, emulated: Ref | None, first: Any = 0):
        self.first_id, self.threads = first_id, threads
        self.emulated, self.first = emulated, first  # in the interpreter: barriers, and which is that of index 0

    def send(self, index: jax.Array) -> None:
        """Say that everything this warpgroup did before is done."""
        if self.emulated is None:
            _named_barrier("arrive", self.first_id + index, self.threads)
        else:
            plgpu.barrier_arrive(self.emulated.at[self.first + index])

    def receive(self, index: jax.Array) -> None:
        """Wait until the senders have sent."""
        if self.emulated is None:
            _named_barrier("sync", self.first_id + index, self.threads)
        else:
            plgpu.barrier_wait(self.emulated.at[self.first + index])

    def behind(self, indices: Any) -> "Signal":
        """The signal whose first index is one of this one's."""
        return Signal(self.first_id + indices, self.threads, self.emulated, self.first + indices)


def _named_barrier(kind: str, index: jax.Array, threads: int) -> None:
    @plgpu.inline_mgpu(arg_types=(SCALAR,))
    def barrier(ctx: Any, index: Any) -> None:
        mgpu_utils.inline_ptx(f"bar.{kind} $0, {threads};", index.registers.item(), has_side_effects=True)

    barrier(index)


def warpgroup_barrier(*, emulate: bool) -> None:
    """Wait until all four warps of this warpgroup are here; in the interpreter they are one thread."""
    if emulate:
        return

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        mgpu_utils.warpgroup_barrier()

    barrier()


def make_visible(*, emulate: bool) -> None:
    """Let products and copies see what this thread stored in shared memory, once a signal has said that it did."""
    if emulate:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(ctx: Any) -> None:
        mgpu_utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    fence()


def store_some(target: Ref, numbers: jax.Array, *, emulate: bool) -> None:
    """target = numbers in device memory, which need not be whole cache lines."""
    if emulate or not hasattr(plgpu, "store"):
        target[...] = numbers
    else:
        plgpu.store(target, numbers, optimized=False)  # JAX 0.12 refuses the assignment


def rescale(matrix: jax.Array, factor: jax.Array, *, emulate: bool) -> jax.Array:
    """matrix * factor[:, None] for a 64-row MATRIX; a warp whose 16 factors all are 1 skips the multiplications."""
    if emulate:
        return matrix * lax.broadcast_in_dim(factor, matrix.shape, [0])
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct(matrix.shape, matrix.dtype, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1)), return_type=result)
    def multiply(ctx: Any, matrix: Any, factor: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        one, differs = mgpu_utils.c(1.0, f32), mgpu_utils.c(0, ir.IntegerType.get_signless(1))
        for register in factor.registers.flat:
            if isinstance(register.type, ir.VectorType):
                register = vector.extract(register, dynamic_position=[], static_position=[0])
            differs = arith.ori(differs, arith.cmpf(arith.CmpFPredicate.UNE, register, one))
        differs = nvvm.vote_sync(mgpu_utils.c(0xFFFFFFFF, i32), differs, "any")
        types = [r.type for r in matrix.registers.flat]
        branch: Any = scf.IfOp(differs, types, has_else=True)  # type: ignore[call-arg]
        with ir.InsertionPoint(branch.then_block):
            product = matrix * factor.broadcast_in_dim(matrix.shape, (0,), matrix.layout)
            scf.yield_(list(product.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(list(matrix.registers.flat))
        registers = np.array(list(branch.results), dtype=object).reshape(matrix.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=matrix.layout, _is_signed=matrix.is_signed)

    return multiply(matrix, factor)


def publish() -> None:
    """Let the whole GPU see this warpgroup's stores to global memory before what it counts later.

    One thread's fence is enough: behind the barrier it covers what the other threads have stored, too.
    """

    @plgpu.inline_mgpu()
    def fence(ctx: Any) -> None:
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.inline_ptx("fence.acq_rel.gpu;", predicate=_one_thread(), has_side_effects=True)

    fence()


def add_one(counter: Ref) -> None:
    """Add 1 to a counter in global memory, for this warpgroup, which has published what it stored."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(ctx: Any, counter: Any) -> None:
        mgpu_utils.inline_ptx(
            "red.relaxed.gpu.global.add.u32 [$0], 1;",
            mgpu_utils.memref_ptr(counter),
            predicate=_one_thread(),
            has_side_effects=True,
        )

    add(counter)


def _one_thread() -> Any:
    """The same one at each call."""
    return mgpu_utils.single_thread_predicate(mgpu_utils.ThreadSubset.WARPGROUP)


def wait_for_count(counter: Ref, count: jax.Array) -> None:
    """Wait until a counter in global memory has reached `count`; what was published before it is visible."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def wait(ctx: Any, counter: Any, count: Any) -> None:
        # One warp looks: all that wait ask the same address, and those that count have to get through to it.
        warp = arith.remui(mgpu_utils.warp_idx(), mgpu_utils.c(4, ir.IntegerType.get_signless(32)))
        mgpu_utils.inline_ptx(
            "{ .reg .pred less; .reg .u32 seen; setp.ne.u32 less, $2, 0; @less bra DONE;"
            "AGAIN: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 less, seen, $1; @less bra AGAIN; DONE: }",
            mgpu_utils.memref_ptr(counter),
            count.registers.item(),
            warp,
            has_side_effects=True,
        )
        mgpu_utils.warpgroup_barrier()

    wait(counter, count)


def count_out(counter: Ref, count: jax.Array, waiters: jax.Array) -> None:
    """The last of `waiters` warpgroups that waited for `count` puts the counter back to 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def leave(ctx: Any, counter: Any, last: Any) -> None:
        mgpu_utils.inline_ptx(
            "red.release.gpu.global.inc.u32 [$0], $1;",  # wraps to 0 after `last`
            mgpu_utils.memref_ptr(counter),
            last.registers.item(),
            predicate=_one_thread(),
            has_side_effects=True,
        )

    leave(counter, count + waiters - 1)


def clear_rows(tile: Ref, first: jax.Array, *, emulate: bool) -> None:
    """tile[first:, :] = 0 for a (64, 64 n) tile of 16-bit elements in the layout TILED.

    The swizzle permutes 16-byte chunks within a row, so whole rows are cleared without knowing it, by stores
    alone.
    """
    if emulate:
        layout = plgpu.Layout.WGMMA
        for start in range(0, tile.shape[-1], PAGE):
            part = tile.at[:, pl.ds(start, PAGE)]
            row = plgpu.broadcasted_iota(jnp.int32, (PAGE, PAGE), 0, layout=layout)
            part[...] = jnp.where(row < first, plgpu.load(part, layout=layout), jnp.zeros((), tile.dtype))
        return
    column_tiles = tile.shape[-1] // 64
    chunks = 8 * column_tiles  # 16-byte chunks in a row
    rows_at_once = WARPGROUP // chunks

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED), SCALAR))
    def clear(ctx: Any, tile: Any, first: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def const(value: int) -> Any:
            return mgpu_utils.c(value, i32)

        def times(x: Any, value: int) -> Any:
            return arith.muli(x, const(value))

        base = mgpu_utils.memref_ptr(tile)
        thread = arith.remui(mgpu_utils.thread_idx(), const(WARPGROUP))
        chunk = arith.remui(thread, const(chunks))
        column = arith.addi(times(arith.divui(chunk, const(8)), 1024), times(arith.remui(chunk, const(8)), 16))
        row = arith.addi(first.registers.item(), arith.divui(thread, const(chunks)))
        loop: Any = scf.ForOp(row, const(PAGE), const(rows_at_once), [])  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            row = loop.induction_variable
            eight_rows = times(arith.divui(row, const(8)), 1024 * column_tiles)
            offset = arith.addi(column, arith.addi(eight_rows, times(arith.remui(row, const(8)), 128)))
            address = mgpu_utils.getelementptr(base, [offset], ir.IntegerType.get_signless(8))
            mgpu_utils.inline_ptx("st.shared.v4.b32 [$0], {0, 0, 0, 0};", address, has_side_effects=True)
            scf.yield_([])

    clear(tile, first)


def negate(tile: Ref, *, emulate: bool) -> None:
    """tile = -tile for 16-bit floats in shared memory, in whatever order they lie there."""
    if emulate:
        tile[...] = -tile[...]
        return
    bytes_at_once = 16 * WARPGROUP

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(TILED),))
    def flip(ctx: Any, tile: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(WARPGROUP, i32))
        first = arith.muli(thread, mgpu_utils.c(16, i32))
        end, step = mgpu_utils.c(size, i32), mgpu_utils.c(bytes_at_once, i32)
        loop: Any = scf.ForOp(first, end, step, [])  # type: ignore[call-arg]
        with ir.InsertionPoint(loop.body):
            offset = loop.induction_variable
            address = mgpu_utils.getelementptr(mgpu_utils.memref_ptr(tile), [offset], ir.IntegerType.get_signless(8))
            words = " ".join(f"xor.b32 w{i}, w{i}, 0x80008000;" for i in range(4))
            mgpu_utils.inline_ptx(
                "{ .reg .b32 w<4>; ld.shared.v4.b32 {w0, w1, w2, w3}, [$0]; "
                + words
                + " st.shared.v4.b32 [$0], {w0, w1, w2, w3}; }",
                address,
                has_side_effects=True,
            )
            scf.yield_([])

    size = 2 * math.prod(tile.shape)
    flip(tile)


def one_warp(body: Callable[[], None], *, emulate: bool) -> None:
    """Run `body` in the first warp of this warpgroup; in the interpreter, in the whole warpgroup."""
    if emulate:
        body()
        return

    @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
    def warps() -> None:
        pl.when(lax.axis_index("warp") == 0)(body)
