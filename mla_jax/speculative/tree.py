"""Drafts as trees: which nodes a draft keeps, and who is whose ancestor.

Letters: B requests, J nodes of a draft with its root, K branches, N steps, C = K + (N − 1)·K² candidates.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.speculative.config import Speculation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """J nodes for each request. Node 0, the root, is the token that is pending; parents stand before children.

    Attributes:
        tokens: int32 `[B, J]`.
        parents: int32 `[B, J]`, the node before each; the root's is itself.
        depths: int32 `[B, J]`, 0 for the root: a node's position behind the root's.
        probabilities: float32 `[B, J − 1, vocab]`, for a chain that was sampled: the distribution that node j + 1 was
            drawn from.
    """

    tokens: Int[Array, "B J"]
    parents: Int[Array, "B J"]
    depths: Int[Array, "B J"]
    probabilities: Float[Array, "B J-1 vocab"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Candidates:
    """What drafting a tree proposes, in the order of `candidate_depths`.

    Attributes:
        tokens: int32 `[B, C]`.
        log_probs: float32 `[B, C]`, of the path from the root to each; at most its parent's.
        parents: int32 `[B, C]`, a candidate before it, or −1 for the root.
    """

    tokens: Int[Array, "B C"]
    log_probs: Float[Array, "B C"]
    parents: Int[Array, "B C"]


def chain(tokens: Int[Array, "B J"], probabilities: Float[Array, "B J-1 vocab"] | None = None) -> Draft:
    """The draft in which each token follows the one before it."""
    nodes = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    parents = jnp.broadcast_to(jnp.maximum(nodes - 1, 0), tokens.shape)
    return Draft(tokens, parents, jnp.broadcast_to(nodes, tokens.shape), probabilities)


def select(speculation: Speculation, root: Int[Array, "B"], candidates: Candidates) -> Draft:
    """The root and the best draft_tokens − 1 candidates by the probability of their path, best first.

    A child's path is never likelier than its parent's, and of two equal candidates the earlier is taken: so a
    parent is always in, before its child, and cutting nodes off the end leaves a tree of the best.
    """
    _, chosen = jax.lax.top_k(candidates.log_probs, speculation.draft_tokens - 1)  # stable: see jax.lax.top_k
    chosen = chosen.astype(jnp.int32)

    def of_chosen(values: Int[Array, "B C"]) -> Int[Array, "B J-1"]:
        return jnp.take_along_axis(values, chosen, axis=1)

    parents = of_chosen(candidates.parents)
    is_parent = chosen[:, None, :] == parents[:, :, None]  # [B, child, parent], nothing for children of the root
    parent_nodes = jnp.where(parents < 0, 0, 1 + jnp.argmax(is_parent, axis=-1).astype(jnp.int32))
    depths = jnp.broadcast_to(candidate_depths(speculation), candidates.tokens.shape)
    zero = jnp.zeros_like(root)[:, None]
    return Draft(
        tokens=jnp.concatenate([root[:, None], of_chosen(candidates.tokens)], axis=1),
        parents=jnp.concatenate([zero, parent_nodes], axis=1),
        depths=jnp.concatenate([zero, of_chosen(depths)], axis=1),
    )


def candidate_depths(speculation: Speculation) -> Int[Array, "1 C"]:
    """Depth of each candidate: K of depth 1, then K² of each further depth."""
    first, rest = speculation.topk, speculation.topk**2
    depths = [1] * first + [depth for depth in range(2, speculation.steps + 1) for _ in range(rest)]
    return jnp.asarray(depths, jnp.int32)[None]


def ancestors(draft: Draft, deepest: int) -> Bool[Array, "B J J"]:
    """The tree_mask of `mla_decode`: True where node i is node j or an ancestor of it. deepest bounds the depth."""
    num_nodes = draft.parents.shape[1]
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    at = jnp.broadcast_to(nodes, draft.parents.shape)
    mask = at[:, :, None] == nodes[None, None]
    for _ in range(deepest):
        at = jnp.take_along_axis(draft.parents, at, axis=1)
        mask |= at[:, :, None] == nodes[None, None]
    return mask
