"""Continues prompts of any lengths, through an engine of its own."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mla_jax.config import MLAConfig
from mla_jax.decode.engine import Engine
from mla_jax.decode.request import Request, checked
from mla_jax.decode.sampling import Sampling
from mla_jax.errors import InputError
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation

MAX_SLOTS = 64  # requests that decode together unless the caller says otherwise
ONE_BUCKET = 16  # up to so many slots, compiling smaller steps for the last requests takes longer than it saves

OnTokens = Callable[[int, list[int]], None]


@dataclass(frozen=True)
class Settings:
    """Of one call of `generate`.

    Attributes:
        max_new_tokens: per sequence.
        sampling: greedy by default.
        seed: of the random keys; request i's key does not depend on the other requests.
        stop_tokens: a sequence ends with the first of these that it emits.
        kv_format: of the cache.
        fp8_queries: whether decode steps round their queries to e4m3 too; with an fp8_e4m3 cache.
        num_slots: requests that decode together at the most; None takes up to 64.
        num_pages: of the pool, the reserved page included; None takes what that many requests need.
        implementation: as for `mla_decode`.
        speculation: how much a step drafts; None for nothing.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    kv_format: str = "bf16"
    fp8_queries: bool = False
    num_slots: int | None = None
    num_pages: int | None = None
    implementation: str | Sequence[str] | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Continuation:
    """The tokens after one prompt (a stop token included), and why they end: length or stop."""

    tokens: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    `seconds` are those of the decode steps, and of prefill while others were decoded; `prefill_seconds` those of
    prefill alone. `compile_seconds` are apart from both. `accept_length` is the number of tokens that a sequence
    commits in a step, 1 without speculation; `accept_histogram` how often it was how many.
    """

    sequences: list[Continuation]
    steps: int
    implementation: str
    seconds: float
    prefill_seconds: float
    compile_seconds: float
    pages_total: int
    pages_used: int
    pages_free_after: int
    shared_tokens: int
    accept_length: float
    accept_histogram: dict[int, int]

    @property
    def pages_free_before(self) -> int:
        """All of them: the pool is made for this call."""
        return self.pages_total

    @property
    def tokens_per_second(self) -> float:
        """Over all sequences."""
        return sum(len(s.tokens) for s in self.sequences) / max(self.seconds, 1e-9)


def generate(
    params: ModelParams,
    config: MLAConfig,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Continues prompts, as many together as slots and pages allow; the others join as these end.

    Args:
        prompts: token ids, each prompt one or more.
        on_tokens: called with (request, new tokens) as they come.

    Raises:
        ValueError: no prompt, an empty one, a token outside the vocabulary, a prompt that with its new tokens exceeds
            the pool or config.max_position, FP8 queries with another cache than fp8_e4m3.
        NotImplementedError: the implementation or format cannot run here.
    """
    if not prompts:
        raise InputError("generate needs at least one prompt, got none.")
    names = [f"Prompt {i + 1} of {len(prompts)}" for i in range(len(prompts))]
    requests = [
        checked(
            Request(prompt, settings.max_new_tokens, settings.sampling, settings.stop_tokens, settings.seed, i),
            config,
            name,
        )
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    engine = _engine(params, config, requests, settings)
    for request, name in zip(requests, names, strict=True):
        engine.submit(request, name)
    tokens: list[list[int]] = [[] for _ in prompts]
    reasons = [""] * len(prompts)
    started = time.perf_counter()
    for update in engine.run():
        tokens[update.request] += update.tokens
        reasons[update.request] = update.finish_reason or ""
        if on_tokens is not None and update.tokens:
            on_tokens(update.request, update.tokens)
    stats = engine.stats
    return Generation(
        sequences=[Continuation(t, r) for t, r in zip(tokens, reasons, strict=True)],
        steps=stats.decode_steps,
        implementation=engine.implementation,
        seconds=time.perf_counter() - started - stats.compile_seconds - stats.prefill_seconds,
        prefill_seconds=stats.prefill_seconds,
        compile_seconds=stats.compile_seconds,
        pages_total=engine.pages_total,
        pages_used=stats.most_pages,
        pages_free_after=engine.pages_free,
        shared_tokens=stats.shared_tokens,
        accept_length=stats.accept_length,
        accept_histogram=dict(stats.accept_histogram),
    )


def _engine(params: ModelParams, config: MLAConfig, requests: Sequence[Request], settings: Settings) -> Engine:
    """With a slot for each request, up to MAX_SLOTS, and by default pages for those that need most."""
    num_slots = min(len(requests), settings.num_slots or MAX_SLOTS)
    most = sorted((request.most_pages for request in requests), reverse=True)
    return Engine(
        params,
        config,
        num_slots=num_slots,
        num_pages=1 + sum(most[:num_slots]) if settings.num_pages is None else settings.num_pages,
        max_seq_len=max(len(r.prompt) for r in requests) + settings.max_new_tokens,
        kv_format=settings.kv_format,
        fp8_queries=settings.fp8_queries,
        implementation=settings.implementation,
        speculation=settings.speculation,
        buckets=(num_slots,) if num_slots <= ONE_BUCKET else None,
        max_stop_tokens=len(settings.stop_tokens),
    )
