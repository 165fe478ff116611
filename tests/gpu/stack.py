"""Models to time on a GPU: the demo model, and a stack of DeepSeek-V3's attention dimensions with random weights."""

import zlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from mla_jax.cache.codec import quantize_kv
from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.decode.state import DecodeState, Status, empty_state
from mla_jax.demo import CHECKPOINT
from mla_jax.model.cache import create_cache
from mla_jax.model.checkpoint import build_params
from mla_jax.model.load import load_checkpoint
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.window import MTPWindow


def v3_config(num_layers: int = 27, num_heads: int = 128) -> MLAConfig:
    """DeepSeek-V3's attention (7168 wide, q rank 1536, latent 512 + 64); an MLP of 2048 in place of the experts."""
    return MLAConfig(
        vocab_size=32768,
        hidden_size=7168,
        intermediate_size=2048,
        num_layers=num_layers,
        num_heads=num_heads,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_mtp_layers=1,
        max_position=163840,
    )


def v3_params(config: MLAConfig) -> ModelParams:
    """Random weights that keep the size of what they are multiplied with."""

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.bfloat16)
        key = jax.random.key(zlib.crc32(name.encode()), impl="rbg")
        return _weights(key, shape)

    return build_params(config, draw)


@jax.jit(static_argnums=1)
def _weights(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (jax.random.uniform(key, shape, jnp.bfloat16, -1, 1) * (3 / shape[-1]) ** 0.5).astype(jnp.bfloat16)


def demo() -> tuple[MLAConfig, ModelParams]:
    """The demo model in bf16."""
    return load_checkpoint(CHECKPOINT, jnp.bfloat16)


def cache_and_queries(name: str) -> tuple[str, bool]:
    """The cache's format, and whether queries are in e4m3 too: of "bf16", "fp8_e4m3", "fp8_e4m3+q"."""
    return name.removesuffix("+q"), name.endswith("+q")


def running_state(
    config: MLAConfig,
    params: ModelParams,
    batch: int,
    context: int,
    room: int,
    kv_format: str,
    speculation: Speculation | None = None,
) -> DecodeState:
    """All slots running with `context` tokens of zeros in the cache, and pages for `room` more steps."""
    window = None
    if speculation is not None:
        room *= speculation.most_kept
        window = MTPWindow.create(batch, speculation.most_kept, config.hidden_size, params.embed.dtype)
    pages = -(-(context + room) // 64)
    cache = create_cache(params, config, 1 + batch * pages, kv_format, mtp=speculation is not None)
    state = empty_state(cache, batch, pages, mtp=window)
    pool, _ = state.pool.extend(jnp.full((batch,), context, jnp.int32))
    return replace(
        state,
        pool=pool,
        remaining=jnp.full((batch,), 2**30, jnp.int32),
        status=jnp.full((batch,), Status.RUNNING.value, jnp.int32),
    )


def with_latents(cache: PagedKVCache) -> PagedKVCache:
    """With random latents in all rows: products of zeros take less power, and so less time."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(cache.layers))
    layers = (
        _latents(key, layer.shape[:2], cache.latent_dim, cache.format.name, cache.scale(i))
        for i, (key, layer) in enumerate(zip(keys, cache.layers, strict=True))
    )
    return replace(cache, layers=tuple(layers))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _latents(
    key: jax.Array, rows: tuple[int, ...], latent_dim: int, kv_format: str, scale: jax.Array | None
) -> jax.Array:
    return quantize_kv(jax.random.normal(key, (*rows, latent_dim), jnp.bfloat16), kv_format, scale)
