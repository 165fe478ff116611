"""Drafting with the multi-token-prediction (MTP) module: first over the window, then over its own output.

Position i of the module pairs a state of position i with token i + 1 and predicts token i + 2. With L tokens in the
cache the window ends at position L − 1, so the first draft is token L + 1; step s runs at position L + s − 2.

Letters: B requests, A entries of the window, J nodes of the draft, K branches, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.model.attend import Attend, attend_decode, attend_prefill, attend_tree
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import lm_logits, mtp_forward, new_positions
from mla_jax.speculative.accept import Purpose, purpose_keys
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.tree import Candidates, Draft, chain, select
from mla_jax.speculative.window import MTPWindow

Choose = Callable[[Float[Array, "B vocab"], int], tuple[Int[Array, "B"], Float[Array, "B vocab"] | None]]
"""(logits, i) → the i-th drafted token (i from 0) and, if it was sampled, the distribution it was drawn from."""


@dataclass(frozen=True)
class Drafter:
    """Runs a model's MTP module for B requests whose L = kv_lens tokens are in the cache.

    Attributes:
        block_table: int32 `[B, M]`, pages for kv_lens + room tokens.
        kv_lens: int32 `[B]`, L.
        room: int32 `[B]`, rows behind L that a request may write; a chain leaves its rows there.
        implementation, fp8_queries: as for `decode`.
    """

    params: ModelParams
    config: MLAConfig
    block_table: Int[Array, "B M"]
    kv_lens: Int[Array, "B"]
    room: Int[Array, "B"]
    implementation: str | Sequence[str] | None = None
    fp8_queries: bool = False

    def draft(
        self,
        speculation: Speculation,
        window: MTPWindow,
        root: Int[Array, "B"],
        cache: PagedKVCache,
        choose: Choose | None = None,
    ) -> tuple[Draft, PagedKVCache]:
        """A chain or a tree, as speculation says, and the cache with the window's rows in the draft layer.

        Drafts of requests with an empty window mean nothing.

        Args:
            window: of the B requests.
            root: int32 `[B]`, the pending tokens.
            choose: how a chain takes its tokens; the likeliest by default, as trees do.
        """
        hidden, cache = self.run_window(window, cache)
        if speculation.is_chain:
            return self._chain(speculation.steps, hidden, root, cache, choose or likeliest)
        return self._tree(speculation, hidden, root, cache), cache

    def run_window(self, window: MTPWindow, cache: PagedKVCache) -> tuple[Float[Array, "B E"], PagedKVCache]:
        """Writes the window's rows to the draft layer; the module's state at position L − 1."""
        size = window.hidden.shape[1]
        positions = new_positions(self.kv_lens, size)
        valid = jnp.arange(size, dtype=jnp.int32)[None] >= size - window.count[:, None]
        attend = self._attend_cache(self.kv_lens, positions, valid)
        hidden, cache = self._run(window.hidden, window.next_tokens, positions, cache, attend)
        return hidden[:, -1], cache

    def run_token(
        self, hidden: Float[Array, "B E"], tokens: Int[Array, "B"], step: int, cache: PagedKVCache
    ) -> tuple[Float[Array, "B E"], PagedKVCache]:
        """Step 2, 3, … of a chain: from the state and the token that the step before gave, at position L + step − 2."""
        positions = self.kv_lens[:, None] + (step - 2)
        attend = self._attend_cache(self.kv_lens + (step - 1), positions, step - 2 < self.room[:, None])
        hidden, cache = self._run(hidden[:, None], tokens[:, None], positions, cache, attend)
        return hidden[:, 0], cache

    def _chain(
        self, steps: int, hidden: Float[Array, "B E"], root: Int[Array, "B"], cache: PagedKVCache, choose: Choose
    ) -> tuple[Draft, PagedKVCache]:
        tokens, probabilities = [root], []
        for step in range(1, steps + 1):
            if step > 1:
                hidden, cache = self.run_token(hidden, tokens[-1], step, cache)
            token, drawn_from = choose(lm_logits(self.params, hidden), step - 1)
            tokens.append(token)
            probabilities.append(drawn_from)
        sampled = [q for q in probabilities if q is not None]
        return chain(jnp.stack(tokens, axis=1), jnp.stack(sampled, axis=1) if sampled else None), cache

    def _tree(
        self, speculation: Speculation, hidden: Float[Array, "B E"], root: Int[Array, "B"], cache: PagedKVCache
    ) -> Draft:
        """Expands, at each depth, the K candidates whose path is likeliest; each has K children.

        The rows of the expanded nodes are not written to the cache: they are needed in this draft alone.
        """
        k = speculation.topk
        frontier = _first_frontier(self.params, hidden, k)
        candidates = [Candidates(frontier.tokens, frontier.log_probs, jnp.full_like(frontier.tokens, -1))]
        rows = jnp.zeros((root.shape[0], 0, self.config.latent_dim), hidden.dtype)
        for depth in range(2, speculation.steps + 1):
            positions = jnp.broadcast_to(self.kv_lens[:, None] + (depth - 2), frontier.tokens.shape)
            attend = attend_tree(
                self.config,
                self.block_table,
                self.kv_lens,
                frontier.seen,
                implementation=self.implementation,
                fp8_queries=self.fp8_queries,
            )
            states, (_, rows) = self._run(frontier.hidden, frontier.tokens, positions, (cache, rows), attend)
            found = _children(self.params, states, frontier, k)
            candidates.append(found)
            first = k + (depth - 2) * k * k  # index of the first candidate of this depth
            frontier = _next_frontier(states, frontier, found, first)
        return select(speculation, root, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *candidates))

    def _attend_cache(
        self, kv_lens: Int[Array, "B"], positions: Int[Array, "B S"], valid: Bool[Array, "B S"]
    ) -> Attend:
        return attend_decode(
            self.config,
            self.block_table,
            kv_lens,
            positions,
            valid,
            implementation=self.implementation,
            fp8_queries=self.fp8_queries,
        )

    def _run(
        self,
        hidden: Float[Array, "B S E"],
        next_tokens: Int[Array, "B S"],
        positions: Int[Array, "B S"],
        cache: Any,
        attend: Attend,
    ) -> tuple[Float[Array, "B S E"], Any]:
        module, layer = self.params.mtp[0], self.config.num_layers
        return mtp_forward(module, self.params, self.config, layer, hidden, next_tokens, positions, cache, attend)


def prefill_draft_layer(
    params: ModelParams,
    config: MLAConfig,
    hidden: Float[Array, "B S E"],
    next_tokens: Int[Array, "B S"],
    counts: Int[Array, "B"],
    prefix_lens: Int[Array, "B"],
    block_table: Int[Array, "B M"],
    cache: PagedKVCache,
) -> PagedKVCache:
    """Leaves the module's latents of a chunk of each prompt in the draft layer.

    Args:
        hidden: what `prefill` returned for the chunk.
        next_tokens: int32 `[B, S]`, the token behind each of the chunk's.
        counts, prefix_lens, block_table, cache: as for `prefill`; the cache is the one it returned.
    """
    offsets = jnp.arange(next_tokens.shape[1], dtype=jnp.int32)[None]
    positions = prefix_lens[:, None] + offsets
    attend = attend_prefill(config, block_table, prefix_lens, positions, offsets < counts[:, None])
    module, layer = params.mtp[0], config.num_layers
    return mtp_forward(module, params, config, layer, hidden, next_tokens, positions, cache, attend)[1]


def likeliest(logits: Float[Array, "B vocab"], _: int) -> tuple[Int[Array, "B"], None]:
    """Greedy drafting."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), None


