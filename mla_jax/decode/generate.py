"""Continues prompts together: prefill, then one jitted step per token."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.attention.api import implementation_for
from mla_jax.cache.formats import PAGE_SIZE, kv_format
from mla_jax.config import MLAConfig
from mla_jax.decode.sampling import Sampling
from mla_jax.decode.state import DecodeState, Status, empty_state
from mla_jax.decode.step import Emitted, decode_step, prefill_step
from mla_jax.errors import InputError
from mla_jax.model.params import ModelParams

PREFILL_CHUNK = 128  # tokens of each prompt per prefill step
LAG = 2  # steps that the host reads behind the device, so that the device never waits for it

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
        num_pages: of the pool, the reserved page included; None takes what the prompts and new tokens need.
        implementation: as for `mla_decode`.
    """

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    kv_format: str = "bf16"
    num_pages: int | None = None
    implementation: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Continuation:
    """The tokens after one prompt (a stop token included), and why they end: length, stop or pages."""

    tokens: list[int]
    finish_reason: str


@dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    `seconds` are those of the decode steps. `prefill_seconds` include the compilation of prefill, and
    `compile_seconds` are those of the step; both are small once a process has compiled them.
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
    """Continues all prompts as one batch.

    Args:
        prompts: token ids, each prompt one or more.
        on_tokens: called with (request, new tokens) as they come.

    Raises:
        ValueError: no prompt, an empty one, a token outside the vocabulary, a prompt that the pool cannot hold, or
            one that with its new tokens exceeds config.max_position.
        NotImplementedError: the implementation or format cannot run here.
    """
    _check_prompts(prompts, config, settings)
    prompts = [list(prompt) for prompt in prompts]
    implementation = attention_implementation(config, params.embed.dtype, settings.kv_format, settings.implementation)
    state = _admit(config, prompts, settings)
    pages_total = state.pool.owners.shape[0] - 1
    started = time.perf_counter()
    state = jax.block_until_ready(_prefill(params, config, state, prompts))
    prefilled = time.perf_counter()
    run = _run_steps(params, config, state, settings, implementation, on_tokens)
    return Generation(
        sequences=[Continuation(t, Status(s).name.lower()) for t, s in zip(run.tokens, run.status, strict=True)],
        steps=max(len(t) for t in run.tokens),
        implementation=implementation,
        seconds=run.finished - run.compiled,
        prefill_seconds=prefilled - started,
        compile_seconds=run.compiled - prefilled,
        pages_total=pages_total,
        pages_used=run.pages_used,
        pages_free_after=int(run.state.pool.num_free),
    )


def attention_implementation(
    config: MLAConfig, dtype: Any, kv_format_name: str, wanted: str | Sequence[str] | None
) -> str:
    """The implementation of `mla_decode` that a model of this dtype and cache format will use here."""
    query = jax.ShapeDtypeStruct((1, 1, config.num_heads, config.latent_dim), dtype)
    chosen = kv_format(kv_format_name)
    cache = jax.ShapeDtypeStruct((1, PAGE_SIZE, chosen.row_width(config.latent_dim)), chosen.dtype)
    return implementation_for(wanted, query, cache)


def _check_prompts(prompts: Sequence[Sequence[int]], config: MLAConfig, settings: Settings) -> None:
    if not prompts:
        raise InputError("generate needs at least one prompt, got none.")
    if settings.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {settings.max_new_tokens}.")
    if not 0 <= settings.seed < 2**32:
        raise InputError(f"seed must be from 0 to 2³² − 1, got {settings.seed}.")
    if settings.num_pages is not None and settings.num_pages < 2:
        raise InputError(f"num_pages must be at least 2 (page 0 is reserved), got {settings.num_pages}.")
    for token in settings.stop_tokens:
        if not 0 <= token < config.vocab_size:
            raise InputError(f"stop_tokens holds {token}, outside the vocabulary of {config.vocab_size}.")
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise InputError(f"Prompt {i + 1} of {len(prompts)} is text; pass token ids.")
        if len(prompt) == 0:
            raise InputError(f"Prompt {i + 1} of {len(prompts)} is empty; a prompt needs at least one token.")
        if len(prompt) + settings.max_new_tokens > config.max_position:
            raise InputError(
                f"Prompt {i + 1} has {len(prompt)} tokens; with {settings.max_new_tokens} new ones it would exceed the "
                f"{config.max_position} positions of the model (max_position_embeddings)."
            )
        worst = max(prompt, key=lambda t: t if t >= 0 else config.vocab_size - t)
        if not 0 <= worst < config.vocab_size:
            raise InputError(f"Prompt {i + 1} holds token {worst}, outside the vocabulary of {config.vocab_size}.")


