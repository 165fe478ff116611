"""The compiled steps of an engine: one executable per bucket, compiled once, ahead of its first run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mla_jax.config import MLAConfig
from mla_jax.decode.speculative_step import speculative_step
from mla_jax.decode.state import DecodeState
from mla_jax.decode.step import Emitted, decode_step, prefill_step
from mla_jax.errors import InputError
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens of some slots, as `prefill_step` takes them; rows of padding have slot N and count 0."""

    slots: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    prefix_lens: np.ndarray
    next_tokens: np.ndarray

    @classmethod
    def padding(cls, rows: int, width: int, num_slots: int) -> "Chunk":
        """Rows that hold nothing yet."""
        return cls(
            slots=np.full((rows,), num_slots, np.int32),
            tokens=np.zeros((rows, width), np.int32),
            counts=np.zeros((rows,), np.int32),
            prefix_lens=np.zeros((rows,), np.int32),
            next_tokens=np.zeros((rows, width), np.int32),
        )

    def put(self, row: int, slot: int, prompt: np.ndarray, start: int, end: int) -> None:
        """Fills a row with prompt[start:end]; a token follows it in the prompt."""
        count = end - start
        self.slots[row], self.prefix_lens[row], self.counts[row] = slot, start, count
        self.tokens[row, :count] = prompt[start:end]
        self.next_tokens[row, :count] = prompt[start + 1 : end + 1]


@dataclass
class Graphs:
    """Steps for buckets of batch sizes. Lengths, pages and slots are values, so none of them compiles anything.

    Attributes:
        buckets: ascending batch sizes; a step runs in the smallest that holds its rows.
        chunks: ascending numbers of prompt tokens that a step of prefill takes of each row.
        steps: of decoding in one call.
        speculation: how much each of them drafts; None for nothing.
        fp8_queries: as for `decode`.
        compile_seconds: spent so far.
        compiled: what has been compiled, each once.
    """

    params: ModelParams
    config: MLAConfig
    implementation: str
    buckets: Sequence[int]
    chunks: Sequence[int]
    steps: int
    speculation: Speculation | None = None
    fp8_queries: bool = False
    compile_seconds: float = 0.0
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def decode(self, state: DecodeState, slots: jax.Array, greedy: bool) -> tuple[DecodeState, Emitted]:
        """Runs the decode step; slots has the length of a bucket."""
        options = {"config": self.config, "greedy": greedy, "implementation": self.implementation, "steps": self.steps}
        options["fp8_queries"] = self.fp8_queries

        def lower() -> Any:
            if self.speculation is None:
                return decode_step.lower(self.params, state, slots, **options)
            return speculative_step.lower(self.params, state, slots, speculation=self.speculation, **options)

        return self._get(("decode", len(slots), greedy), lower)(self.params, state, slots)

    def prefill(self, state: DecodeState, chunk: "Chunk") -> DecodeState:
        """Runs `prefill_step`; the shapes are those of a bucket and a chunk."""
        rows = [chunk.slots, chunk.tokens, chunk.counts, chunk.prefix_lens]
        if self.speculation is not None:
            rows.append(chunk.next_tokens)
        step = self._get(
            ("prefill", *chunk.tokens.shape), lambda: prefill_step.lower(self.params, state, *rows, config=self.config)
        )
        return step(self.params, state, *rows)

    def bucket(self, rows: int) -> int:
        """The smallest bucket that holds so many rows."""
        return next(b for b in self.buckets if b >= rows)

    def chunk(self, tokens: int) -> int:
        """The smallest chunk that holds so many tokens, or the largest there is."""
        return next((c for c in self.chunks if c >= tokens), self.chunks[-1])

    def _get(self, key: tuple[Any, ...], lower: Callable[[], Any]) -> Any:
        if key not in self.compiled:
            started = time.perf_counter()
            self.compiled[key] = lower().compile()
            self.compile_seconds += time.perf_counter() - started
        return self.compiled[key]


def default_buckets(num_slots: int) -> tuple[int, ...]:
    """1, 4, 16, … below num_slots, then num_slots: few to compile, and no batch runs at over 4 times its size."""
    smaller = [4**i for i in range(16) if 4**i < num_slots]
    return (*smaller, num_slots)


def check_buckets(buckets: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Ascending, without repeats. Raises ValueError unless they are sizes up to num_slots that reach it."""
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0] < 1 or ordered[-1] != num_slots:
        raise InputError(f"buckets must be batch sizes of which the largest is num_slots = {num_slots}, got {buckets}.")
    return ordered
