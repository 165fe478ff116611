"""Which query sees which key: the one place that knows the causal rule, lengths and tree masks."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def visible(
    key_positions: Int[Array, "C"],
    kv_lens: Int[Array, "B"],
    num_queries: int,
    causal: bool,
    tree_mask: Bool[Array, "B S S"] | None,
) -> Bool[Array, "B S C"]:
    """True where query j of request b sees the key at a position (0-based within the request).

    Causal is bottom-right: the S queries are the last S tokens, so query j sees t ≤ kv_lens − S + j. A tree mask
    replaces that among the last S keys: query j sees key kv_lens − S + i iff tree_mask[b, j, i].
    """
    t = key_positions[None, None, :]  # [1, 1, C]
    lens = kv_lens[:, None, None]  # [B, 1, 1]
    exists = t < lens
    if tree_mask is None:
        if not causal or num_queries == 1:
            return jnp.broadcast_to(exists, (kv_lens.shape[0], num_queries, key_positions.shape[0]))
        j = jnp.arange(num_queries, dtype=jnp.int32)[None, :, None]  # [1, S, 1]
        return t + (num_queries - j) <= lens  # nothing is subtracted from lens, which may be any int32
    node = t[:, 0] - (lens[:, 0] - num_queries)  # [B, C], index among the last S keys, negative for the prefix
    node_seen = jnp.take_along_axis(tree_mask, jnp.clip(node, 0, num_queries - 1)[:, None, :], axis=2)
    return exists & ((node < 0)[:, None, :] | node_seen)
