"""`decode_ds_with`: packing of query rows, and the kernel for caches in fp8_ds_mla under its own jit."""

import functools
from typing import Any

import jax

from mla_jax.attention.mosaic_gpu.config import ROWS, SHARED_MEMORY, padded_rows
from mla_jax.attention.mosaic_gpu.ds_config import DsConfig, shared_memory
from mla_jax.attention.mosaic_gpu.ds_kernel import run_ds_kernel
from mla_jax.attention.mosaic_gpu.ds_layout import LINE, LINES
from mla_jax.attention.mosaic_gpu.packing import describe, pack, tree_words, unpack
from mla_jax.schedule import TileSchedule

FEW_ROWS = 32  # accumulators for so many leave registers to the score role


def ds_config_for(q: jax.ShapeDtypeStruct | jax.Array) -> DsConfig:
    """The configuration for calls with queries of this shape: as many slots as there is room for."""
    rows = min(ROWS, padded_rows(q.shape[1] * q.shape[2]))
    registers: dict[str, Any] = {"score_registers": 184, "value_registers": 160} if rows <= FEW_ROWS else {}
    fits = [n for n in range(2, 6) if shared_memory(n, rows) <= SHARED_MEMORY]
    return DsConfig(slots=fits[-1], **registers)


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
    inputs = (
        packed,
        kv_cache.reshape(-1, LINES, LINE),
        block_table,
        kv_lens,
        schedule.metadata,
        schedule.num_splits,
        logit_scale,
        tree_words(tree_mask, problem),
    )
    out, lse = run_ds_kernel(problem, config, inputs, schedule, interpret=interpret)
    return unpack(out, lse, problem)
