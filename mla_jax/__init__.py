"""Multi-head latent attention (MLA) decode for JAX: pages, schedules, kernels, and a model that uses them."""

from mla_jax.attention.api import mla_decode, step_schedule
from mla_jax.attention.merge import merge_states
from mla_jax.attention.queries import quantize_queries
from mla_jax.cache.codec import dequantize_kv, quantize_kv
from mla_jax.cache.formats import FORMATS, PAGE_SIZE, KVFormat, kv_format
from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.config import MLAConfig
from mla_jax.decode.engine import Engine
from mla_jax.decode.request import Request, Update
from mla_jax.decode.sampling import Sampling
from mla_jax.errors import InputError
from mla_jax.explain import Explanation, explain
from mla_jax.model.load import load_checkpoint, save_checkpoint
from mla_jax.model.mla import absorb_query, expand_output, split_kv_b_proj
from mla_jax.schedule import TileSchedule, num_sm_parts, tile_schedule
from mla_jax.speculative.config import Speculation

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "PAGE_SIZE",
    "Engine",
    "Explanation",
    "InputError",
    "KVFormat",
    "MLAConfig",
    "PagePool",
    "PagedKVCache",
    "Request",
    "Sampling",
    "Speculation",
    "TileSchedule",
    "Update",
    "absorb_query",
    "dequantize_kv",
    "expand_output",
    "explain",
    "kv_format",
    "load_checkpoint",
    "merge_states",
    "mla_decode",
    "num_sm_parts",
    "quantize_kv",
    "quantize_queries",
    "save_checkpoint",
    "split_kv_b_proj",
    "step_schedule",
    "tile_schedule",
]
