"""Scales of an FP8 latent cache from a model's own activations over a text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_jax.cache.codec import E4M3_MAX
from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.model.attend import Attend, attend_self
from mla_jax.model.params import AttentionParams, ModelParams
from mla_jax.model.transformer import decode_stack, mtp_forward

WINDOW = 512  # tokens that see each other
BATCH = 4  # windows at a time: 0.5 GB of scores for 128 heads


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` returns.

    Attributes:
        scales: float32 `[layers]`, one per cache layer: the decoder's, then one per MTP module.
        largest: float32 `[layers]`, the largest magnitude that each layer would have written to its cache.
        tokens: how many the text had.
    """

    scales: Float[Array, "layers"]
    largest: Float[Array, "layers"]
    tokens: int


def calibrate(
    params: ModelParams,
    config: MLAConfig,
    tokens: Sequence[int],
    *,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Calibration:
    """Per-layer scales for an `fp8_e4m3` cache: the largest magnitude of a layer's latents over the text / 448.

    The text runs in windows of 512 tokens through whole forward passes without a cache, in the dtype of the weights,
    so no rounding of a cache enters. Larger values that other texts bring saturate. A layer of zeros has scale 1.

    Args:
        tokens: token ids of the text, at least one, and one more per MTP module.
        progress: wraps the loop over batches of windows, for a progress bar.

    Raises:
        ValueError: the text is too short, holds a token outside the vocabulary, or gives NaN or infinite latents.

    Cost: one forward pass over the text, and B·H·512² float32 scores for B = 4 windows at a time.
    """
    text, least = np.asarray(tokens, np.int32), 1 + config.num_mtp_layers
    if len(text) < least:
        raise InputError(f"The text has {len(text)} tokens; calibration needs at least {least}.")
    if text.min() < 0 or text.max() >= config.vocab_size:
        raise InputError(f"The text holds a token outside the vocabulary of {config.vocab_size}.")
    windows, counts = _windows(text, config.num_mtp_layers)
    largest = np.zeros(config.num_cache_layers, np.float32)
    for first in progress(range(0, len(windows), BATCH)):
        part = slice(first, first + BATCH)
        found = largest_latents(params, windows[part], counts[part], config=config)
        largest = np.maximum(largest, np.asarray(found))  # NaN stays NaN
    if not np.isfinite(largest).all():
        layer = int(np.argmin(np.isfinite(largest)))
        raise InputError(f"The latents of layer {layer} are not finite numbers; do the weights hold NaN or infinities?")
    scales = np.where(largest / E4M3_MAX < np.finfo(np.float32).tiny, 1, largest / E4M3_MAX)
    return Calibration(jnp.asarray(scales, jnp.float32), jnp.asarray(largest), len(text))


@partial(jax.jit, static_argnames=("config",))
def largest_latents(
    params: ModelParams, windows: Int[Array, "B W"], counts: Int[Array, "B"], *, config: MLAConfig
) -> Float[Array, "layers"]:
    """Largest magnitude in each layer's latents, over the tokens that count.

    Args:
        windows: `[B, 512 + MTP modules]`; module k, from 1 on, reads its tokens k behind the decoder's.
        counts: int32 `[B]`, tokens of each window, 0 … 512 + MTP modules. What lies behind them changes nothing,
            whatever it is.
    """
    width = windows.shape[1] - config.num_mtp_layers
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (windows.shape[0], width))
    behind = lambda k: positions + k < counts[:, None]  # noqa: E731  # token i + k is there
    largest = jnp.zeros((config.num_cache_layers,), jnp.float32)
    hidden, largest = decode_stack(
        params, config, windows[:, :width], positions, largest, _attend_noting(config, behind(0))
    )
    for k, module in enumerate(params.mtp, 1):
        hidden, largest = mtp_forward(
            module,
            params,
            config,
            config.num_layers + k - 1,
            hidden,
            windows[:, k : k + width],
            positions,
            largest,
            _attend_noting(config, behind(k)),
        )
    return largest


def _windows(text: np.ndarray, extra: int) -> tuple[np.ndarray, np.ndarray]:
    """The text in windows of WINDOW tokens and the `extra` behind them, in whole batches, and what each holds."""
    num = -(-len(text) // WINDOW)
    padded = np.zeros(-(-num // BATCH) * BATCH * WINDOW + extra, np.int32)
    padded[: len(text)] = text
    starts = np.arange(0, len(padded) - extra, WINDOW)
    windows = np.stack([padded[start : start + WINDOW + extra] for start in starts])
    return windows, np.clip(len(text) - starts, 0, WINDOW + extra).astype(np.int32)


def _attend_noting(config: MLAConfig, valid: Bool[Array, "B S"]) -> Attend:
    """Causal attention without a cache that keeps the largest magnitudes, `[layers]`, in the cache's place."""
    attend_plainly = attend_self(config)

    def attend(layer: int, p: AttentionParams, query: Any, latents: jax.Array, largest: Any) -> tuple[jax.Array, Any]:
        latents = jnp.where(valid[..., None], latents, 0)  # a padded NaN would reach others: 0 · NaN is NaN
        found = jnp.max(jnp.abs(latents)).astype(jnp.float32)
        return attend_plainly(layer, p, query, latents, None)[0], largest.at[layer].max(found)

    return attend
