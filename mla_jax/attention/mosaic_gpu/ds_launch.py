"""`decode_ds_with`: packing of query rows, and the kernel for caches in fp8_ds_mla under its own jit."""

import functools
from typing import Any

import jax

from mla_jax.attention.mosaic_gpu.config import ROWS, padded_rows
from mla_jax.attention.mosaic_gpu.ds_config import DsConfig, shared_memory
from mla_jax.attention.mosaic_gpu.ds_kernel import run_ds_kernel
from mla_jax.attention.mosaic_gpu.ds_layout import LINE, LINES
from mla_jax.attention.mosaic_gpu.fp8_config import chosen_for
from mla_jax.attention.mosaic_gpu.packing import describe, kernel_inputs, pack, unpack
from mla_jax.schedule import TileSchedule


def ds_config_for(q: jax.ShapeDtypeStruct | jax.Array) -> DsConfig:
    """The configuration for calls with queries of this shape: as many slots as there is room for."""
    rows = min(ROWS, padded_rows(q.shape[1] * q.shape[2]))
    return DsConfig(**chosen_for(rows, lambda slots: shared_memory(slots, rows)))


@functools.partial(jax.jit, static_argnames=("config", "causal", "interpret"))
def decode_ds_with(
    config: DsConfig,
    q: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    kv_lens: jax.Array,
    logit_scale: jax.Array,
    tree_mask: jax.Array | None,
    schedule: TileSchedule,
    *,
    causal: bool,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """The kernel with a configuration and without checks; `interpret` is for tests without a GPU."""
    packed = pack(q)
    problem = describe(q, packed.shape[1], schedule, tree_mask, dtype=q.dtype, causal=causal, query_parts=0)
    arrays = (packed, kv_cache.reshape(-1, LINES, LINE), block_table, kv_lens, logit_scale)
    inputs = kernel_inputs(*arrays, tree_mask, schedule, problem)
    out, lse = run_ds_kernel(problem, config, inputs, schedule, interpret=interpret)
    return unpack(out, lse, problem)
