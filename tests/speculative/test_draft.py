"""Drafts of a small random model against whole forward passes without a cache, one path of tokens at a time."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.model.attend import attend_self
from mla_jax.model.transformer import forward, lm_logits, mtp_forward
from mla_jax.speculative.accept import Accepted
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.draft import Drafter
from mla_jax.speculative.window import MTPWindow, window_after
from tests.speculative import plain
from tests.speculative.slots import Slots
from tests.speculative.test_tree import paths_of
from tests.tiny import TINY, prompts, tiny_params

PARAMS = tiny_params()
LENGTHS = (2, 7, 63, 64, 65, 130)
LONGEST = 144
TOLERANCE = 1e-5  # of log-probabilities


@jax.jit
def whole(tokens: jax.Array) -> jax.Array:
    return forward(PARAMS, TINY, tokens[None])[0]


@jax.jit
def module(hidden: jax.Array, next_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """States and log-probabilities of the MTP module over a whole sequence without a cache."""
    positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]
    attend = attend_self(TINY)
    args = (TINY.num_layers, hidden[None], next_tokens[None], positions, None, attend)
    states, _ = mtp_forward(PARAMS.mtp[0], PARAMS, TINY, *args)
    return states[0], jax.nn.log_softmax(lm_logits(PARAMS, states[0]), axis=-1)


class Oracle:
    """What the module says behind a prompt and a path of drafted tokens: each step fed with its own output."""

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        hidden = np.asarray(whole(jnp.asarray(prompt + [0] * (LONGEST - len(prompt)), jnp.int32)))
        self.hidden = hidden[: len(prompt) - 1]
        self.log_probs = lru_cache(self._log_probs)

    def _log_probs(self, path: tuple[int, ...]) -> np.ndarray:
        return self._run(path)[1][len(self.prompt) - 2 + len(path)]

    def _run(self, path: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows = [*self.hidden]
        for i in range(len(path)):  # the state behind the path so far is that of the next position
            rows.append(self._run(path[:i])[0][len(rows) - 1])
        tokens = [*self.prompt[1:], *path]
        hidden = np.zeros((LONGEST, TINY.hidden_size), np.float32)
        hidden[: len(rows)] = rows
        states, log_probs = module(jnp.asarray(hidden), jnp.asarray(tokens + [0] * (LONGEST - len(tokens)), jnp.int32))
        return np.asarray(states), np.asarray(log_probs)

    def best(self, path: tuple[int, ...]) -> list[tuple[int, float]]:
        log_probs = self.log_probs(path)
        return [(int(t), float(log_probs[t])) for t in np.argsort(-log_probs, kind="stable")]


def drafter(slots: Slots) -> Drafter:
    """With room for 16 rows behind each slot's tokens."""
    lens = slots.state.pool.kv_lens
    pool, ok = slots.state.pool.extend(lens + 16)
    assert bool(ok.all())
    return Drafter(PARAMS, TINY, pool.block_table, lens, jnp.full_like(lens, 16))


@partial(jax.jit, static_argnums=0)
def drafted(speculation, block_table, kv_lens, room, window, root, cache):
    return Drafter(PARAMS, TINY, block_table, kv_lens, room).draft(speculation, window, root, cache)


def draft_of(slots: Slots, speculation: Speculation):
    """The next draft of every slot, and the cache with it."""
    rows, state = drafter(slots), slots.state
    window = widened(state.mtp, speculation.most_kept)
    return drafted(speculation, rows.block_table, rows.kv_lens, rows.room, window, state.last_tokens, state.cache)


def widened(window: MTPWindow, size: int) -> MTPWindow:
    more = size - window.hidden.shape[1]
    return replace(
        window,
        hidden=jnp.pad(window.hidden, ((0, 0), (more, 0), (0, 0))),
        next_tokens=jnp.pad(window.next_tokens, ((0, 0), (more, 0))),
    )


@pytest.fixture(scope="module")
def prompted() -> Slots:
    return Slots(TINY, PARAMS, len(LENGTHS), Speculation.chain(3)).enter_all(prompts(LENGTHS))


