"""Choosing the next token from logits."""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from mla_jax.errors import InputError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("temperature", "top_k", "top_p"),
    meta_fields=("greedy",),
)
@dataclass(frozen=True)
class Sampling:
    """How to sample; make one with `create`. The numbers may be traced, so that changing them compiles nothing.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: of those, keep the smallest set whose probability reaches p; 1 keeps all.
        greedy: take the best token and ignore the rest.
    """

    temperature: float | Float[Array, ""] = 0.0
    top_k: int | Int[Array, ""] = 0
    top_p: float | Float[Array, ""] = 1.0
    greedy: bool = field(default=True, metadata={"static": True})

    @classmethod
    def create(cls, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> "Sampling":
        """Checks the values. Raises ValueError for temperature < 0, top_k < 0 or top_p outside (0, 1]."""
        if not 0 <= temperature < float("inf"):
            raise InputError(f"temperature must be a number of at least 0, got {temperature}.")
        if not 0 <= top_k < 2**31:
            raise InputError(f"top_k must be from 0 (which keeps all tokens) to 2³¹ − 1, got {top_k}.")
        if not 0 < top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {top_p}.")
        return cls(temperature, top_k, top_p, greedy=temperature == 0)


def sample(logits: Float[Array, "N vocab"], keys: Key[Array, "N"], sampling: Sampling) -> Int[Array, "N"]:
    """One token per row, int32. Each row has its own key, so a request's text does not depend on its neighbours."""
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = restrict(logits / jnp.asarray(sampling.temperature, jnp.float32), sampling)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def restrict(logits: Float[Array, "N vocab"], sampling: Sampling) -> Float[Array, "N vocab"]:
    """Logits with −inf in place of tokens outside top_k, then outside top_p. The best token always stays."""
    vocab = logits.shape[-1]
    top_k = jnp.asarray(sampling.top_k, jnp.int32)
    ranked = jnp.sort(logits, axis=-1, descending=True)
    kth = jnp.take(ranked, jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1, axis=-1)[:, None]
    ranked = jnp.where(ranked >= kth, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities  # probability of all better tokens
    nucleus = before < jnp.asarray(sampling.top_p, jnp.float32)
    threshold = jnp.min(jnp.where(nucleus, ranked, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.maximum(threshold, kth), logits, -jnp.inf)
