"""What the host knows of the requests of an engine, and counts."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.decode.request import Request, common_prefix, pages_for
from mla_jax.decode.step import Emitted


@dataclass(eq=False)
class Live:
    """A request in a slot, as far as the host knows."""

    id: int
    request: Request
    slot: int
    prompt: np.ndarray
    filled: int  # prompt tokens that are in the cache, or will be after the steps under way
    steps: int = 0  # of decoding, read or not; each emits a token or more
    emitted: int = 0
    ended: bool = False

    @property
    def needs_prefill(self) -> bool:
        """Not all of its prompt is in the cache."""
        return not self.ended and self.filled < self.request.prefill_len

    @property
    def runs(self) -> bool:
        """The next step may emit something of it."""
        return not self.ended and not self.needs_prefill and self.steps < self.request.max_new_tokens

    @property
    def growth(self) -> int:
        """Pages that it may still ask for."""
        return self.request.most_pages - pages_for(self.request.prefill_len + self.emitted)


@dataclass
class Stats:
    """What an engine has done so far.

    Attributes:
        decode_steps, prefill_steps: run.
        shared_tokens: prompt tokens that were forked and not computed.
        most_pages: in use at any time.
        prefill_seconds: of prefill while nothing was being decoded, which the host waits for.
        compile_seconds: of all steps.
        accept_histogram: how often a request committed so many tokens in a step.
    """

    decode_steps: int = 0
    prefill_steps: int = 0
    shared_tokens: int = 0
    most_pages: int = 0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    accept_histogram: Counter[int] = field(default_factory=Counter)

    @property
    def accept_length(self) -> float:
        """Tokens that a request commits in a step, on average; 1 without speculation."""
        steps = sum(self.accept_histogram.values())
        return sum(n * times for n, times in self.accept_histogram.items()) / max(steps, 1)

    def count(self, tokens: np.ndarray) -> None:
        """Notes what a request committed in some steps, `[steps, K]`."""
        committed = (tokens >= 0).sum(axis=1)
        self.accept_histogram.update(committed[committed > 0].tolist())


@dataclass
class Queues:
    """Requests that wait, those that have a slot, and what steps emitted that has not been read."""

    waiting: dict[int, Request] = field(default_factory=dict)  # by id, oldest first
    live: dict[int, Live] = field(default_factory=dict)  # by id
    unread: deque[tuple[list[Live], Emitted]] = field(default_factory=deque)

    def shared_prefix(self, prompt: np.ndarray, unlike: int) -> tuple[Live | None, int]:
        """Who has the longest common prefix of at least a page, and its length; (None, 0) if nobody has.

        `unlike` tokens at its end are not shared: the draft layer's row of a token knows the token behind it, too.
        """
        best: tuple[Live | None, int] = (None, 0)
        for live in self.live.values():
            shared = common_prefix(prompt[:-1], live.prompt[:-1]) - unlike
            if shared >= PAGE_SIZE and shared > best[1]:
                best = (live, shared)
        return best
