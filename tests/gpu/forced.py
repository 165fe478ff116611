"""A decode step that hands out its logits, and runs of it that are fed tokens which another run chose."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.attention import api, xla
from mla_jax.decode import step
from mla_jax.decode.state import DecodeState

SMALL_CHUNKS = "xla_chunks_of_64"  # "xla" as it would be with one page per chunk: as right as it is, rounded elsewhere


def add_small_chunks() -> None:
    """Adds that implementation to those of `mla_decode`, in this process."""

    def decode(*arrays: Any, **options: Any) -> Any:
        with mock.patch.object(xla, "CHUNK_PAGES", 1):
            return xla.decode(*arrays, **options)

    plain = api.IMPLEMENTATIONS["xla"]
    decode_jit = jax.jit(decode, static_argnames=("d_v", "causal"))
    api.IMPLEMENTATIONS[SMALL_CHUNKS] = replace(plain, name=SMALL_CHUNKS, decode=decode_jit)


def lower(params: Any, state: DecodeState, config: Any, implementation: str) -> Any:
    """`decode_step`, greedy, with one more result: the float32 logits `[b, vocab]` of its rows. Donates the state.

    Not for threads: while it traces it stands in for the library's `sample`.
    """

    def run(params: Any, state: DecodeState, slots: jax.Array) -> tuple[DecodeState, jax.Array, jax.Array]:
        seen = []

        def sample(logits: jax.Array, *rest: Any, **options: Any) -> jax.Array:
            seen.append(logits)
            return plain(logits, *rest, **options)

        plain = step.sample
        with mock.patch.object(step, "sample", sample):
            state, emitted = step.decode_step.__wrapped__(
                params, state, slots, config=config, greedy=True, implementation=implementation
            )
        return state, emitted.tokens[:, 0], seen[0]

    return jax.jit(run, donate_argnums=1).lower(params, state, _slots(state))


def run(
    compiled: Callable[..., Any], params: Any, start: DecodeState, steps: int, forced: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens it would choose `[steps, b]`, and logits `[steps, b, vocab]`.

    Args:
        forced: tokens `[steps, b]` that it goes on with in place of its own. All runs begin with the same token.
    """
    state = jax.tree.map(lambda x: x.copy(), start)
    chosen, logits = [], []
    for i in range(steps):
        state, tokens, found = compiled(params, state, _slots(state))
        chosen.append(tokens)
        logits.append(found)
        if forced is not None:
            state = replace(state, last_tokens=jnp.asarray(forced[i]))
    return np.asarray(jnp.stack(chosen)), np.asarray(jnp.stack(logits))


def _slots(state: DecodeState) -> jax.Array:
    return jnp.arange(state.status.shape[0], dtype=jnp.int32)
