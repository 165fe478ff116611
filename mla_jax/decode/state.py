"""What a batch of requests is, between two steps."""

from dataclasses import dataclass
from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.config import MLAConfig


class Status(IntEnum):
    """Of a slot. The names, in lower case, are the finish reasons that users see."""

    EMPTY = 0
    RUNNING = 1
    LENGTH = 2  # emitted as many tokens as asked for
    STOP = 3  # emitted a stop token
    PAGES = 4  # the pool had no page left for it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """N slots and all that a step changes. The step takes it donated and returns the next.

    Attributes:
        pool: who owns which page; its kv_lens count the tokens whose latents are in the cache.
        cache: the latents.
        last_tokens: int32 `[N]`, the token that each slot feeds next; its latents are not in the cache yet.
        remaining: int32 `[N]`, tokens that a slot may still emit.
        status: int32 `[N]`, see `Status`.
        keys: `[N]`, a random key per request; a step folds in the position.
    """

    pool: PagePool
    cache: PagedKVCache
    last_tokens: Int[Array, "N"]
    remaining: Int[Array, "N"]
    status: Int[Array, "N"]
    keys: Key[Array, "N"]


def empty_state(
    config: MLAConfig, num_slots: int, num_pages: int, max_pages_per_seq: int, kv_format: str, seed: int
) -> DecodeState:
    """A state whose slots are all empty; its cache takes num_pages · 64 · layers · bytes per token.

    A slot's key depends on the seed and its index, not on how many slots there are.
    """
    return DecodeState(
        pool=PagePool.create(num_pages, num_slots, max_pages_per_seq),
        cache=PagedKVCache.create(config.num_layers, num_pages, config.latent_dim, kv_format),
        last_tokens=jnp.zeros((num_slots,), jnp.int32),
        remaining=jnp.zeros((num_slots,), jnp.int32),
        status=jnp.full((num_slots,), Status.EMPTY.value, jnp.int32),
        keys=jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_slots, dtype=jnp.uint32)),
    )