@pytest.mark.parametrize("sizes", [(3, 1, 4), (3, 3, 7)], ids=["chain", "tree"])
def test_drafts_are_the_best_paths_of_the_oracle(prompted, sizes):
    speculation = Speculation(*sizes)
    draft, _ = draft_of(prompted, speculation)
    for slot, prompt in enumerate(prompts(LENGTHS)):
        oracle = Oracle(prompt)
        found = plain.propose(oracle.best, speculation.steps, speculation.topk)
        expected = plain.choose(found, speculation.draft_tokens - 1)
        # The draft is only determined where probabilities differ by more than rounding.
        scores = sorted((n.log_prob for n in found), reverse=True)
        gaps = np.diff(scores[: speculation.draft_tokens])
        assert (np.abs(gaps) > TOLERANCE).all() or speculation.is_chain, "another seed, please: a near tie"
        assert int(draft.tokens[slot, 0]) == prompt[-1]
        assert paths_of(draft, slot) == [(), *[n.path for n in expected]]


def test_changing_the_row_just_written_changes_the_next_step(prompted):
    """Step 3 of a chain reads what step 2 wrote at row L, and not what lies behind it."""
    rows, state = drafter(prompted), prompted.state
    layer = TINY.num_layers

    @jax.jit
    def third(cache, change_at):
        hidden, cache = rows.run_window(widened(state.mtp, 4), cache)
        first = jnp.argmax(lm_logits(PARAMS, hidden), axis=-1).astype(jnp.int32)
        hidden, cache = rows.run_token(hidden, first, 2, cache)
        at = (rows.kv_lens + change_at)[:, None]
        old = cache.gather(layer, rows.block_table, at)
        cache = cache.write(layer, rows.block_table, at, old + 1)
        second = jnp.argmax(lm_logits(PARAMS, hidden), axis=-1).astype(jnp.int32)
        hidden, cache = rows.run_token(hidden, second, 3, cache)
        return hidden

    unchanged = np.asarray(third(state.cache, 2))  # a row that is not there yet
    assert (np.abs(np.asarray(third(state.cache, 0)) - unchanged).max(axis=1) > 1e-3).all()
    np.testing.assert_array_equal(third(state.cache, 1), unchanged)  # step 3 writes that one itself


def test_draft_layer_after_rejections_is_that_of_a_fresh_cache():
    """Every draft of a random model is rejected now and then; rows and next drafts are those of a prompt that long."""
    speculation = Speculation.chain(3)
    slots = Slots(TINY, PARAMS, len(LENGTHS), speculation).enter_all(prompts(LENGTHS))
    texts, runs = [[] for _ in LENGTHS], []
    for _ in range(5):
        tokens = np.asarray(slots.step().tokens)
        runs.append((tokens >= 0).sum(axis=1))
        for text, row in zip(texts, tokens, strict=True):
            text += [int(t) for t in row if t >= 0]
    assert np.min(runs) == 1  # whole drafts were rejected
    draft, cache = draft_of(slots, speculation)
    fresh = Slots(TINY, PARAMS, len(LENGTHS), speculation)
    fresh.enter_all([[*prompt, *text] for prompt, text in zip(prompts(LENGTHS), texts, strict=True)])
    expected, expected_cache = draft_of(fresh, speculation)
    np.testing.assert_array_equal(draft.tokens, expected.tokens)
    slots.with_cache(cache)
    fresh.with_cache(expected_cache)
    for slot in range(len(LENGTHS)):
        for layer in range(TINY.num_cache_layers):
            np.testing.assert_allclose(slots.rows(slot, layer), fresh.rows(slot, layer), atol=1e-5)


def test_window_holds_the_states_of_the_kept_nodes_in_order():
    hidden = jnp.arange(2 * 5, dtype=jnp.float32).reshape(2, 5, 1)
    accepted = Accepted(
        jnp.asarray([[0, 2, 4], [0, 0, 0]], jnp.int32),
        jnp.asarray([[7, 8, 9], [5, -1, -1]], jnp.int32),
        jnp.asarray([3, 1], jnp.int32),
    )
    window = window_after(accepted, hidden)
    assert window.count.tolist() == [3, 1]
    assert window.hidden[0, :, 0].tolist() == [0, 2, 4] and window.hidden[1, -1, 0] == 5
    assert window.next_tokens[0].tolist() == [7, 8, 9] and window.next_tokens[1, -1] == 5
