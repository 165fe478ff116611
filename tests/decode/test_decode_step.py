"""The jitted step: what it compiles, what it leaves alone, and that buckets are interchangeable."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache.paged import PagedKVCache
from mla_jax.decode.sampling import Sampling
from mla_jax.decode.state import DecodeState, Entry, Status, cancel, empty_state, enter
from mla_jax.decode.step import Emitted, decode_step, prefill_step
from mla_jax.model.transformer import forward, lm_logits
from tests.tiny import TINY, prompts, tiny_params

PARAMS = tiny_params()
SLOTS, MAX_PAGES, PAGES = 8, 6, 24
LONGEST = 64 * MAX_PAGES
WHOLE = jax.jit(lambda ids: lm_logits(PARAMS, forward(PARAMS, TINY, ids))[0])


def fresh(free_pages: int = PAGES) -> DecodeState:
    """Empty slots over a cache of which every byte is NaN; the last slots hold all pages but free_pages.

    Always of one shape, so that this file compiles little.
    """
    cache = PagedKVCache.create(TINY.num_layers, 1 + PAGES, TINY.latent_dim, "fp32")
    state = empty_state(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache), SLOTS, MAX_PAGES)
    held = np.clip(PAGES - free_pages - MAX_PAGES * np.arange(SLOTS)[::-1], 0, MAX_PAGES)
    pool, _ = state.pool.extend(jnp.asarray(64 * held, jnp.int32))
    return replace(state, pool=pool)


def entry(prompt: list[int], new: int = 300, stop: int = -1, source: int = 0, shared: int = 0) -> Entry:
    return Entry(len(prompt) - 1, prompt[-1], new, 0, 0, Sampling(), [stop], source, shared).on_host()


def filled(state: DecodeState, wanted: dict[int, list[int]], **options: int) -> DecodeState:
    """With a prompt in each of these slots, prefilled."""
    for slot, prompt in wanted.items():
        state = enter(state, np.int32(slot), entry(prompt, **options))
        tokens = np.zeros((1, 300), np.int32)
        tokens[0, : len(prompt) - 1] = prompt[:-1]
        state = prefill_step(
            PARAMS, state, np.array([slot], np.int32), tokens, np.array([len(prompt) - 1], np.int32),
            np.zeros(1, np.int32), config=TINY,
        )  # fmt: skip
    return state


def step(state: DecodeState, slots: list[int]) -> tuple[DecodeState, Emitted]:
    return decode_step(PARAMS, state, np.asarray(slots, np.int32), config=TINY, greedy=True)


def run(state: DecodeState, slots: list[int], steps: int) -> tuple[DecodeState, np.ndarray]:
    rows = []
    for _ in range(steps):
        state, emitted = step(state, slots)
        rows.append(np.asarray(emitted.tokens)[:, 0])
    return state, np.stack(rows, axis=1)


def near_ties(prompt: list[int], tokens: list[int]) -> bool:
    """Whether every token is the best one, or within 1e-4 of it (Equality, in CONTRIBUTING)."""
    ids = prompt + tokens
    logits = np.asarray(WHOLE(jnp.asarray([ids + [0] * (LONGEST - len(ids))], jnp.int32)))
    return all(logits[len(prompt) + i - 1][t] >= logits[len(prompt) + i - 1].max() - 1e-4 for i, t in enumerate(tokens))


def test_lengths_change_every_step_and_each_bucket_compiles_once() -> None:
    """100 steps in which sequences cross pages, end and are replaced, in two buckets: over 200 different lengths.

    [pytorch/xla 8797]
    """
    state = fresh()
    waiting = prompts((3, 60, 127, 130, 62, 1, 200, 5, 90, 33))
    before, lengths = decode_step._cache_size(), set()
    for i in range(100):
        for slot in range(4):
            if waiting and int(state.status[slot]) not in (Status.RUNNING,):
                state = filled(state, {slot: waiting.pop()}, new=20 + 7 * slot)
        lengths |= {(s, int(n)) for s, n in enumerate(state.pool.kv_lens)}
        state, _ = step(state, [0, 1, 2, 3] if i % 3 else [2, 8])
    assert state.pool.check()
    assert len(lengths) > 200
    assert decode_step._cache_size() == before + 2


def test_no_host_callback_in_the_step() -> None:
    state = fresh()
    slots = np.arange(2, dtype=np.int32)
    for greedy in (True, False):
        jaxpr = jax.make_jaxpr(lambda p, s, g=greedy: decode_step(p, s, slots, config=TINY, greedy=g))(PARAMS, state)
        assert "callback" not in str(jaxpr)


def test_no_foreign_byte_is_read() -> None:
    """Every cache byte is NaN before the prompts are written; texts are those of whole forward passes."""
    wanted = prompts((3, 60, 127, 1))
    state, tokens = run(filled(fresh(), dict(enumerate(wanted))), [0, 1, 2, 3], 70)
    for prompt, text in zip(wanted, tokens.tolist(), strict=True):
        assert near_ties(prompt, text)
    assert state.pool.check()


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 8], [2, 0, 8, 1], [8, 8, 0, 1, 2, 8, 8, 8]])
def test_three_requests_in_any_bucket(order: list[int]) -> None:
    """Buckets of 4 and 8 with padding anywhere give what a bucket of 3 gives [sglang 5516]."""
    wanted = prompts((64, 5, 130))
    state, tokens = run(filled(fresh(), dict(enumerate(wanted))), order, 40)
    for row, slot in enumerate(order):
        if slot == 8:
            assert (tokens[row] == -1).all()
        else:
            assert near_ties(wanted[slot], tokens[row].tolist())
    assert state.pool.check() and int(state.pool.num_live) == sum(-(-(len(p) - 1 + 40) // 64) for p in wanted)


def test_padding_changes_nothing_but_the_reserved_page() -> None:
    state = fresh()
    state, emitted = step(state, [0, 8, 2, 8])
    assert emitted.tokens.tolist() == [[-1]] * 4
    assert emitted.status.tolist() == [Status.EMPTY] * 4
    assert int(state.pool.num_live) == 0 and state.status.tolist() == [Status.EMPTY] * SLOTS
    for layer in state.cache.layers:
        assert np.isnan(layer[1:]).all()


def test_slots_that_are_not_named_rest() -> None:
    wanted = prompts((64, 5))
    state = filled(fresh(), {0: wanted[0], 3: wanted[1]})
    before = state.pool.kv_lens.tolist()
    state, tokens = run(state, [3], 3)
    assert state.pool.kv_lens.tolist() == [*before[:3], before[3] + 3, *before[4:]]
    state, more = run(state, [0, 3], 3)
    assert near_ties(wanted[1], tokens[0].tolist() + more[1].tolist()) and near_ties(wanted[0], more[0].tolist())


def test_replay_with_other_lengths_is_bitwise_that_of_a_fresh_run() -> None:
    """Compiled with lengths [64, 64], replayed with [250, 1] [vllm 36611]."""
    short, long = prompts((64, 64)), prompts((250, 1), seed=2)
    slots = np.arange(2, dtype=np.int32)
    state = filled(fresh(), dict(enumerate(short)))
    compiled = decode_step.lower(PARAMS, state, slots, config=TINY, greedy=True).compile()
    compiled(PARAMS, state, slots)
    results = []
    for first in (short, None):
        state = fresh()
        if first is not None:  # the executable has run with those before
            state = filled(state, dict(enumerate(first)))
            state, _ = compiled(PARAMS, state, slots)
            state = cancel(state, np.ones(SLOTS, bool))
        state = filled(state, dict(enumerate(long)))
        rows = []
        for _ in range(20):
            state, emitted = compiled(PARAMS, state, slots)
            rows.append(np.asarray(emitted.tokens))
        owned = [
            np.asarray(
                state.cache.gather(1, state.pool.block_table, np.arange(20, dtype=np.int32)[None].repeat(SLOTS, 0))
            )
        ]
        results.append((np.stack(rows), owned[0]))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_stop_and_length_end_a_slot_and_free_its_pages() -> None:
    prompt = prompts((63,))[0]
    _, tokens = run(filled(fresh(), {0: prompt}), [0], 8)
    stop = int(tokens[0][4])
    first = tokens[0].tolist().index(stop)
    state, stopped = run(filled(fresh(), {0: prompt}, stop=stop), [0], 8)
    assert stopped[0].tolist() == [*tokens[0][: first + 1].tolist(), *[-1] * (7 - first)]
    assert state.status[0] == Status.STOP and int(state.pool.num_live) == 0
    state, cut = run(filled(fresh(), {0: prompt}, new=3), [0], 8)
    assert cut[0].tolist() == [*tokens[0][:3].tolist(), *[-1] * 5]
    assert state.status[0] == Status.LENGTH and int(state.pool.num_live) == 0


def test_a_pool_that_runs_dry_in_a_step_ends_one_slot_and_nothing_else() -> None:
    wanted = prompts((64, 64))
    state = filled(fresh(3), dict(enumerate(wanted)))
    state, emitted = step(state, [0, 1])  # both need no page yet
    state, emitted = step(state, [0, 1])  # both need one, and there is one
    assert emitted.status.tolist() == [Status.RUNNING, Status.PAGES]
    assert emitted.tokens[1].tolist() == [-1]
    assert state.pool.check() and int(state.pool.num_free) == 1
    state, more = run(state, [0, 1], 5)
    assert (more[0] >= 0).all() and (more[1] == -1).all()


def test_an_entry_that_does_not_fit_ends_at_once_and_holds_nothing() -> None:
    state = filled(fresh(2), {0: prompts((70,))[0]})
    state = enter(state, np.int32(1), entry(prompts((10,))[0]))
    assert Status(int(state.status[1])) == Status.PAGES
    # A shared prefix that is no longer there may not be taken for filled either.
    state = cancel(state, np.arange(SLOTS) == 0)
    state = enter(state, np.int32(2), entry(prompts((100,))[0], source=0, shared=69))
    assert Status(int(state.status[2])) == Status.PAGES
    assert int(state.pool.num_free) == 2 and state.pool.check()


def test_a_shared_prefix_outlives_its_first_owner() -> None:
    """The source is cancelled while the fork still reads its pages, and others take what is free [sglang 38355]."""
    common = prompts((130,))[0]
    wanted = common + prompts((9,), seed=3)[0]
    state = filled(fresh(8), {0: [*common, 1]})
    state = enter(state, np.int32(1), entry(wanted, source=0, shared=130))
    assert int(state.pool.num_free) == 4  # two full pages shared, a partial one each
    state = cancel(state, np.arange(SLOTS) == 0)
    state = filled(state, {2: prompts((200,), seed=4)[0]})
    rest = np.zeros((1, 16), np.int32)
    rest[0, :8] = wanted[130:-1]
    state = prefill_step(
        PARAMS, state, np.array([1], np.int32), rest, np.array([8], np.int32), np.array([130], np.int32), config=TINY
    )
    state, tokens = run(state, [1, 2], 20)
    assert near_ties(wanted, tokens[0].tolist())
