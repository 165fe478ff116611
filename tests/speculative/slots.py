"""Requests in the slots of a decode state, stepped with or without speculation, all of the cache NaN before."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import MLAConfig
from mla_jax.cache.paged import PagedKVCache
from mla_jax.decode.sampling import Sampling
from mla_jax.decode.speculative_step import speculative_step
from mla_jax.decode.state import DecodeState, Entry, Status, empty_state, enter
from mla_jax.decode.step import Emitted, decode_step, prefill_step
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.window import MTPWindow

GREEDY = Sampling.create()


class Slots:
    """N slots of a state, of which all are stepped together."""

    def __init__(
        self,
        config: MLAConfig,
        params: ModelParams,
        num_slots: int,
        speculation: Speculation | None,
        *,
        pages: int | None = None,
        width: int = 6,
        kv_format: str = "fp32",
    ):
        self.config, self.params, self.speculation = config, params, speculation
        num_pages = 1 + (num_slots * width if pages is None else pages)
        layers = config.num_cache_layers if speculation else config.num_layers
        cache = PagedKVCache.create(layers, num_pages, config.latent_dim, kv_format)
        cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
        window = None
        if speculation:
            window = MTPWindow.create(num_slots, speculation.most_kept, config.hidden_size, params.embed.dtype)
        self.state: DecodeState = empty_state(cache, num_slots, width, 2, window)
        self.num_slots = num_slots

    def enter(
        self,
        slot: int,
        prompt: Sequence[int],
        new: int = 1000,
        stops: Sequence[int] = (-1, -1),
        sampling: Sampling = GREEDY,
        chunk: int = 128,
    ) -> None:
        """Puts a prompt into a slot and prefills it."""
        entry = Entry(len(prompt) - 1, prompt[-1], new, 7, slot, sampling, list(stops), slot, 0)
        self.state = enter(self.state, np.int32(slot), entry.on_host())
        for start in range(0, len(prompt) - 1, chunk):
            part = np.asarray(prompt[start : start + chunk + 1], np.int32)
            count = len(part) - 1
            tokens, behind = np.zeros((1, chunk), np.int32), np.zeros((1, chunk), np.int32)
            tokens[0, :count], behind[0, :count] = part[:-1], part[1:]
            self.state = prefill_step(
                self.params,
                self.state,
                np.array([slot], np.int32),
                tokens,
                np.array([count], np.int32),
                np.array([start], np.int32),
                *([behind] if self.speculation else []),
                config=self.config,
            )

    def hold(self, free: int, slots: Sequence[int]) -> None:
        """Lets empty slots, which do not run, hold pages until so many are free."""
        pages = int(self.state.pool.num_free) - free
        lens = np.asarray(self.state.pool.kv_lens).copy()
        for slot in slots:
            held = min(pages, self.state.pool.block_table.shape[1])
            lens[slot], pages = 64 * held, pages - held
        pool, ok = self.state.pool.extend(jnp.asarray(lens))
        assert pages == 0 and bool(ok.all())
        self.state = replace(self.state, pool=pool)

    def enter_all(self, prompts: Sequence[Sequence[int]], **options: Any) -> "Slots":
        for slot, prompt in enumerate(prompts):
            self.enter(slot, prompt, **options)
        return self

    def step(self, greedy: bool = True, slots: Sequence[int] | None = None, **options: Any) -> Emitted:
        chosen = jnp.arange(self.num_slots, dtype=jnp.int32) if slots is None else jnp.asarray(slots, jnp.int32)
        options = {"config": self.config, "greedy": greedy} | options
        function = decode_step
        if self.speculation:
            function = partial(speculative_step, speculation=self.speculation)
        self.state, emitted = function(self.params, self.state, chosen, **options)
        return emitted

    def run(self, count: int, greedy: bool = True, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Until each slot has emitted count tokens or ended: those tokens, and how many each step committed."""
        texts: list[list[int]] = [[] for _ in range(self.num_slots)]
        runs: list[list[int]] = [[] for _ in range(self.num_slots)]
        while True:
            status = np.asarray(self.state.status)
            if all(len(t) >= count or s != Status.RUNNING for t, s in zip(texts, status, strict=True)):
                return [text[:count] for text in texts], runs
            emitted = np.asarray(self.step(greedy, **options).tokens)
            for text, run, tokens in zip(texts, runs, emitted.tolist(), strict=True):
                new = [t for t in tokens if t >= 0]
                assert tokens == new + [-1] * (len(tokens) - len(new))
                text += new
                run += [len(new)] if new else []

    def rows(self, slot: int, layer: int, length: int | None = None) -> np.ndarray:
        """[length, D] of a slot in the cache; by default all that it holds."""
        pages = np.asarray(self.state.pool.block_table)[slot]
        rows = np.asarray(self.state.cache.layers[layer])[pages]
        length = int(self.state.pool.kv_lens[slot]) if length is None else length
        return rows.reshape(-1, rows.shape[-1])[:length]

    def with_cache(self, cache: PagedKVCache) -> None:
        self.state = replace(self.state, cache=cache)
