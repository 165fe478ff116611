"""What all kernels are launched as: a grid that is on the GPU as a whole, with three warpgroups in each CTA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.combine import merge_outside
from mla_jax.attention.mosaic_gpu.config import GROUP, LATENT, REGISTERS, ROWS, WARPGROUP, Problem
from mla_jax.attention.mosaic_gpu.hardware import FIRST_FREE_BARRIER, Signal
from mla_jax.attention.mosaic_gpu.work import SideSignals
from mla_jax.schedule import TileSchedule

ROLES = 3
HARDWARE_BARRIERS = 16
SCORE, VALUES_LEFT = 0, 1  # the right side's values come last


def run_persistent(
    name: str,
    problem: Problem,
    body: Callable[..., None],
    scratch: dict[str, Any],
    inputs: tuple[jax.Array, ...],
    schedule: TileSchedule,
    *,
    interpret: Any,
    reduction_bytes: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Launch `body(*inputs, counters, *outputs, **scratch)`: inputs, counters and outputs are `work.Global`.

    Returns out [B, rows, 512], lse [B, rows].
    """
    emulate = interpret is not None
    body.__name__ = name
    # The kernel counts in these and leaves zeros behind, so calls can share one array of zeros. The barrier keeps XLA
    # from turning it into a constant, which might lie where nobody can count.
    counters = lax.optimization_barrier(jnp.zeros(problem.batch * problem.row_blocks, jnp.int32))
    # A single part shares no request.
    workspace = (2 * problem.parts, problem.row_blocks * ROWS) if problem.parts > 1 else (1, ROWS)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((problem.batch, problem.rows, LATENT), problem.dtype),
            jax.ShapeDtypeStruct((problem.batch, problem.rows), jnp.float32),
            jax.ShapeDtypeStruct((*workspace, LATENT), jnp.float16),
            jax.ShapeDtypeStruct(workspace, jnp.float32),
            jax.ShapeDtypeStruct((*workspace, LATENT // GROUP), jnp.float32),
            jax.ShapeDtypeStruct((problem.parts, problem.row_blocks), jnp.int32),
        ],
        scratch_types=scratch,
        # Row blocks of a part are neighbours, so that the second finds the keys in L2.
        grid=(problem.parts, problem.row_blocks),
        grid_names=("part", "row_block"),
        num_threads=ROLES,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Those would let the warpgroup wait between any two statements that share memory: `Signal`s and explicit
            # barriers say all that is needed, and the interpreter, which finds races, has checked it.
            unsafe_no_auto_barriers=not emulate,
            # Where reductions stay within a warp no scratch is needed.
            reduction_scratch_bytes=reduction_bytes if not emulate else 2048,
        ),
        interpret=interpret,
    )
    # Mapped by `vmap` it runs once for each: together its CTAs would not fit the GPU, and count in the same counters.
    out, lse, part_out, part_lse, part_scale, _ = jax.custom_batching.sequential_vmap(kernel)(*inputs, counters)
    if emulate and problem.parts > 1:
        return merge_outside(out, lse, part_out, part_lse, part_scale, schedule)
    return out, lse


def barriers(count: int, arrivals: int = 1) -> Any:
    """So many barriers in shared memory."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


class Signals:
    """Hands out signals between warpgroups, with as many indices each, and the barriers of the GPU behind them."""

    def __init__(self, indices: int, scratch: dict[str, Any], *, emulate: bool):
        self._indices, self._scratch, self._emulate = indices, scratch, emulate
        self._next = FIRST_FREE_BARRIER

    def take(self, name: str, warpgroups: int) -> Signal:
        """A signal between so many; in the interpreter, the barriers of that name."""
        signal = Signal(self._next, warpgroups * WARPGROUP, self._scratch[name] if self._emulate else None)
        self._next += self._indices
        assert self._next <= HARDWARE_BARRIERS, "a CTA has no more hardware barriers"
        return signal

    def take_by_side(self, name: str, warpgroups: int) -> SideSignals:
        """One for each side."""
        first = self.take(name, warpgroups)
        self.take(name, warpgroups)
        return SideSignals(first, self._indices)

    def take_barrier(self) -> int:
        """The number of one more barrier."""
        self._next += 1
        assert self._next <= HARDWARE_BARRIERS, "a CTA has no more hardware barriers"
        return self._next - 1


def set_registers(count: int) -> None:
    """Registers per thread of this warpgroup, from what each has at the start."""
    plgpu.set_max_registers(count, action="increase" if count > REGISTERS // ROLES else "decrease")