def drawing(
    keys: Key[Array, "B n"], distribution: Callable[[Float[Array, "B vocab"]], Float[Array, "B vocab"]]
) -> Choose:
    """Draws the i-th token with its part of keys[:, i], from what distribution makes of the logits."""

    def choose(logits: Float[Array, "B vocab"], i: int) -> tuple[Int[Array, "B"], Float[Array, "B vocab"]]:
        q = distribution(logits)
        drawn = jax.vmap(jax.random.categorical)(purpose_keys(keys[:, i], Purpose.DRAFT), jnp.log(q))
        return drawn.astype(jnp.int32), q

    return choose


@dataclass(frozen=True)
class _Frontier:
    """The K nodes of one depth that are expanded next.

    Attributes:
        tokens, log_probs, candidates: `[B, K]`; the last are their indices among all candidates.
        hidden: `[B, K, E]`, the state that each is paired with: its parent's.
        seen: bool `[B, K, R]`, the rows of the tree that each sees: its ancestors' and its own, which is among the
            last K.
    """

    tokens: Int[Array, "B K"]
    log_probs: Float[Array, "B K"]
    candidates: Int[Array, "B K"]
    hidden: Float[Array, "B K E"]
    seen: Bool[Array, "B K R"]


def _first_frontier(params: ModelParams, hidden: Float[Array, "B E"], k: int) -> _Frontier:
    log_probs, tokens = _best(params, hidden, k)
    nodes = jnp.arange(k, dtype=jnp.int32)
    return _Frontier(
        tokens,
        log_probs,
        candidates=jnp.broadcast_to(nodes, tokens.shape),
        hidden=jnp.repeat(hidden[:, None], k, axis=1),
        seen=_and_itself(jnp.zeros((*tokens.shape, 0), bool)),
    )


def _children(params: ModelParams, states: Float[Array, "B K E"], frontier: _Frontier, k: int) -> Candidates:
    """K children of each node of the frontier, whose states predict them: K² candidates."""
    log_probs, tokens = _best(params, states, k)  # [B, K, K]
    log_probs += frontier.log_probs[:, :, None]
    size = tokens.shape[0]
    parents = jnp.repeat(frontier.candidates, k, axis=1)
    return Candidates(tokens.reshape(size, -1), log_probs.reshape(size, -1), parents)


def _next_frontier(states: Float[Array, "B K E"], frontier: _Frontier, found: Candidates, first: int) -> _Frontier:
    """The K likeliest of the K² children, whose indices among all candidates begin with first."""
    k = states.shape[1]
    log_probs, chosen = jax.lax.top_k(found.log_probs, k)
    chosen = chosen.astype(jnp.int32)
    parents = chosen // k  # within the frontier
    return _Frontier(
        tokens=jnp.take_along_axis(found.tokens, chosen, axis=1),
        log_probs=log_probs,
        candidates=chosen + first,
        hidden=jnp.take_along_axis(states, parents[:, :, None], axis=1),
        seen=_and_itself(jnp.take_along_axis(frontier.seen, parents[:, :, None], axis=1)),
    )


def _and_itself(seen: Bool[Array, "B K R"]) -> Bool[Array, "B K R+K"]:
    """With K more rows, of which each node sees its own."""
    own = jnp.broadcast_to(jnp.eye(seen.shape[1], dtype=bool), (seen.shape[0], seen.shape[1], seen.shape[1]))
    return jnp.concatenate([seen, own], axis=2)


def _best(params: ModelParams, hidden: Float[Array, "*n E"], k: int) -> tuple[Float[Array, "*n K"], Int[Array, "*n K"]]:
    """The k likeliest tokens behind each state, and their log-probabilities, at most 0."""
    log_probs, tokens = jax.lax.top_k(jax.nn.log_softmax(lm_logits(params, hidden), axis=-1), k)
    return jnp.minimum(log_probs, 0), tokens.astype(jnp.int32)
