"""Which nodes of a verified draft become text: a walk by chosen tokens, or rejection sampling of a chain.

Letters: B requests, J nodes of a draft, A the most tokens that a step commits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from mla_jax.speculative.tree import Draft


class Purpose(IntEnum):
    """What the key of a position is split for in rejection sampling. Each is used for one decided token only."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accepted:
    """What a step commits of each request's draft.

    Attributes:
        path: int32 `[B, A]`, the kept nodes from the root on, ascending; meaningless from count on.
        tokens: int32 `[B, A]`, the new tokens, one behind each kept node: the drafted ones, and last (the bonus) the
            model's own; −1 from count on.
        count: int32 `[B]`, kept nodes, the root among them, which is also the number of new tokens; at least 1.
    """

    path: Int[Array, "B A"]
    tokens: Int[Array, "B A"]
    count: Int[Array, "B"]


def accept_walk(draft: Draft, choices: Int[Array, "B J"], room: Int[Array, "B"], most_kept: int) -> Accepted:
    """From the root, goes to the child whose token is the model's choice at the node, as long as there is one.

    With the model's best tokens as choices that is greedy verification; with tokens drawn from its distribution at
    each node it is sampling that keeps this distribution (target-only), whatever the draft was.

    Args:
        draft: with different tokens among the children of a node.
        choices: int32 `[B, J]`, the model's token behind each node.
        room: int32 `[B]`; nodes from this index on cannot be accepted.
        most_kept: A, nodes on the longest path.
    """
    nodes = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
    possible = (nodes > 0) & (nodes < room[:, None])
    at, going = jnp.zeros_like(room), jnp.ones_like(room, bool)
    path, count = [at], jnp.ones_like(room)
    for _ in range(most_kept - 1):
        wanted = jnp.take_along_axis(choices, at[:, None], axis=1)
        fits = possible & (draft.parents == at[:, None]) & (draft.tokens == wanted)
        going &= jnp.any(fits, axis=1)
        at = jnp.where(going, jnp.argmax(fits, axis=1).astype(jnp.int32), at)
        path.append(at)
        count += going.astype(jnp.int32)
    nodes_on_path = jnp.stack(path, axis=1)
    tokens = jnp.take_along_axis(choices, nodes_on_path, axis=1)
    return Accepted(nodes_on_path, _blank(tokens, count), count)


def accept_rejection(
    draft: Draft, target: Float[Array, "B J vocab"], keys: Key[Array, "B J"], room: Int[Array, "B"]
) -> Accepted:
    """Rejection sampling of a chain: the tokens are distributed as if each had been drawn from the model.

    A drafted token x is kept iff u · q(x) < p(x) for a uniform u in [0, 1), p the model's and q the draft's
    distribution. Behind the first that is not, one is drawn from max(p − q, 0), normalized; behind the last of a chain
    that is kept whole, from p.

    Args:
        draft: a chain with its probabilities.
        target: float32 `[B, J, vocab]`, the model's distribution behind each node, after temperature, top_k, top_p.
        keys: `[B, J]`, one per position of a token, which `Purpose` splits; the draft has used its part.
        room: int32 `[B]`; nodes from this index on were not drafted in truth, and nothing is rejected there.

    Source: Leviathan et al. 2022 (arXiv 2211.17192), algorithm 1.
    """
    assert draft.probabilities is not None  # only sampled chains come here
    num_drafted = draft.tokens.shape[1] - 1
    drafted = draft.tokens[:, 1:, None]
    u = _each(partial(jax.random.uniform, dtype=jnp.float32), keys[:, :-1], Purpose.ACCEPT)
    p = jnp.take_along_axis(target[:, :-1], drafted, axis=2)[..., 0]
    q = jnp.take_along_axis(draft.probabilities, drafted, axis=2)[..., 0]
    possible = jnp.arange(1, num_drafted + 1, dtype=jnp.int32)[None] < room[:, None]
    kept = jnp.cumprod((keeps(u, p, q) & possible).astype(jnp.int32), axis=1)
    last = jnp.sum(kept, axis=1, dtype=jnp.int32)  # the last kept node

    rejected = (last < num_drafted) & (last + 1 < room)
    at = jnp.minimum(last, num_drafted - 1)[:, None, None]
    q_last = jnp.take_along_axis(draft.probabilities, at, axis=1)[:, 0]
    p_last = jnp.take_along_axis(target, last[:, None, None], axis=1)[:, 0]
    rest = jnp.where(rejected[:, None], residual(p_last, q_last), p_last)
    key = jnp.take_along_axis(keys, last[:, None], axis=1)
    draw = _each(jax.random.categorical, key, Purpose.RESIDUAL, jnp.log(rest)[:, None])
    nodes = jnp.arange(num_drafted + 1, dtype=jnp.int32)[None]
    tokens = jnp.where(nodes < last[:, None], jnp.roll(draft.tokens, -1, axis=1), draw.astype(jnp.int32))
    return Accepted(jnp.broadcast_to(nodes, tokens.shape), _blank(tokens, last + 1), last + 1)


def keeps(u: Float[Array, "*n"], p: Float[Array, "*n"], q: Float[Array, "*n"]) -> Bool[Array, "*n"]:
    """The test of rejection sampling: u · q < p, strictly, so that u = 0 keeps nothing that p excludes."""
    return u * q < p


def residual(p: Float[Array, "B vocab"], q: Float[Array, "B vocab"]) -> Float[Array, "B vocab"]:
    """max(p − q, 0), normalized; p where rounding leaves nothing of it."""
    rest = jnp.maximum(p - q, 0)
    total = jnp.sum(rest, axis=-1, keepdims=True)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), p)


def purpose_keys(keys: Key[Array, "*n"], purpose: Purpose) -> Key[Array, "*n"]:
    """The part of each position's key that serves one purpose."""
    return jax.vmap(lambda key: jax.random.fold_in(key, jnp.uint32(purpose)))(keys.reshape(-1)).reshape(keys.shape)


def cut(accepted: Accepted, remaining: Int[Array, "B"], stops: Int[Array, "B K"]) -> tuple[Accepted, Bool[Array, "B"]]:
    """Ends each run behind its first stop token and at its limit of new tokens.

    Returns what is left, of which count may be 0 where remaining is, and True where it ends with a stop token. Stops
    of −1 are none.
    """
    is_stop = jnp.any(accepted.tokens[:, :, None] == stops[:, None, :], axis=2) & (accepted.tokens >= 0)
    before = jnp.cumsum(is_stop.astype(jnp.int32), axis=1) - is_stop.astype(jnp.int32)
    count = jnp.minimum(accepted.count, jnp.sum(before == 0, axis=1, dtype=jnp.int32))
    count = jnp.minimum(count, remaining)
    tokens = _blank(accepted.tokens, count)
    return Accepted(accepted.path, tokens, count), jnp.any(is_stop & (tokens >= 0), axis=1)


def last_of(tokens: Int[Array, "B A"], count: Int[Array, "B"]) -> Int[Array, "B"]:
    """The last of each run of tokens."""
    return jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]


def _each(draw: Callable[..., Array], keys: Key[Array, "B n"], purpose: Purpose, *values: Array) -> Array:
    """draw(key, …) for each key's part."""
    return jax.vmap(jax.vmap(draw))(purpose_keys(keys, purpose), *values)


def _blank(tokens: Int[Array, "B A"], count: Int[Array, "B"]) -> Int[Array, "B A"]:
    return jnp.where(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < count[:, None], tokens, -1)
