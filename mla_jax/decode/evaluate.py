"""Bits per byte of a text, every latent read back from the paged cache."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.model.attend import attention_implementation
from mla_jax.model.cache import create_cache
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import decode, lm_logits, prefill

WINDOW = 512  # tokens of a window
SCORED = 256  # of which the last so many are scored; also the stride, so that each token is scored once
DECODE_CHUNK = 32  # tokens per decode step of the scored half
BATCH = 16  # windows at a time


@dataclass(frozen=True)
class Score:
    """Of a text.

    `predictions`, int32 `[windows, 256]`, holds the most likely token at each scored place, the true text before it.
    """

    bits_per_token: float
    bits_per_byte: float
    scored_tokens: int
    windows: int
    implementation: str
    predictions: np.ndarray = field(repr=False, compare=False)

    def top1_agreement(self, other: "Score") -> float:
        """Fraction of scored places at which both hold the same token for the most likely. Both of one text."""
        if self.predictions.shape != other.predictions.shape:
            raise InputError(f"Scores of {self.windows} and {other.windows} windows are not of one text.")
        return float(np.mean(self.predictions == other.predictions))


def evaluate(
    params: ModelParams,
    config: MLAConfig,
    tokens: Sequence[int],
    bytes_per_token: float = 1.0,
    *,
    kv_format: str = "bf16",
    fp8_queries: bool = False,
    implementation: str | Sequence[str] | None = None,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Score:
    """Scores a text in windows of 512 tokens, stride 256, the last 256 of each scored.

    The first half of a window is prefilled, the second decoded in chunks of 32 tokens through `mla_decode`, so
    that the score sees the cache's format and the attention implementation.

    Args:
        tokens: token ids of the text, at least 512.
        bytes_per_token: of this text on average, to turn bits per token into bits per byte.
        kv_format, implementation: of the cache and of `mla_decode`; a cache with scales takes those of params.
        fp8_queries: whether the second half's queries are rounded to e4m3 too, row by row; with an fp8_e4m3 cache.
        progress: wraps the loop over batches of windows, for a progress bar.

    Raises:
        ValueError: the text is too short or holds a token outside the vocabulary; FP8 queries with another cache than
            fp8_e4m3.
    """
    text = np.asarray(tokens, np.int32)
    if len(text) < WINDOW:
        raise InputError(f"The text has {len(text)} tokens; a score needs at least {WINDOW}.")
    if text.min() < 0 or text.max() >= config.vocab_size:
        raise InputError(f"The text holds a token outside the vocabulary of {config.vocab_size}.")
    starts = np.arange(0, len(text) - WINDOW + 1, SCORED)
    windows = np.stack([text[start : start + WINDOW] for start in starts])
    batch = min(BATCH, len(windows))
    pages = WINDOW // PAGE_SIZE
    pool, _ = PagePool.create(1 + batch * pages, batch, pages).extend(jnp.full((batch,), WINDOW, jnp.int32))
    cache = create_cache(params, config, 1 + batch * pages, kv_format)
    chosen = attention_implementation(config, params.embed.dtype, kv_format, implementation, fp8_queries=fp8_queries)
    how = {"config": config, "implementation": chosen, "fp8_queries": fp8_queries}
    nats, predictions = 0.0, []
    for first in progress(range(0, len(windows), batch)):
        part = windows[first : first + batch]
        padded = np.concatenate([part, np.repeat(part[:1], batch - len(part), axis=0)])
        losses, best, cache = _score(params, cache, padded, pool.block_table, **how)
        nats += float(np.asarray(losses)[: len(part)].sum(dtype=np.float64))
        predictions.append(np.asarray(best)[: len(part)])
    if not math.isfinite(nats):
        raise InputError("The score is not a finite number; do the weights hold NaN or infinities?")
    bits = nats / math.log(2) / (len(windows) * SCORED)
    scored = len(windows) * SCORED
    return Score(bits, bits / bytes_per_token, scored, len(windows), chosen, np.concatenate(predictions))


@partial(jax.jit, static_argnames=("config", "implementation", "fp8_queries"), donate_argnames=("cache",))
def _score(
    params: ModelParams,
    cache: PagedKVCache,
    windows: Int[Array, "B W"],
    block_table: Int[Array, "B M"],
    *,
    config: MLAConfig,
    implementation: str,
    fp8_queries: bool,
) -> tuple[Float[Array, "B"], Int[Array, "B scored"], PagedKVCache]:
    """Of the scored part of each window: negative log-likelihood in nats, the most likely tokens; and the cache."""
    num, context = windows.shape[0], WINDOW - SCORED
    none = jnp.zeros((num,), jnp.int32)
    hidden, cache = prefill(
        params, config, windows[:, :context], jnp.full_like(none, context), none, block_table, cache
    )
    losses, best = _nats(params, hidden[:, -1:], windows[:, context : context + 1])
    predictions = jnp.zeros((num, 1 + SCORED), jnp.int32).at[:, :1].set(best)

    def step(i: Int[Array, ""], state: tuple[jax.Array, jax.Array, PagedKVCache]) -> tuple[Any, ...]:
        losses, predictions, cache = state
        start = context + i * DECODE_CHUNK
        fed = jax.lax.dynamic_slice_in_dim(windows, start, DECODE_CHUNK, axis=1)
        hidden, cache = decode(
            params,
            config,
            fed,
            none + start + DECODE_CHUNK,
            block_table,
            cache,
            implementation=implementation,
            fp8_queries=fp8_queries,
        )
        # Token j of the chunk predicts the one behind it; the window's last predicts nothing that is in it.
        targets = jax.lax.dynamic_slice_in_dim(jnp.pad(windows, ((0, 0), (0, 1))), start + 1, DECODE_CHUNK, axis=1)
        inside = start + 1 + jnp.arange(DECODE_CHUNK, dtype=jnp.int32) < WINDOW
        nats, best = _nats(params, hidden, targets, inside[None])
        predictions = jax.lax.dynamic_update_slice_in_dim(predictions, best, 1 + i * DECODE_CHUNK, axis=1)
        return losses + nats, predictions, cache

    losses, predictions, cache = jax.lax.fori_loop(0, SCORED // DECODE_CHUNK, step, (losses, predictions, cache))
    return losses, predictions[:, :SCORED], cache


def _nats(
    params: ModelParams, hidden: Float[Array, "B S E"], targets: Int[Array, "B S"], where: jax.Array | None = None
) -> tuple[Float[Array, "B"], Int[Array, "B S"]]:
    """Negative log-likelihood of the targets, summed where wanted, and the most likely tokens."""
    logits = lm_logits(params, hidden)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    nats = -jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.sum(nats if where is None else jnp.where(where, nats, 0), axis=1), best
