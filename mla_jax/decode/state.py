"""What N slots of requests are between two steps, and how a request enters and leaves one."""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.decode.sampling import Sampling
from mla_jax.speculative.window import MTPWindow

Scalar = Any  # one number, on the host or traced


class Status(IntEnum):
    """Of a slot. The names, in lower case, are the finish reasons that users see."""

    EMPTY = 0
    PREFILL = 1  # its prompt is not all in the cache yet
    RUNNING = 2
    LENGTH = 3  # emitted as many tokens as asked for
    STOP = 4  # emitted a stop token
    PAGES = 5  # the pool had no page left for it
    CANCELLED = 6


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """N slots and all that a step changes. Steps take it donated and return the next.

    Attributes:
        pool: who owns which page. Its kv_lens count the tokens whose latents are in the cache, and in a slot that is
            being prefilled those that will be.
        cache: the latents.
        last_tokens: int32 `[N]`, the token that each slot feeds next; its latents are not in the cache yet.
        remaining: int32 `[N]`, tokens that a slot may still emit.
        status: int32 `[N]`, see `Status`.
        keys: `[N]`, a random key per request; a step folds in the position.
        sampling: numbers `[N]`.
        stops: int32 `[N, K]`, tokens that end a request, −1 where there is none.
        mtp: of a state that drafts, what the next draft starts from.
    """

    pool: PagePool
    cache: PagedKVCache
    last_tokens: Int[Array, "N"]
    remaining: Int[Array, "N"]
    status: Int[Array, "N"]
    keys: Key[Array, "N"]
    sampling: Sampling
    stops: Int[Array, "N K"]
    mtp: MTPWindow | None = None


def empty_state(
    cache: PagedKVCache, num_slots: int, max_pages_per_seq: int, max_stops: int = 1, mtp: MTPWindow | None = None
) -> DecodeState:
    """A state of empty slots over a cache, whose pages become the pool; with an empty window if it is to draft."""
    return DecodeState(
        pool=PagePool.create(cache.layers[0].shape[0], num_slots, max_pages_per_seq),
        cache=cache,
        last_tokens=jnp.zeros((num_slots,), jnp.int32),
        remaining=jnp.zeros((num_slots,), jnp.int32),
        status=jnp.full((num_slots,), Status.EMPTY.value, jnp.int32),
        keys=jax.random.split(jax.random.key(0), num_slots),
        sampling=Sampling(
            jnp.zeros((num_slots,), jnp.float32),
            jnp.zeros((num_slots,), jnp.int32),
            jnp.ones((num_slots,), jnp.float32),
        ),
        stops=jnp.full((num_slots, max_stops), -1, jnp.int32),
        mtp=mtp,
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Entry:
    """A request as it enters a slot.

    Attributes:
        prompt_len: tokens of the prompt but the last: those that prefill leaves in the cache.
        last_token: of the prompt.
        max_new_tokens: that it may emit.
        seed, stream: of its random key: fold_in(key(seed), stream).
        sampling: its numbers.
        stops: int32 `[K]`, padded with −1.
        source: slot to share a prefix with; any other slot if there is none.
        shared: tokens of that prefix, 0 for none.
    """

    prompt_len: Scalar
    last_token: Scalar
    max_new_tokens: Scalar
    seed: Scalar
    stream: Scalar
    sampling: Sampling
    stops: Any
    source: Scalar
    shared: Scalar

    def on_host(self) -> "Entry":
        """With NumPy scalars of fixed dtypes, so that entries differ in nothing that is compiled."""
        s = self.sampling
        return Entry(
            prompt_len=np.int32(self.prompt_len),
            last_token=np.int32(self.last_token),
            max_new_tokens=np.int32(self.max_new_tokens),
            seed=np.uint32(self.seed),
            stream=np.uint32(self.stream),
            sampling=Sampling(np.float32(s.temperature), np.int32(s.top_k), np.float32(s.top_p)),
            stops=np.asarray(self.stops, np.int32),
            source=np.int32(self.source),
            shared=np.int32(self.shared),
        )


@partial(jax.jit, donate_argnames=("state",))
def enter(state: DecodeState, slot: int | Int[Array, ""], entry: Entry) -> DecodeState:
    """Puts a request into an empty slot, with pages for its prompt; a shared prefix is forked, not recomputed.

    The caller has made sure that the pages suffice. If they do not, the slot ends with `Status.PAGES` at once and
    holds none.
    """
    pool, forked = state.pool.fork(entry.source, slot, entry.shared)
    cache = state.cache.fork(pool, entry.source, slot, entry.shared, forked)
    here = jnp.arange(state.status.shape[0], dtype=jnp.int32) == slot
    pool, held = pool.extend(jnp.where(here, entry.prompt_len, pool.kv_lens))
    ok = held[slot] & (forked | (jnp.asarray(entry.shared) == 0))
    pool = pool.release(here & ~ok)
    begun = jnp.where(jnp.asarray(entry.prompt_len) > entry.shared, Status.PREFILL, Status.RUNNING)

    def put(values: jax.Array, value: Any) -> jax.Array:
        return values.at[slot].set(value)

    return replace(
        state,
        pool=pool,
        cache=cache,
        last_tokens=put(state.last_tokens, entry.last_token),
        remaining=put(state.remaining, entry.max_new_tokens),
        status=put(state.status, jnp.where(ok, begun, Status.PAGES).astype(jnp.int32)),
        keys=put(state.keys, jax.random.fold_in(jax.random.key(entry.seed), entry.stream)),
        sampling=jax.tree.map(put, state.sampling, entry.sampling),
        stops=put(state.stops, entry.stops),
        mtp=None if state.mtp is None else replace(state.mtp, count=put(state.mtp.count, 0)),
    )


@partial(jax.jit, donate_argnames=("state",))
def cancel(state: DecodeState, mask: Bool[Array, "N"]) -> DecodeState:
    """Ends the requests in the slots where mask is True and gives their pages back; ended ones stay as they are."""
    ends = mask & ((state.status == Status.RUNNING) | (state.status == Status.PREFILL))
    status = jnp.where(ends, Status.CANCELLED, state.status).astype(jnp.int32)
    return replace(state, pool=state.pool.release(ends), status=status)
