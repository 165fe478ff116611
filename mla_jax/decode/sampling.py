"""Choosing the next token from logits."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from mla_jax.errors import InputError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """How to sample; check the numbers with `create`. Each is one for all rows, or an array `[N]`, one per row.

    They may be traced, so that changing them compiles nothing.

    Attributes:
        temperature: divides the logits; 0 takes the best token and ignores the rest.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: of those, keep the smallest set whose probability reaches p; 1 keeps all.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0

    @classmethod
    def create(cls, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> "Sampling":
        """Checks the values. Raises ValueError for temperature < 0, top_k < 0 or top_p outside (0, 1]."""
        for name, number in (("temperature", temperature), ("top_p", top_p)):
            if isinstance(number, bool) or not isinstance(number, int | float | np.floating | np.integer):
                raise InputError(f"{name} must be a number, got {number!r}.")
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer):
            raise InputError(f"top_k must be a whole number, got {top_k!r}.")
        if not 0 <= temperature < 1e30:
            raise InputError(f"temperature must be a number of at least 0 (and below 1e30), got {temperature}.")
        if not 0 <= top_k < 2**31:
            raise InputError(f"top_k must be from 0 (which keeps all tokens) to 2³¹ − 1, got {top_k}.")
        if not 0 < top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {top_p}.")
        return cls(temperature, top_k, top_p)


def sample(
    logits: Float[Array, "N vocab"], keys: Key[Array, "N"], sampling: Sampling, *, greedy: bool = False
) -> Int[Array, "N"]:
    """One token per row, int32. Each row has its own key, so a request's text does not depend on its neighbours.

    greedy, static, says that every temperature is 0, which saves sorting the vocabulary.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if greedy:
        return best
    drawn = jax.vmap(jax.random.categorical)(keys, kept_logits(logits, sampling)).astype(jnp.int32)
    return jnp.where(jnp.asarray(sampling.temperature, jnp.float32) > 0, drawn, best)


def kept_logits(logits: Float[Array, "N vocab"], sampling: Sampling) -> Float[Array, "N vocab"]:
    """Logits, up to a constant per row, of the distribution that is sampled: divided by temperature, −inf outside
    top_k and top_p. Meaningless, but finite somewhere, in rows of temperature 0."""
    temperature = _column(sampling.temperature, jnp.float32)
    smallest = jnp.finfo(jnp.float32).tiny
    # Shifted first, so that a temperature near 0 gives −inf beside the best token and not inf − inf.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    return restrict(shifted / jnp.maximum(temperature, smallest), sampling)


def probabilities(logits: Float[Array, "N vocab"], sampling: Sampling) -> Float[Array, "N vocab"]:
    """The distribution that `sample` draws from, float32; at temperature 0 all of it is on the best token."""
    drawn = jax.nn.softmax(kept_logits(logits, sampling), axis=-1)
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jnp.where(_column(sampling.temperature, jnp.float32) > 0, drawn, best)


def restrict(logits: Float[Array, "N vocab"], sampling: Sampling) -> Float[Array, "N vocab"]:
    """Logits with −inf in place of tokens outside top_k, then outside top_p. The best token always stays."""
    vocab = logits.shape[-1]
    top_k = _column(sampling.top_k, jnp.int32)
    ranked = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1
    kth = jnp.take_along_axis(ranked, jnp.broadcast_to(last, (logits.shape[0], 1)), axis=-1)
    ranked = jnp.where(ranked >= kth, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # probability of all better tokens
    # With a top_p that float32 rounds to 0, the best token, which has nothing before it, still stays.
    nucleus = (before < _column(sampling.top_p, jnp.float32)) | (before == 0)
    threshold = jnp.min(jnp.where(nucleus, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.maximum(threshold, kth), logits, -jnp.inf)


def _column(values: Any, dtype: Any) -> Array:
    """`[1, 1]` or `[N, 1]`, to go with `[N, vocab]`."""
    return jnp.atleast_1d(jnp.asarray(values, dtype))[:, None]
