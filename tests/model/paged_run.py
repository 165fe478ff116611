"""Runs our model over a paged cache whose unowned bytes are NaN, one helper per step of a server."""

from collections.abc import Sequence
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import MLAConfig, PagedKVCache, PagePool
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import decode, forward, lm_logits, prefill

# Each step runs a few times on tiny arrays, so compiling it takes longer than optimizing can save.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TABLE_WIDTH = 12  # pages a request may own


class PagedRun:
    """Requests of one batch, fed piece by piece; every method returns the logits of each request's new tokens."""

    def __init__(self, config: MLAConfig, params: ModelParams, num_requests: int, kv_format: str = "fp32"):
        self.config, self.params = config, params
        self.pool = PagePool.create(num_requests * TABLE_WIDTH + 1, num_requests, TABLE_WIDTH)
        cache = PagedKVCache.create(config.num_cache_layers, self.pool.owners.shape[0], config.latent_dim, kv_format)
        self.cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)

    @property
    def lens(self) -> np.ndarray:
        return np.asarray(self.pool.kv_lens)

    def prefill(self, pieces: Sequence[np.ndarray], width: int) -> list[np.ndarray]:
        """The next tokens of each request (none is fine), padded to width with a token that must not matter."""
        counts = np.array([len(piece) for piece in pieces], np.int32)
        tokens = np.full((len(pieces), width), 7, np.int32)
        for row, piece in zip(tokens, pieces, strict=True):
            row[: len(piece)] = piece
        before = self._grow(counts)
        hidden, self.cache = JITTED.prefill(
            self.params,
            self.config,
            jnp.asarray(tokens),
            jnp.asarray(counts),
            before,
            self.pool.block_table,
            self.cache,
        )
        return [np.asarray(row[:count]) for row, count in zip(hidden, counts, strict=True)]

    def decode(self, pieces: Sequence[np.ndarray], fp8_queries: bool = False) -> list[np.ndarray]:
        """As many new tokens of every request, read from the cache in the absorbed form."""
        tokens = jnp.asarray(np.stack(pieces), jnp.int32)
        self._grow(np.full(tokens.shape[0], tokens.shape[1], np.int32))
        logits, self.cache = JITTED.decode(
            self.params, self.config, tokens, self.pool.kv_lens, self.pool.block_table, self.cache, fp8_queries
        )
        return list(np.asarray(logits))

    def latents(self, request: int) -> np.ndarray:
        """[layers, tokens, D] as they lie in the request's pages."""
        length = int(self.lens[request])
        pages = np.asarray(self.pool.block_table)[request]
        return np.stack(
            [
                np.asarray(layer)[pages].reshape(-1, layer.shape[-1])[:length]
                for layer in self.cache.layers[: self.config.num_layers]
            ]
        )

    def _grow(self, counts: np.ndarray) -> jax.Array:
        before = self.pool.kv_lens
        self.pool, ok = self.pool.extend(before + jnp.asarray(counts))
        assert bool(ok.all())
        return before


def logits_of(params: ModelParams, config: MLAConfig, tokens: jax.Array) -> jax.Array:
    return lm_logits(params, forward(params, config, tokens))


def prefill_logits(params, config, tokens, counts, prefix_lens, block_table, cache):
    hidden, cache = prefill(params, config, tokens, counts, prefix_lens, block_table, cache)
    return lm_logits(params, hidden), cache


def decode_logits(params, config, tokens, kv_lens, block_table, cache, fp8_queries=False):
    how = {"implementation": "xla", "fp8_queries": fp8_queries}
    hidden, cache = decode(params, config, tokens, kv_lens, block_table, cache, **how)
    return lm_logits(params, hidden), cache


JITTED = SimpleNamespace(
    **{
        name: jax.jit(function, static_argnums=static, compiler_options=QUICK)
        for name, function, static in (
            ("forward", logits_of, 1),
            ("prefill", prefill_logits, 1),
            ("decode", decode_logits, (1, 6)),
        )
    }
)
