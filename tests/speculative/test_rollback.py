"""Reserve, write, keep, truncate: pool and cache against the plain-Python model, without a transformer."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.speculative.accept import Accepted
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.verify import gather_kept, reserve
from tests.cache.pool_model import PoolModel, assert_same_pages

SLOTS, WIDTH = 32, 5
ROUNDS = 400  # 10 000 in the long version
SIZES = [(3, 1, 4), (5, 1, 6), (3, 4, 8), (5, 8, 16)]

grow = jax.jit(reserve, static_argnums=2)


@partial(jax.jit, static_argnums=5)
def commit(pool, cache, before, values, accepted, is_chain):
    """Writes the nodes' rows (their values), keeps the accepted ones and cuts the rest."""
    room = pool.kv_lens - before
    nodes = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    at = before[:, None] + nodes
    cache = cache.write(0, pool.block_table, at, values[..., None], nodes < room[:, None])
    cache = cache.write(1, pool.block_table, at, -values[..., None], nodes < room[:, None])
    if not is_chain:
        cache = gather_kept(cache, pool.block_table, before, accepted)
    kept = jnp.where(room > 0, before + accepted.count, pool.kv_lens)
    return pool.truncate(kept), cache


@jax.jit
def all_rows(pool, cache):
    """[layers, slots, width · 64]: every row that a sequence may hold."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH * 64, dtype=jnp.int32), (pool.kv_lens.shape[0], WIDTH * 64))
    return jnp.stack([cache.gather(layer, pool.block_table, positions)[..., 0] for layer in range(2)])


class Pair:
    """The arrays and the model, changed together."""

    def __init__(self, sizes, pages: int, slots: int = SLOTS, seed: int = 0):
        self.speculation = Speculation(*sizes)
        self.pool = PagePool.create(pages + 1, slots, WIDTH)
        cache = PagedKVCache.create(2, pages + 1, 1, "fp32")
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
        self.model = PoolModel(pages + 1, slots, WIDTH, 64)
        self.rng = np.random.default_rng(seed)
        self.refused = self.narrowed = 0

    def start(self, lens) -> None:
        """Begins sequences of these lengths in empty slots, 0 for none."""
        lens = [a + b for a, b in zip(self.model.lens, lens, strict=True)]
        before = self.model.lens
        ok = self.model.extend(lens)
        self.pool, ours = self.pool.extend(jnp.asarray(lens, jnp.int32))
        assert ours.tolist() == ok
        positions = np.arange(WIDTH * 64, dtype=np.int32)
        values = np.zeros((len(lens), WIDTH * 64), np.float32)
        for row, seq in zip(values, self.model.seqs, strict=True):
            row[: len(seq.history)] = seq.history
        new = (positions >= np.array(before)[:, None]) & (positions < np.array(self.model.lens)[:, None])
        at = np.tile(positions, (len(lens), 1))
        for layer, sign in ((0, 1), (1, -1)):
            rows = jnp.asarray(sign * values)[..., None]
            self.cache = write(self.cache, layer, self.pool.block_table, at, rows, new)

    def release(self, mask) -> None:
        self.model.release(mask)
        self.pool = self.pool.release(jnp.asarray(mask))

    def round(self, paths: list[list[int]] | None = None) -> None:
        """One step of every slot that holds something; paths[slot] are the nodes to keep, else they are drawn."""
        size, before = self.speculation.draft_tokens, self.model.lens
        active = [n > 0 for n in before]
        self.pool, ok, room = grow(self.pool, jnp.asarray(active), size)
        room = np.asarray(room)
        self._grow_model(before, active, size)
        assert room.tolist() == [a - b for a, b in zip(self.model.lens, before, strict=True)]
        assert ok.tolist() == [bool(r) for r in room]
        self.refused += sum(a and not r for a, r in zip(active, room, strict=True))
        self.narrowed += sum(0 < r < size for r in room)

        values = np.full((len(before), size), np.nan, np.float32)
        kept = [[0]] * len(before)
        for slot, (seq, n) in enumerate(zip(self.model.seqs, before, strict=True)):
            values[slot, : room[slot]] = seq.history[n:]
            if room[slot]:
                kept[slot] = self._path(int(room[slot])) if paths is None else paths[slot]
        self.model.keep(before, [k if r else [] for k, r in zip(kept, room, strict=True)])
        path = np.zeros((len(before), self.speculation.most_kept), np.int32)
        for row, nodes in zip(path, kept, strict=True):
            row[: len(nodes)] = nodes
        counts = jnp.asarray([len(nodes) for nodes in kept], jnp.int32)
        accepted = Accepted(jnp.asarray(path), jnp.asarray(path), counts)
        lens = jnp.asarray(before, jnp.int32)
        self.pool, self.cache = commit(
            self.pool, self.cache, lens, jnp.asarray(values), accepted, self.speculation.is_chain
        )

    def _grow_model(self, before, active, size) -> None:
        """Room for a row, and what the pages hold, for each; then for all rows."""
        owned = [self.model.pages_for(n) * 64 for n in before]
        wanted = [min(max(o, n + 1), n + size) if a else n for o, n, a in zip(owned, before, active, strict=True)]
        ok = self.model.extend(wanted)
        wanted = [
            n + size if a and k else now for n, a, k, now in zip(before, active, ok, self.model.lens, strict=True)
        ]
        self.model.extend(wanted)

    def _path(self, room: int) -> list[int]:
        """From the root through random nodes in ascending order (the next ones in a chain), below room."""
        length = int(self.rng.integers(1, self.speculation.most_kept + 1))
        if self.speculation.is_chain:
            return list(range(min(length, room)))
        rest = self.rng.permutation(np.arange(1, room))[: length - 1]
        return [0, *sorted(rest.tolist())]

    def check(self) -> None:
        assert_same_pages(self.pool, self.model)
        rows = np.asarray(all_rows(self.pool, self.cache))
        for slot, seq in enumerate(self.model.seqs):
            for layer, sign in ((0, 1), (1, -1)):
                np.testing.assert_array_equal(rows[layer, slot, : len(seq.history)], sign * np.array(seq.history))


write = jax.jit(PagedKVCache.write, static_argnums=1)


def random_rounds(sizes, rounds: int, pages: int) -> Pair:
    pair = Pair(sizes, pages, seed=rounds)
    for _ in range(rounds):
        rng, lens = pair.rng, np.array(pair.model.lens)
        if pair.model.next_token > 2**23:  # float32 still tells tokens apart
            pair.model.next_token = 1
        ends = (lens > 0) & ((rng.random(SLOTS) < 0.02) | (lens > WIDTH * 64 - 3))
        pair.release(ends.tolist())
        begins = (np.array(pair.model.lens) == 0) & (rng.random(SLOTS) < 0.3)
        pair.start(np.where(begins, rng.integers(1, 200, SLOTS), 0).tolist())
        pair.round()
        pair.check()
    pair.release([True] * SLOTS)
    pair.check()
    assert int(pair.pool.num_free) == pages
    return pair


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(map(str, s)))
def test_random_rounds_equal_the_model(sizes):
    pair = random_rounds(sizes, ROUNDS // len(SIZES), pages=62)
    assert pair.refused and pair.narrowed  # a pool that is nearly full at times


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(map(str, s)))
def test_ten_thousand_rounds_equal_the_model(sizes):
    pair = random_rounds(sizes, 10_000, pages=62)
    assert pair.refused > 100 and pair.narrowed > 100


def test_each_length_and_number_kept_frees_exactly_the_pages_behind_it():
    """Page p is freed iff p · 64 ≥ S + kept, for S in 60 … 68 and 1 … 4 kept [sglang 7112, 9566]."""
    lens = [s for s in range(60, 69) for _ in range(4)]
    kept = [k for _ in range(60, 69) for k in range(1, 5)]
    pair = Pair((3, 1, 4), pages=4 * len(lens), slots=len(lens))
    pair.start(lens)
    pair.round([list(range(k)) for k in kept])
    pair.check()
    held = (np.asarray(pair.pool.block_table) > 0).tolist()
    for s, k, row in zip(lens, kept, held, strict=True):
        assert row == [p * 64 < s + k for p in range(WIDTH)], (s, k)


def test_known_examples_of_the_rule():
    for s, kept, pages in ((62, 1, 1), (62, 2, 1), (62, 3, 2), (63, 1, 1), (64, 1, 2), (126, 2, 2)):
        pair = Pair((3, 1, 4), pages=4, slots=1)
        pair.start([s])
        pair.round([list(range(kept))])
        assert int(pair.pool.num_live) == pages, (s, kept)


def test_pool_does_not_shrink_at_3_1_4():
    """S = 62, 4 nodes, 1 kept, then the request ends, again and again [sglang 6109, 7130, sglang-jax 1147]."""
    pair = Pair((3, 1, 4), pages=2, slots=1)
    for _ in range(5):
        pair.start([62])
        pair.round([[0]])
        assert int(pair.pool.num_live) == 1
        pair.release([True])
        assert int(pair.pool.num_free) == 2
    pair.check()


def test_a_hundred_rounds_that_reject_everything_hold_no_more_than_the_text():
    """From S = 30 over 64 and 128 [sglang 13826]."""
    pair = Pair((3, 4, 8), pages=6, slots=2)
    pair.start([30, 61])
    for _ in range(100):
        pair.round([[0], [0]])
        assert int(pair.pool.num_live) == sum(-(-n // 64) for n in pair.model.lens)
    pair.check()
    assert pair.model.lens == [130, 161]


def test_an_accepted_path_with_gaps_lies_side_by_side():
    """{0, 2, 5} of 7, and another path beside it, over the end of a page [sglang 15360]."""
    pair = Pair((3, 4, 7), pages=6, slots=3)
    pair.start([61, 100, 3])
    pair.round([[0, 2, 5], [0, 1, 2, 6], [0]])
    pair.check()
    assert pair.model.lens == [64, 104, 4]


def test_two_requests_keep_one_and_three_in_the_same_step():
    """[sglang 15790]"""
    pair = Pair((3, 1, 4), pages=4, slots=2)
    pair.start([63, 63])
    pair.round([[0], [0, 1, 2]])
    pair.check()
    assert pair.model.lens == [64, 66] and int(pair.pool.num_live) == 3


def test_a_shared_page_outlives_an_owner_who_drafts_and_ends():
    """[sglang 38355]"""
    pair = Pair((3, 4, 8), pages=8, slots=2)
    pair.start([128, 0])
    assert pair.model.fork(0, 1, 128)
    pair.pool, ok = pair.pool.fork(0, 1, 128)
    pair.cache = pair.cache.fork(pair.pool, 0, 1, 128, ok)
    for paths in ([[0, 3], [0]], [[0], [0, 1, 7]]):
        pair.round(paths)
        pair.check()
    assert int(pair.pool.num_live) == 4  # two shared, one more each
    pair.release([True, False])
    pair.round([[0], [0, 2]])
    pair.check()


def test_a_page_that_one_needs_is_not_taken_for_anothers_draft():
    """One page is free: slot 0 could use it for its draft, slot 1 cannot go on without."""
    pair = Pair((3, 1, 4), pages=3, slots=2)
    pair.start([62, 64])
    pool, ok, room = grow(pair.pool, jnp.asarray([True, True]), 4)
    assert ok.tolist() == [True, True] and room.tolist() == [2, 4]
    assert pool.check()


def test_an_exhausted_pool_refuses_one_and_changes_nothing_of_it():
    pair = Pair((3, 1, 4), pages=3, slots=3)
    pair.start([64, 62, 64])
    before = pair.pool
    pool, ok, room = grow(pair.pool, jnp.asarray([True, True, False]), 4)
    assert ok.tolist() == [False, True, False] and room.tolist() == [0, 2, 0]
    for slot in (0, 2):
        np.testing.assert_array_equal(pool.block_table[slot], before.block_table[slot])
        assert int(pool.kv_lens[slot]) == 64
    assert pool.check()


def test_the_end_of_the_table_narrows_a_draft():
    pair = Pair((3, 1, 4), pages=2 * WIDTH, slots=2)
    full = 64 * WIDTH
    pair.start([full - 3, full])
    _, ok, room = grow(pair.pool, jnp.asarray([True, True]), 4)
    assert ok.tolist() == [True, False] and room.tolist() == [3, 0]


def test_unused_slots_are_left_alone():
    pool = PagePool.create(5, 3, WIDTH)
    pool, _ = pool.extend(jnp.asarray([5, 0, 70], jnp.int32))
    after, ok, room = grow(pool, jnp.asarray([False, False, False]), 4)
    assert not ok.any() and not room.any()
    jax.tree.map(np.testing.assert_array_equal, replace(after), pool)
