"""`PagePool` against a plain-Python model, and the faults that page allocators are known for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from pool_model import PoolModel, assert_one_sentence, assert_same_pages

from mla_jax import PagedKVCache, PagePool

# One small shape for the whole state machine, so that nothing recompiles; too few pages for all slots, so
# that extends are refused often.
NUM_PAGES, SLOTS, WIDTH, PAGE = 12, 4, 5, 4
ROOM = WIDTH * PAGE
DRAFT = 7


def fill_unowned(pool: PagePool, cache: PagedKVCache) -> PagedKVCache:
    """NaN in every row that no sequence owns."""
    positions = jnp.broadcast_to(jnp.arange(ROOM, dtype=jnp.int32), (SLOTS, ROOM))
    owned = jnp.zeros((NUM_PAGES, PAGE), bool)
    pages = jnp.repeat(pool.block_table, PAGE, axis=1)
    pages = jnp.where(positions < pool.kv_lens[:, None], pages, NUM_PAGES)
    owned = owned.at[pages, positions % PAGE].set(True, mode="drop")
    layers = tuple(jnp.where(owned[..., None], layer, jnp.nan) for layer in cache.layers)
    return PagedKVCache(layers, cache.format)


def write_tokens(pool: PagePool, cache: PagedKVCache, before, tokens) -> PagedKVCache:
    """Tokens `[N, ROOM]` into rows before … kv_lens of every sequence; layer 1 gets their negatives."""
    positions = before[:, None] + jnp.arange(ROOM, dtype=jnp.int32)[None]
    valid = positions < pool.kv_lens[:, None]
    latents = tokens[..., None]
    cache = cache.write(0, pool.block_table, positions, latents, valid)
    return cache.write(1, pool.block_table, positions, -latents, valid)


@partial(jax.jit, donate_argnums=1)
def extend_step(pool, cache, new_lens, tokens):
    after, ok = pool.extend(new_lens)
    cache = cache.copy_on_write(pool, after)
    return after, fill_unowned(after, write_tokens(after, cache, pool.kv_lens, tokens)), ok


@partial(jax.jit, donate_argnums=1)
def truncate_step(pool, cache, new_lens):
    pool = pool.truncate(new_lens)
    return pool, fill_unowned(pool, cache)


@partial(jax.jit, donate_argnums=1)
def release_step(pool, cache, mask):
    pool = pool.release(mask)
    return pool, fill_unowned(pool, cache)


@partial(jax.jit, donate_argnums=1)
def fork_step(pool, cache, src, dst, length):
    pool, ok = pool.fork(src, dst, length)
    cache = cache.fork(pool, src, dst, length, ok)
    return pool, fill_unowned(pool, cache), ok


@partial(jax.jit, donate_argnums=1)
def keep_step(pool, cache, before, source, destination, valid, new_lens):
    cache = cache.move_rows(pool.block_table, source, destination, valid)
    return truncate_step(pool, cache, new_lens)


@jax.jit
def read_all(pool, cache):
    positions = jnp.broadcast_to(jnp.arange(ROOM, dtype=jnp.int32), (SLOTS, ROOM))
    return tuple(cache.gather(layer, pool.block_table, positions)[..., 0] for layer in (0, 1))


LENGTHS = st.integers(-1, ROOM + 2)
DRAFTS = st.lists(st.booleans(), min_size=DRAFT, max_size=DRAFT)


def per_slot(strategy):
    return st.lists(strategy, min_size=SLOTS, max_size=SLOTS)


class PoolMachine(RuleBasedStateMachine):
    """Every operation on pool, cache and model; every sequence must read its own history."""

    operations = 0

    def __init__(self):
        super().__init__()
        self.pool = PagePool.create(NUM_PAGES, SLOTS, WIDTH, PAGE)
        cache = PagedKVCache.create(2, NUM_PAGES, 1, "fp32", PAGE)
        self.cache = fill_unowned(self.pool, cache)
        self.model = PoolModel(NUM_PAGES, SLOTS, WIDTH, PAGE)

    def extend_to(self, new_lens):
        before, table = self.model.lens, np.asarray(self.pool.block_table)
        expected = self.model.extend(new_lens)
        tokens = np.zeros((SLOTS, ROOM), np.float32)
        for slot, seq in enumerate(self.model.seqs):
            new = seq.history[before[slot] :]
            tokens[slot, : len(new)] = new
        self.pool, self.cache, ok = extend_step(self.pool, self.cache, np.int32(new_lens), tokens)
        assert np.asarray(ok).tolist() == expected
        refused = ~np.array(expected)
        np.testing.assert_array_equal(np.asarray(self.pool.block_table)[refused], table[refused])
        return before

    @rule(steps=per_slot(st.integers(-1, 9)))
    def extend(self, steps):
        self.extend_to([n + step for n, step in zip(self.model.lens, steps, strict=True)])

    @rule(new_lens=per_slot(LENGTHS))
    def extend_anywhere(self, new_lens):
        self.extend_to(new_lens)

    @rule(new_lens=per_slot(LENGTHS))
    def truncate(self, new_lens):
        self.model.truncate(new_lens)
        self.pool, self.cache = truncate_step(self.pool, self.cache, np.int32(new_lens))

    @rule(cuts=per_slot(st.integers(0, 3)))
    def cut_a_little(self, cuts):
        self.truncate([n - cut for n, cut in zip(self.model.lens, cuts, strict=True)])

    @rule(mask=per_slot(st.booleans()))
    def release(self, mask):
        self.model.release(mask)
        self.pool, self.cache = release_step(self.pool, self.cache, np.array(mask))

    @rule(src=st.integers(-1, SLOTS), dst=st.integers(-1, SLOTS), length=LENGTHS)
    def fork(self, src, dst, length):
        expected = self.model.fork(src, dst, length)
        self.pool, self.cache, ok = fork_step(self.pool, self.cache, *np.int32([src, dst, length]))
        assert bool(ok) == expected

    @rule(data=st.data(), src=st.integers(0, SLOTS - 1), cut=st.integers(0, 3))
    def fork_into_an_empty_slot(self, data, src, cut):
        empty = [slot for slot, n in enumerate(self.model.lens) if n == 0]
        if empty:
            self.fork(src, data.draw(st.sampled_from(empty)), max(self.model.lens[src] - cut, 0))

    @rule(drafts=per_slot(DRAFTS))
    def speculate(self, drafts):
        """Seven draft rows per sequence, of which any subset is kept, as after the verification of a tree."""
        before = self.extend_to([n + DRAFT for n in self.model.lens])
        grown = [n > b for n, b in zip(self.model.lens, before, strict=True)]
        accepted = [[i for i, kept in enumerate(draft) if kept and g] for draft, g in zip(drafts, grown, strict=True)]
        source, destination, valid = (np.zeros((SLOTS, DRAFT), np.int32) for _ in range(3))
        for slot, offsets in enumerate(accepted):
            for i, offset in enumerate(offsets):
                source[slot, i], destination[slot, i] = before[slot] + offset, before[slot] + i
                valid[slot, i] = 1
        self.model.keep(before, accepted)
        self.pool, self.cache = keep_step(
            self.pool, self.cache, np.int32(before), source, destination, valid > 0, np.int32(self.model.lens)
        )

    @invariant()
    def pages_agree_and_everyone_reads_its_own_history(self):
        PoolMachine.operations += 1
        assert_same_pages(self.pool, self.model)
        values, negatives = (np.asarray(x) for x in read_all(self.pool, self.cache))
        for slot, seq in enumerate(self.model.seqs):
            np.testing.assert_array_equal(values[slot, : len(seq.history)], np.float32(seq.history))
            np.testing.assert_array_equal(negatives[slot, : len(seq.history)], -np.float32(seq.history))

    def teardown(self):
        self.release([True] * SLOTS)
        assert int(self.pool.num_free) == NUM_PAGES - 1
        assert self.pool.check() and not np.asarray(self.pool.block_table).any()


def run_machine(operations: int, steps: int) -> None:
    PoolMachine.operations = 0
    once = settings(
        max_examples=max(operations // (5 * steps), 1),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    while PoolMachine.operations < operations:  # hypothesis ends some examples early, how many differs
        run_state_machine_as_test(PoolMachine, settings=once)
    # a change of values alone has compiled nothing
    assert extend_step._cache_size() == truncate_step._cache_size() == fork_step._cache_size() == 1


@pytest.mark.timeout(900)  # a failure is shrunk, which takes minutes
def test_random_operations_agree_with_the_model():
    run_machine(operations=3000, steps=50)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_operations_agree_with_the_model():
    run_machine(operations=100_000, steps=100)


def lens_of(*lens):
    return jnp.array(lens, jnp.int32)


def grown(pool: PagePool, *lens) -> PagePool:
    pool, ok = pool.extend(lens_of(*lens))
    assert ok.all()
    return pool


@pytest.mark.parametrize("kept", (1, 2, 3, 4))
@pytest.mark.parametrize("length", range(60, 69))
def test_page_is_freed_iff_it_starts_past_what_was_kept(length, kept):
    pool = grown(grown(PagePool.create(8, 2, 4), length, 0), length + 4, 0)
    held = np.asarray(pool.block_table[0])
    pool = pool.truncate(lens_of(length + kept, 0))
    for page, page_id in enumerate(held):
        freed = page_id > 0 and pool.owners[page_id] == 0
        assert freed == (page_id > 0 and page * 64 >= length + kept)
    assert pool.check()
    pool = pool.release(jnp.array([True, False]))
    assert pool.num_free == 7


@pytest.mark.parametrize("length", (62, 63, 64))
def test_memory_stays_when_a_hundred_rounds_reject_everything(length):
    pool = start = grown(PagePool.create(8, 1, 4), length)
    for _ in range(100):
        pool = grown(pool, length + 4).truncate(lens_of(length))
        assert pool.num_live == start.num_live
    assert pool.check()
    for kept in range(1, 101):  # only the root of each draft is kept
        pool = grown(pool, length + kept + 3).truncate(lens_of(length + kept))
        assert pool.num_live == -(-(length + kept) // 64)
    assert pool.check() and pool.release(jnp.array([True])).num_free == 7


def test_pool_does_not_shrink_over_many_speculating_requests():
    pool = PagePool.create(3, 1, 2)  # two pages: one lost page and the second request is refused
    for _ in range(20):
        pool = grown(pool, 62)
        pool = grown(pool, 66).truncate(lens_of(63))
        assert pool.num_live == 1
        pool = pool.release(jnp.array([True]))
        assert pool.num_free == 2 and pool.check()


def test_shared_prefix_outlives_the_owner_that_freed_it():
    pool = grown(PagePool.create(5, 3, 3), 130, 0, 0)
    prefix = pool.block_table[0, :2]
    pool, ok = pool.fork(0, 1, 128)
    assert ok and pool.num_live == 3
    pool = pool.release(jnp.array([True, False, False]))
    assert pool.num_live == 2 and (pool.block_table[1, :2] == prefix).all()
    pool = grown(pool, 0, 128, 128)  # takes every page that is left
    assert pool.num_free == 0 and pool.check()
    assert not np.isin(np.asarray(pool.block_table[2]), np.asarray(prefix)).any()
    pool = pool.release(jnp.array([False, True, True]))
    assert pool.num_free == 4 and pool.check()


def test_two_requests_that_keep_one_and_three_in_the_same_step():
    pool = grown(grown(PagePool.create(8, 2, 2), 62, 62), 66, 66).truncate(lens_of(63, 65))
    assert pool.kv_lens.tolist() == [63, 65]
    assert ((pool.block_table > 0).sum(axis=1) == jnp.array([1, 2])).all()
    assert pool.num_live == 3 and pool.check()


def test_exhausted_in_the_middle_of_a_step_nothing_is_lost():
    pool = grown(PagePool.create(5, 3, 4), 64, 64, 64)
    after, ok = pool.extend(lens_of(129, 65, 66))  # needs 2, 1, 1 pages and one is free
    assert ok.tolist() == [False, True, False]
    assert after.kv_lens.tolist() == [64, 65, 64] and after.num_free == 0 and after.check()
    np.testing.assert_array_equal(after.block_table[jnp.array([0, 2])], pool.block_table[jnp.array([0, 2])])
    again, ok = after.extend(lens_of(64, 65, 66))
    assert ok.tolist() == [True, True, False]
    again = grown(again.release(jnp.array([False, True, False])), 64, 0, 66)
    assert again.num_free == 1 and again.check()


def test_a_request_that_is_too_large_starves_nobody():
    pool, ok = PagePool.create(6, 4, 5).extend(lens_of(320, 64, 64, 128))
    assert ok.tolist() == [False, True, True, True]
    pool, ok = PagePool.create(6, 4, 4).extend(lens_of(257, 64, 64, 128))  # does not fit its table at all
    assert ok.tolist() == [False, True, True, True] and pool.num_live == 4


def test_a_request_that_is_refused_takes_no_page_from_the_others():
    pool = grown(PagePool.create(6, 2, 4), 256, 0)
    pool, ok = pool.extend(lens_of(257, 64))  # slot 0 needs one page more, which its table cannot hold
    assert ok.tolist() == [False, True] and pool.num_free == 0 and pool.check()


def test_equal_needs_are_served_by_slot():
    pool, ok = PagePool.create(3, 4, 2).extend(lens_of(0, 64, 64, 64))
    assert ok.tolist() == [True, True, True, False] and pool.check()


@pytest.mark.parametrize("wanted", (-1, -(2**31), 2**31 - 64, 2**31 - 1, 129))
def test_lengths_that_no_table_can_hold_are_refused(wanted):
    start = grown(PagePool.create(8, 2, 2), 3, 3)
    pool, ok = start.extend(lens_of(wanted, 100))
    assert ok.tolist() == [False, True] and pool.kv_lens.tolist() == [3, 100] and pool.check()


def test_cut_inside_a_shared_page_then_grown_gives_each_its_own_page():
    pool = grown(PagePool.create(6, 3, 3), 128, 0, 0)
    pool, ok = pool.fork(0, 1, 128)
    pool = pool.truncate(lens_of(70, 70, 0))
    shared = pool.block_table[0, 1]
    assert ok and pool.owners[shared] == 2
    still, ok = pool.extend(lens_of(70, 70, 0))  # nobody grows: nothing to copy
    assert ok.all() and still.num_live == 2
    pool = grown(pool, 71, 71, 0)  # both leave it in one step
    assert pool.owners[shared] == 0 and pool.num_live == 3 and pool.check()
    assert pool.block_table[0, 1] != pool.block_table[1, 1]


def test_fork_refusals_change_nothing():
    pool = grown(PagePool.create(4, 3, 3), 70, 0, 64)
    bad_slots, bad_lengths = ((0, 2, 64), (0, 0, 10), (0, 3, 10), (-1, 1, 10)), ((0, 1, 71), (0, 1, -1))
    for src, dst, length in (*bad_slots, *bad_lengths, (0, 1, 70)):  # the last finds no page for rows 64 … 69
        after, ok = pool.fork(src, dst, length)
        assert not ok
        for mine, theirs in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    after, ok = pool.fork(0, 1, 64)  # full pages need no free one
    assert ok and after.num_free == 0 and after.check()


@pytest.mark.parametrize("arguments", ((0, 1, 69.5), (0.0, 1, 3), (0, np.int32([1, 2]), 3)), ids=str)
def test_fork_of_what_is_no_whole_number_is_one_sentence(arguments):
    with pytest.raises(ValueError, match=r"PagePool\.fork") as error:
        PagePool.create(4, 3, 3).fork(*arguments)
    assert_one_sentence(str(error.value))


def test_release_of_an_empty_slot_frees_nothing():
    pool = grown(PagePool.create(4, 2, 2), 65, 0)
    assert pool.release(jnp.array([False, True])).num_live == 2


def test_check_names_faults():
    good = grown(PagePool.create(4, 2, 2), 65, 0)
    faults = {
        "owned as counted": {"owners": good.owners.at[3].set(1)},
        "past a length": {"block_table": good.block_table.at[1, 1].set(3)},
        "reserved page 0": {"block_table": good.block_table.at[0, 1].set(0)},
        "outside its table": {"kv_lens": good.kv_lens.at[0].set(129)},
        "two owners": {"block_table": good.block_table.at[0, 1].set(good.block_table[0, 0])},
    }
    for changed in faults.values():
        fields = {"block_table": good.block_table, "kv_lens": good.kv_lens, "owners": good.owners} | changed
        with pytest.raises(ValueError, match=r"PagePool\.check") as error:
            PagePool(**fields).check()
        assert_one_sentence(str(error.value))


def test_lengths_that_change_compile_once():
    step = jax.jit(lambda pool, lens: pool.extend(lens))
    pool = PagePool.create(64, 3, 16)
    rng = np.random.default_rng(5)
    for _ in range(20):
        pool, _ = step(pool, jnp.asarray(np.asarray(pool.kv_lens) + rng.integers(0, 70, 3), jnp.int32))
        pool = pool.truncate(jnp.asarray(rng.integers(0, 900, 3), jnp.int32))
    assert step._cache_size() == 1


def test_nothing_leaves_the_device():
    pool, lens, one = PagePool.create(8, 2, 4), lens_of(1, 2), jnp.int32(1)
    traces = (
        jax.make_jaxpr(PagePool.extend)(pool, lens),
        jax.make_jaxpr(PagePool.truncate)(pool, lens),
        jax.make_jaxpr(PagePool.release)(pool, lens > 1),
        jax.make_jaxpr(PagePool.fork)(pool, one, one, one),
        jax.make_jaxpr(lambda p: (p.num_free, p.num_live))(pool),
    )
    for trace in traces:
        assert "callback" not in str(trace) and "while" not in str(trace)


def test_fields_stay_int32():
    for wide in (False, True):
        with jax.enable_x64(wide):
            pool, ok = PagePool.create(8, 2, 4).extend(np.int32([70, 3]))
            pool, forked = pool.truncate(np.int32([65, 0])).fork(0, 1, 10)
            assert ok.all() and forked
            assert {leaf.dtype.name for leaf in jax.tree.leaves(pool)} == {"int32"}
            assert pool.num_free.dtype == pool.num_live.dtype == jnp.int32


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((1, 2, 3), "num_pages"), ((0, 2, 3), "num_pages"), ((-5, 2, 3), "num_pages"),
        ((4, 0, 3), "max_seqs"), ((4, 2, 0), "max_pages_per_seq"), ((4, 2, 3, 0), "page_size"),
        ((4.0, 2, 3), "num_pages"), ((4, "2", 3), "max_seqs"),
    ],
)  # fmt: skip
def test_bad_sizes_are_one_sentence(sizes, named):
    with pytest.raises(ValueError, match=named) as error:
        PagePool.create(*sizes)
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(
    "lens",
    (np.int32([1]), np.int32([1, 2, 3]), np.int32(1), np.float32([1, 2]), [1, 2], np.array([True, False])),
    ids=("too short", "too long", "a scalar", "floats", "a list", "bools"),
)
def test_bad_lengths_are_one_sentence(lens):
    pool = PagePool.create(4, 2, 3)
    for method in (pool.extend, pool.truncate):
        with pytest.raises(ValueError, match="new_lens") as error:
            method(lens)
        assert_one_sentence(str(error.value))


@pytest.mark.parametrize("mask", (np.array([True]), np.int32([1, 0]), True), ids=("short", "ints", "scalar"))
def test_bad_mask_is_one_sentence(mask):
    with pytest.raises(ValueError, match="mask") as error:
        PagePool.create(4, 2, 3).release(mask)
    assert_one_sentence(str(error.value))
