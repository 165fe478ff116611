"""Continuous batching: requests join and leave a running batch between its steps.

The host decides who runs, and the device decides everything else. The host learns what a step emitted LAG steps
later, so that the device never waits for it; only when a request could join does it catch up first, because it
then has to know how many pages are free.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.config import MLAConfig, check_integer
from mla_jax.decode.graphs import Chunk, Graphs, check_buckets, default_buckets
from mla_jax.decode.live import Live, Queues, Stats
from mla_jax.decode.request import Request, Update, checked, pages_for
from mla_jax.decode.state import Entry, Status, cancel, empty_state, enter
from mla_jax.errors import InputError
from mla_jax.model.attend import attention_implementation
from mla_jax.model.cache import create_cache
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.window import MTPWindow

LAG = 2  # calls of a step that the host reads behind the device
STEPS_PER_VISIT = 8  # on an H200 a call costs the host 0.3 ms, and a step of a small model the device 0.15
PREFILL_CHUNKS = (32, 128)  # tokens of each prompt per step of prefill


class Engine:
    """Decodes requests as they come, in up to num_slots slots over one pool of pages.

    A request is admitted, oldest first, when a slot is free and the pool holds all the pages that it and those who
    run may ever need, so that none ends for want of pages. A prompt that begins like that of a running request, for
    a page or more, shares those pages and does not compute them again.

    Args:
        params, config: of the model.
        num_slots: requests that decode together at the most.
        num_pages: of the pool, the reserved page 0 included; None takes what num_slots requests of max_seq_len need.
        max_seq_len: prompt and new tokens of one request at the most; None takes the model's max_position.
        kv_format: of the cache.
        fp8_queries: whether decode steps round their queries to e4m3 too, row by row; with an fp8_e4m3 cache.
        implementation: as for `mla_decode`.
        buckets: batch sizes to compile steps for, of which the largest is num_slots; None takes 1, 4, 16, ….
        prefill_chunk: prompt tokens of each request per step of prefill.
        steps_per_visit: decode steps that the device runs before the host may let requests join or leave. None takes 1
            on a CPU and 8 elsewhere, where starting a step takes the host longer than a small step takes the device.
        speculation: how many tokens a step drafts with the model's multi-token-prediction module; None for none.
        max_stop_tokens: that a request may have.

    Raises:
        ValueError: sizes that fit nothing, an unknown format, FP8 queries with another cache than fp8_e4m3, speculation
            with a model that has no such module.
        NotImplementedError: the implementation or format cannot run here.
    """

    def __init__(
        self,
        params: ModelParams,
        config: MLAConfig,
        *,
        num_slots: int = 16,
        num_pages: int | None = None,
        max_seq_len: int | None = None,
        kv_format: str = "bf16",
        fp8_queries: bool = False,
        implementation: str | Sequence[str] | None = None,
        buckets: Sequence[int] | None = None,
        prefill_chunk: int = PREFILL_CHUNKS[-1],
        steps_per_visit: int | None = None,
        speculation: Speculation | None = None,
        max_stop_tokens: int = 8,
    ):
        steps = (
            (1 if jax.default_backend() == "cpu" else STEPS_PER_VISIT) if steps_per_visit is None else steps_per_visit
        )
        for name, size in (("num_slots", num_slots), ("prefill_chunk", prefill_chunk), ("steps_per_visit", steps)):
            check_integer(name, size, 1)
        longest = config.max_position if max_seq_len is None else max_seq_len
        if not 1 <= longest <= config.max_position:
            raise InputError(f"max_seq_len must be from 1 to the model's {config.max_position}, got {max_seq_len}.")
        if num_pages is None:
            num_pages = 1 + num_slots * pages_for(longest)
        elif num_pages < 2:
            raise InputError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}.")
        if speculation is not None:
            speculation.check_model(config)
        self.config = config
        self.max_seq_len = longest
        self.pages_total = num_pages - 1
        self.max_stop_tokens = max(max_stop_tokens, 1)
        self.stats = Stats()
        self._graphs = Graphs(
            params,
            config,
            attention_implementation(config, params.embed.dtype, kv_format, implementation, fp8_queries=fp8_queries),
            default_buckets(num_slots) if buckets is None else check_buckets(buckets, num_slots),
            tuple(sorted({c for c in PREFILL_CHUNKS if c < prefill_chunk} | {prefill_chunk})),
            steps,
            speculation,
            fp8_queries,
        )
        self._state = empty_state(
            create_cache(params, config, num_pages, kv_format, mtp=speculation is not None),
            num_slots,
            pages_for(longest),
            self.max_stop_tokens,
            None if speculation is None else _empty_window(params, speculation, num_slots),
        )
        self._free_slots = list(range(num_slots))
        self._q = Queues()
        self._updates: deque[Update] = deque()  # not delivered yet
        self._next_id = 0
        self._may_admit = False  # something has changed since admission last failed
        self._running_slots: tuple[tuple[int, ...], jax.Array] | None = None

    @property
    def implementation(self) -> str:
        """Of `mla_decode`."""
        return self._graphs.implementation

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs, or updates are still to come."""
        return bool(self._q.waiting or self._q.live or self._q.unread or self._updates)

    @property
    def pages_free(self) -> int:
        """Of the pool, after the steps under way. Waits for them."""
        return int(self._state.pool.num_free)

    def compile(self, *, sampled: bool = False) -> float:
        """Compiles the steps of all buckets ahead of time: greedy ones, or also those that sample.

        Without it each is compiled when it is first needed. Returns the seconds spent.
        """
        graphs, slots = self._graphs, self._state.status.shape[0]
        before = graphs.compile_seconds
        for rows in graphs.buckets:
            padding = np.full((rows,), slots, np.int32)
            for greedy in (True, False) if sampled else (True,):
                self._state, _ = graphs.decode(self._state, jax.device_put(padding), greedy)
            for width in graphs.chunks:
                self._state = graphs.prefill(self._state, Chunk.padding(rows, width, slots))
        self.stats.compile_seconds = graphs.compile_seconds
        return graphs.compile_seconds - before

    def submit(self, request: Request, what: str = "The prompt") -> int:
        """Queues a request and returns its id: 0, 1, 2, … in the order of submission. The prompt is copied.

        Raises ValueError with what is wrong with it, or why it could never fit; nothing is queued then. `what` is how
        the sentence names the prompt.
        """
        request = checked(request, self.config, what)
        self._check_fits(request, what)
        number, self._next_id = self._next_id, self._next_id + 1
        self._q.waiting[number] = request if request.stream is not None else replace(request, stream=number)
        self._may_admit = True
        return number

    def cancel(self, request: int) -> bool:
        """Ends a request that waits or runs; its pages are free at once. False if it has ended already.

        No update of it comes after this call, not even of tokens that it has emitted before.
        """
        if self._q.waiting.pop(request, None) is not None:
            self._may_admit = True
            return True
        live = self._q.live.get(request)
        if live is None:
            return False
        mask = np.arange(self._state.status.shape[0]) == live.slot
        self._state = cancel(self._state, mask)
        self._leave(live)
        self._updates = deque(update for update in self._updates if update.request != request)
        return True

    def step(self) -> list[Update]:
        """Admits who can join, then runs a step of prefill, if any prompt needs it, and one of decoding.

        Returns what has become known: the tokens of a step come back LAG steps later.
        """
        self._advance()
        updates = list(self._updates)
        self._updates.clear()
        return updates

    def run(self) -> Iterator[Update]:
        """Steps until nothing waits or runs, and yields the updates as they come.

        Whoever stops iterating loses nothing: what was not delivered comes with the next call of `run` or `step`.
        """
        while self.busy:
            if not self._updates:
                self._advance()
            while self._updates:
                yield self._updates.popleft()

    def _advance(self) -> None:
        if self._q.waiting and self._free_slots and self._may_admit:
            while self._q.unread:
                self._read()
            self._admit()
        self._prefill()
        running = [live for live in self._q.live.values() if live.runs]
        if running:
            self._decode(running)
        while len(self._q.unread) > (LAG if running else 0):
            self._read()
        self.stats.compile_seconds = self._graphs.compile_seconds

    def _check_fits(self, request: Request, what: str) -> None:
        tokens = len(request.prompt) + request.max_new_tokens
        if tokens > self.max_seq_len:
            raise InputError(
                f"{what} has {len(request.prompt)} tokens; with {request.max_new_tokens} new ones it would exceed "
                f"the engine's max_seq_len of {self.max_seq_len}."
            )
        if request.most_pages > self.pages_total:
            raise InputError(
                f"{what} has {len(request.prompt)} tokens; with {request.max_new_tokens} new ones it may need "
                f"{request.most_pages} pages of {PAGE_SIZE} tokens, but the pool has {self.pages_total}; give it more "
                f"pages, or ask for less."
            )
        if len(request.stop_tokens) > self.max_stop_tokens:
            raise InputError(
                f"The request has {len(request.stop_tokens)} stop tokens; the engine's max_stop_tokens is "
                f"{self.max_stop_tokens}."
            )

    def _admit(self) -> None:
        """Lets waiting requests join, oldest first, until one does not fit. Reads the device once."""
        free = self.pages_free - sum(live.growth for live in self._q.live.values())
        self._may_admit = False
        for number, request in list(self._q.waiting.items()):
            if not self._free_slots:
                return
            prompt = np.asarray(request.prompt, np.int64)
            source, shared = self._q.shared_prefix(prompt, unlike=0 if self._graphs.speculation is None else 1)
            if source is not None and source.filled < shared:
                self._may_admit = True  # as soon as that prompt is in the cache
                continue
            need = request.most_pages - shared // PAGE_SIZE
            if need > free:
                return
            free -= need
            self._enter(number, request, prompt, source, shared)
            del self._q.waiting[number]

    def _enter(self, number: int, request: Request, prompt: np.ndarray, source: Live | None, shared: int) -> None:
        slot = self._free_slots[0]
        entry = Entry(
            prompt_len=request.prefill_len,
            last_token=request.prompt[-1],
            max_new_tokens=request.max_new_tokens,
            seed=request.seed,
            stream=request.stream,
            sampling=request.sampling,
            stops=[*request.stop_tokens, *[-1] * (self.max_stop_tokens - len(request.stop_tokens))],
            source=slot if source is None else source.slot,
            shared=shared,
        )
        self._state = enter(self._state, np.int32(slot), entry.on_host())
        self._free_slots.remove(slot)
        self._q.live[number] = Live(number, request, slot, prompt, shared)
        self.stats.shared_tokens += shared

    def _prefill(self) -> None:
        """One chunk of every prompt that is not all in the cache."""
        todo = [live for live in self._q.live.values() if live.needs_prefill]
        if not todo:
            return
        width = self._graphs.chunk(max(live.request.prefill_len - live.filled for live in todo))
        chunk = Chunk.padding(self._graphs.bucket(len(todo)), width, self._state.status.shape[0])
        for row, live in enumerate(todo):
            end = min(live.filled + width, live.request.prefill_len)
            chunk.put(row, live.slot, live.prompt, live.filled, end)
            live.filled = end
        compiled, started = self._graphs.compile_seconds, time.perf_counter()
        self._state = self._graphs.prefill(self._state, chunk)
        self.stats.prefill_steps += 1
        if not self._q.unread:
            jax.block_until_ready(self._state)
            spent = time.perf_counter() - started - (self._graphs.compile_seconds - compiled)
            self.stats.prefill_seconds += spent

    def _decode(self, running: list[Live]) -> None:
        rows = self._graphs.bucket(len(running))
        padding = [self._state.status.shape[0]] * (rows - len(running))
        slots = (*(live.slot for live in running), *padding)
        if self._running_slots is None or self._running_slots[0] != slots:
            self._running_slots = slots, jax.device_put(np.asarray(slots, np.int32))
        greedy = all(live.request.sampling.temperature == 0 for live in running)
        self._state, emitted = self._graphs.decode(self._state, self._running_slots[1], greedy)
        jax.tree.map(lambda x: x.copy_to_host_async(), emitted)
        self._q.unread.append((running, emitted))
        for live in running:
            live.steps += self._graphs.steps
        self.stats.decode_steps += self._graphs.steps

    def _read(self) -> None:
        """What the oldest unread step emitted. Waits for it."""
        rows, on_device = self._q.unread.popleft()
        emitted = jax.device_get(on_device)
        self.stats.most_pages = max(self.stats.most_pages, int(emitted.pages))
        for live, tokens, status in zip(rows, emitted.tokens.tolist(), emitted.status.tolist(), strict=False):
            if live.ended:
                continue
            new = [t for t in tokens if t >= 0]
            live.emitted += len(new)
            self.stats.count(np.reshape(tokens, (self._graphs.steps, -1)))
            reason = None if status == Status.RUNNING else Status(status).name.lower()
            if reason is not None:
                self._leave(live)
            if new or reason is not None:
                self._updates.append(Update(live.id, new, reason))

    def _leave(self, live: Live) -> None:
        live.ended = True
        del self._q.live[live.id]
        self._free_slots.append(live.slot)
        self._may_admit = True


def _empty_window(params: ModelParams, speculation: Speculation, num_slots: int) -> MTPWindow:
    hidden_size = params.embed.shape[1]
    return MTPWindow.create(num_slots, speculation.most_kept, hidden_size, params.embed.dtype)
