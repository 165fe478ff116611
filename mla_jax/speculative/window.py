"""What the draft of the next step starts from: the model's states at the tokens that were committed last."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.speculative.accept import Accepted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MTPWindow:
    """The last A positions of each request, right-aligned: with L tokens in the cache, entry A − 1 is position L − 1.

    The draft layer's row of a position i needs the model's state there and token i + 1, which is known one step later
    than the model's own row. So the newest rows are written when the next draft begins.

    Attributes:
        hidden: `[N, A, E]`, states after the final norm.
        next_tokens: int32 `[N, A]`, the token behind each position; the last is the one that is pending.
        count: int32 `[N]`, how many of the last entries hold something and are to be written to the draft layer; a
            request with 0 cannot draft in its next step.
    """

    hidden: Float[Array, "N A E"]
    next_tokens: Int[Array, "N A"]
    count: Int[Array, "N"]

    @classmethod
    def create(cls, num_slots: int, most_kept: int, hidden_size: int, dtype: Any) -> "MTPWindow":
        """Windows that hold nothing."""
        return cls(
            hidden=jnp.zeros((num_slots, most_kept, hidden_size), dtype),
            next_tokens=jnp.zeros((num_slots, most_kept), jnp.int32),
            count=jnp.zeros((num_slots,), jnp.int32),
        )


def window_after(accepted: Accepted, hidden: Float[Array, "B J E"]) -> MTPWindow:
    """The window after a step: the model's states at the kept nodes, in their order, and the tokens behind them."""
    most_kept = accepted.path.shape[1]
    entries = jnp.arange(most_kept, dtype=jnp.int32)[None] - (most_kept - accepted.count[:, None])
    entries = jnp.maximum(entries, 0)  # those before the first repeat it and are not counted
    nodes = jnp.take_along_axis(accepted.path, entries, axis=1)
    return MTPWindow(
        hidden=jnp.take_along_axis(hidden, nodes[:, :, None], axis=1),
        next_tokens=jnp.maximum(jnp.take_along_axis(accepted.tokens, entries, axis=1), 0),
        count=accepted.count,
    )


def window_after_prefill(
    window: MTPWindow,
    hidden: Float[Array, "B S E"],
    next_tokens: Int[Array, "B S"],
    counts: Int[Array, "B"],
) -> MTPWindow:
    """The window when counts[b] more prompt tokens have been run: the last of them; no token changes nothing."""
    last = jnp.maximum(counts - 1, 0)[:, None]
    ran = counts > 0
    state = jnp.take_along_axis(hidden, last[:, :, None], axis=1)[:, 0]
    token = jnp.take_along_axis(next_tokens, last, axis=1)[:, 0]
    return MTPWindow(
        hidden=window.hidden.at[:, -1].set(jnp.where(ran[:, None], state, window.hidden[:, -1])),
        next_tokens=window.next_tokens.at[:, -1].set(jnp.where(ran, token, window.next_tokens[:, -1])),
        count=jnp.where(ran, 1, window.count).astype(jnp.int32),
    )
