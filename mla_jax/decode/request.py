"""A request to an engine, and what comes back of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.config import MLAConfig
from mla_jax.decode.sampling import Sampling
from mla_jax.errors import InputError


@dataclass(frozen=True)
class Request:
    """What to continue, and how.

    Attributes:
        prompt: token ids, one or more.
        max_new_tokens: that it may emit.
        sampling: its numbers; greedy by default.
        stop_tokens: it ends with the first of these that it emits.
        seed, stream: of its random key, which depends on nothing else; None as stream takes the engine's id.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    stream: int | None = None

    @property
    def prefill_len(self) -> int:
        """Tokens that prefill leaves in the cache: all but the last, which the first decode step feeds."""
        return len(self.prompt) - 1

    @property
    def most_pages(self) -> int:
        """That it can ever hold."""
        return pages_for(self.prefill_len + self.max_new_tokens)


@dataclass(frozen=True)
class Update:
    """New tokens of a request (a stop token included), in order; the last update has its finish reason.

    finish_reason: length, stop, cancelled, or pages if the pool had none left.
    """

    request: int
    tokens: list[int]
    finish_reason: str | None = None


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def checked(request: Request, config: MLAConfig, what: str = "The prompt") -> Request:
    """The request with a prompt and stop tokens of its own, as tuples of int.

    Raises ValueError, in one sentence, for what no engine of this model could run.
    """
    if not isinstance(request, Request):
        raise InputError(f"A request must be a Request, got {type(request).__name__}.")
    prompt = _tokens(request.prompt, config, what)
    if not prompt:
        raise InputError(f"{what} is empty; a prompt needs at least one token.")
    stops = _tokens(request.stop_tokens, config, "stop_tokens")
    if not _is_whole(request.max_new_tokens) or request.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, got {request.max_new_tokens!r}.")
    for name, value in (("seed", request.seed), ("stream", 0 if request.stream is None else request.stream)):
        if not _is_whole(value) or not 0 <= value < 2**32:
            raise InputError(f"{name} must be a whole number from 0 to 2³² − 1, got {value!r}.")
    if len(prompt) + request.max_new_tokens > config.max_position:
        raise InputError(
            f"{what} has {len(prompt)} tokens; with {request.max_new_tokens} new ones it would exceed the "
            f"{config.max_position} positions of the model (max_position_embeddings)."
        )
    s = request.sampling
    if not isinstance(s, Sampling) or any(np.ndim(number) for number in (s.temperature, s.top_k, s.top_p)):
        raise InputError(f"sampling must be a Sampling of three numbers, got {s!r}.")
    Sampling.create(s.temperature, s.top_k, s.top_p)
    return replace(request, prompt=prompt, stop_tokens=stops, max_new_tokens=int(request.max_new_tokens))


def _tokens(tokens: Any, config: MLAConfig, what: str) -> tuple[int, ...]:
    """As a tuple of int. Raises ValueError unless it is a sequence of tokens of the vocabulary."""
    if isinstance(tokens, str | bytes):
        raise InputError(f"{what} is {'text' if isinstance(tokens, str) else 'bytes'}; pass token ids.")
    if isinstance(tokens, np.ndarray | jax.Array):
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence):
        raise InputError(f"{what} is {type(tokens).__name__}; pass a sequence of token ids.")
    for token in tokens:
        if not _is_whole(token):
            raise InputError(f"{what} holds {token!r}; token ids are whole numbers.")
        if not 0 <= token < config.vocab_size:
            raise InputError(f"{what} holds token {token}, outside the vocabulary of {config.vocab_size}.")
    return tuple(int(token) for token in tokens)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