def _admit(config: MLAConfig, prompts: Sequence[Sequence[int]], settings: Settings) -> DecodeState:
    """A state in which every prompt has a slot, and pages for all its tokens but the last."""
    most = [-(-(len(p) + settings.max_new_tokens) // PAGE_SIZE) for p in prompts]
    num_pages = 1 + sum(most) if settings.num_pages is None else settings.num_pages
    lens = np.array([len(p) - 1 for p in prompts], np.int32)
    needed = [-(-int(n) // PAGE_SIZE) for n in lens]
    if sum(needed) > num_pages - 1:
        raise InputError(
            f"The prompts (the longest has {int(lens.max()) + 1} tokens) need {sum(needed)} pages of {PAGE_SIZE} "
            f"tokens, but the pool has {num_pages - 1}; give it more pages, or shorten the prompts."
        )
    state = empty_state(config, len(prompts), num_pages, max(most), settings.kv_format, settings.seed)
    pool, _ = state.pool.extend(jnp.asarray(lens))
    return replace(
        state,
        pool=pool,
        last_tokens=jnp.asarray([p[-1] for p in prompts], jnp.int32),
        remaining=jnp.full((len(prompts),), settings.max_new_tokens, jnp.int32),
        status=jnp.full((len(prompts),), Status.RUNNING.value, jnp.int32),
    )


def _prefill(
    params: ModelParams, config: MLAConfig, state: DecodeState, prompts: Sequence[Sequence[int]]
) -> DecodeState:
    """Fills the cache with all but each prompt's last token, which the first decode step feeds."""
    lens = np.array([len(p) - 1 for p in prompts], np.int32)
    cache = state.cache
    for start in range(0, int(lens.max()), PREFILL_CHUNK):
        tokens = np.zeros((len(prompts), PREFILL_CHUNK), np.int32)
        counts = np.clip(lens - start, 0, PREFILL_CHUNK).astype(np.int32)
        for row, prompt, count in zip(tokens, prompts, counts, strict=True):
            row[:count] = prompt[start : start + count]
        prefix_lens = np.minimum(start, lens).astype(np.int32)
        cache = prefill_step(params, cache, tokens, counts, prefix_lens, state.pool.block_table, config=config)
    return replace(state, cache=cache)


class _Run(NamedTuple):
    state: DecodeState
    tokens: list[list[int]]
    status: list[int]
    pages_used: int  # at most, at any time
    compiled: float  # when the first step had been compiled, in seconds of perf_counter
    finished: float


def _run_steps(
    params: ModelParams,
    config: MLAConfig,
    state: DecodeState,
    settings: Settings,
    implementation: str,
    on_tokens: OnTokens | None,
) -> _Run:
    """Runs steps until every sequence has ended; the host reads LAG steps behind the device."""
    stops = jnp.zeros((config.vocab_size,), bool).at[jnp.asarray(settings.stop_tokens, jnp.int32)].set(True)
    status = [int(s) for s in jax.device_get(state.status)]
    tokens: list[list[int]] = [[] for _ in status]
    unread: deque[Emitted] = deque()
    compiled, pages_used = 0.0, 0

    def read() -> None:
        nonlocal pages_used
        emitted = jax.device_get(unread.popleft())
        for i, token in enumerate(emitted.tokens.tolist()):
            if token >= 0:
                tokens[i].append(token)
                if on_tokens is not None:
                    on_tokens(i, [token])
        status[:] = emitted.status.tolist()
        pages_used = max(pages_used, int(emitted.pages))

    while Status.RUNNING in status:
        state, emitted = decode_step(
            params, state, settings.sampling, stops, config=config, implementation=implementation
        )
        compiled = compiled or time.perf_counter()  # the first call returns when it is compiled and under way
        unread.append(emitted)
        if len(unread) > LAG:
            read()
    while unread:
        read()
    return _Run(state, tokens, status, pages_used, compiled, time.perf_counter())
