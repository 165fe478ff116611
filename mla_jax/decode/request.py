"""A request to an engine, and what comes back of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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


def check_request(request: Request, config: MLAConfig, what: str = "The prompt") -> None:
    """Raises ValueError, in one sentence, for what no engine of this model could run."""
    check_prompt(request.prompt, config, what)
    if not isinstance(request.max_new_tokens, int | np.integer) or request.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be a whole number of at least 1, got {request.max_new_tokens}.")
    if not 0 <= request.seed < 2**32:
        raise InputError(f"seed must be from 0 to 2³² − 1, got {request.seed}.")
    for token in request.stop_tokens:
        if not 0 <= token < config.vocab_size:
            raise InputError(f"stop_tokens holds {token}, outside the vocabulary of {config.vocab_size}.")
    if len(request.prompt) + request.max_new_tokens > config.max_position:
        raise InputError(
            f"{what} has {len(request.prompt)} tokens; with {request.max_new_tokens} new ones it would exceed the "
            f"{config.max_position} positions of the model (max_position_embeddings)."
        )
    s = request.sampling
    Sampling.create(s.temperature, s.top_k, s.top_p)


def check_prompt(prompt: Any, config: MLAConfig, what: str) -> None:
    """Raises ValueError unless the prompt is a sequence of one or more tokens of the vocabulary."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence | np.ndarray):
        raise InputError(f"{what} is {'text' if isinstance(prompt, str) else type(prompt).__name__}; pass token ids.")
    if len(prompt) == 0:
        raise InputError(f"{what} is empty; a prompt needs at least one token.")
    worst = max(prompt, key=lambda t: t if t >= 0 else config.vocab_size - t)
    if not 0 <= worst < config.vocab_size:
        raise InputError(f"{what} holds token {worst}, outside the vocabulary of {config.vocab_size}.")
