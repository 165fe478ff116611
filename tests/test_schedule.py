"""The schedule against the CUDA scheduler's own output, and against a walk in plain Python."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.schedule import ORDERS, num_sm_parts, tile_schedule

GOLDEN = np.load(pathlib.Path(__file__).parent / "data" / "golden_metadata.npz")
NAMES = sorted({key.split("/")[0] for key in GOLDEN.files})


# Shapes are many here, lengths few: compile fast.
COMPILE_FAST = {"xla_backend_optimization_level": 0}
fast_schedule = jax.jit(
    lambda kv_lens, parts, order="2026-01": tile_schedule(kv_lens, parts, order=order),
    static_argnums=(1, 2),
    compiler_options=COMPILE_FAST,
)


def walk(lens, parts, *, empty_blocks, overhead=5):
    """Rows (begin_req, end_req, begin_block, end_block, begin_split) and num_splits, request by request."""
    lens = [int(n) for n in lens]
    blocks = [max(n - 1, 0) // 64 + 1 if n else empty_blocks for n in lens]
    payload = -(-sum(n + overhead for n in blocks) // parts) + overhead
    rows, num_splits = [], [0]
    req = block = split = 0
    for _ in range(parts):
        begin, room = (req, block, split), payload
        while req < len(lens):
            left = blocks[req] - block
            if room < left + overhead:
                if room > overhead:
                    block, split = block + room - overhead, split + 1
                break
            room -= left + overhead
            num_splits.append(num_splits[-1] + split + 1)
            req, block, split = req + 1, 0, 0
        end_req = req if block else req - 1
        end_block = block or (blocks[end_req] if lens[end_req] else 0)
        rows.append((begin[0], end_req, begin[1], end_block, begin[2]))
    assert req == len(lens)
    return np.array(rows), np.array(num_splits)


def assert_rows(got, want, batch):
    """Equal in begin_req, and in all columns where the part has work."""
    np.testing.assert_array_equal(got[:, 0], want[:, 0])
    live = want[:, 0] < batch
    np.testing.assert_array_equal(got[live], want[live])


# Nearly every problem is a compilation, so the short version takes a ninth of them.
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["dense", "dense_fp8"])
def test_equals_cuda_scheduler(kind, step):
    names = [n for n in NAMES if str(GOLDEN[f"{n}/kind"]) == kind]
    assert len(names) == {"dense": 108, "dense_fp8": 12}[kind]
    names = names[::step]
    order, meaning = ("2026-01", np.r_[0:7]) if kind == "dense" else ("2025-02", np.r_[0:5])  # the others are padding
    for name in names:
        lens, want = GOLDEN[f"{name}/cache_seqlens"], GOLDEN[f"{name}/tile_scheduler_metadata"]
        heads, tokens = int(GOLDEN[f"{name}/num_heads_q"]), int(GOLDEN[f"{name}/seq_len_q"])
        parts = num_sm_parts(132, tokens, heads)
        assert parts == want.shape[0]
        got = fast_schedule(jnp.asarray(lens), parts, order)
        np.testing.assert_array_equal(got.num_splits, GOLDEN[f"{name}/num_splits"])
        assert_rows(np.asarray(got.metadata)[:, meaning], want[:, meaning], len(lens))


@pytest.mark.parametrize("overhead", [1, 4, 9])
def test_other_overheads(overhead):
    rng = np.random.default_rng(overhead)
    make = jax.jit(lambda kv_lens: tile_schedule(kv_lens, 66, request_overhead=overhead), compiler_options=COMPILE_FAST)
    for longest in (0, 1, 64, 300, 1000, 5000, 100_000) * 5:
        lens = rng.integers(0, longest + 1, 16).astype(np.int32)
        got, (rows, num_splits) = make(jnp.asarray(lens)), walk(lens, 66, empty_blocks=1, overhead=overhead)
        np.testing.assert_array_equal(got.num_splits, num_splits)
        assert_rows(np.asarray(got.metadata)[:, :5], rows, len(lens))


@pytest.mark.parametrize("batch", [1, 5, 128, 4096])
def test_equals_plain_walk(batch):
    rng = np.random.default_rng(batch)
    for parts in (1, 132) if batch == 4096 else (1, 7, 66, 132):
        for longest in (0, 64, 100_000) if batch == 4096 else (0, 1, 64, 300, 1000, 5000, 20_000, 100_000) * 11:
            lens = rng.integers(0, longest + 1, batch).astype(np.int32)
            rows, num_splits = walk(lens, parts, empty_blocks=1)
            got = fast_schedule(jnp.asarray(lens), parts)
            np.testing.assert_array_equal(got.num_splits, num_splits)
            assert_rows(np.asarray(got.metadata)[:, :5], rows, batch)
            assert int(got.num_splits[-1]) <= batch + parts

            rows, num_splits = walk(lens, parts, empty_blocks=0)
            end_token = np.minimum(rows[:, 3] * 64, lens[rows[:, 1]])
            tokens = np.stack([rows[:, 0], rows[:, 2] * 64, rows[:, 1], end_token, rows[:, 4]], axis=1)
            got = fast_schedule(jnp.asarray(lens), parts, "2025-02")
            np.testing.assert_array_equal(got.num_splits, num_splits)
            assert_rows(np.asarray(got.metadata)[:, :5], tokens, batch)


def test_order_of_2025_09_is_that_of_2026_01_with_other_columns():
    lens = jnp.asarray(np.random.default_rng(0).integers(0, 3000, 37), jnp.int32)
    new, old = (tile_schedule(lens, 66, order=order) for order in ("2026-01", "2025-09"))
    np.testing.assert_array_equal(old.metadata[:, :5], new.metadata[:, jnp.array([0, 2, 1, 3, 4])])
    assert not np.asarray(old.metadata[:, 5:]).any()
    np.testing.assert_array_equal(old.num_splits, new.num_splits)


def test_a_stale_schedule_is_named():
    lens = jnp.asarray([64, 64, 9], jnp.int32)
    schedule = jax.jit(tile_schedule, static_argnums=1)(lens, 4)
    assert schedule.check(lens)
    with pytest.raises(ValueError, match=r"made when request 1 had 64 tokens, used when it has 65 \(1 of 3"):
        schedule.check(lens.at[1].add(1))
    with pytest.raises(ValueError, match="made for 3 requests, used for 2"):
        schedule.check(lens[:2])


@pytest.mark.parametrize("lens", [[5, 900], [0, 0], [1, 1]])
def test_more_parts_than_work(lens):
    """b = 2 on 132 parts [vllm 21691]: every block is computed once, and parts without work say so."""
    rows, num_splits = walk(lens, 132, empty_blocks=1)
    got = tile_schedule(jnp.asarray(lens, jnp.int32), 132)
    np.testing.assert_array_equal(got.num_splits, num_splits)
    assert_rows(np.asarray(got.metadata)[:, :5], rows, 2)
    assert (np.asarray(got.metadata)[-100:, 0] == 2).all()


def test_one_compilation_serves_all_lengths():
    made = jax.jit(lambda lens: tile_schedule(lens, 132))
    for n in (0, 1, 64, 65, 4096):
        made(jnp.full(8, n, jnp.int32))
    assert made._cache_size() == 1
    assert "callback" not in str(jax.make_jaxpr(made)(jnp.zeros(8, jnp.int32)))


def test_num_sm_parts():
    got = [num_sm_parts(132, s, h) for h, s in ((128, 1), (128, 2), (128, 4), (64, 1), (64, 2), (16, 1))]
    assert got == [66, 33, 16, 132, 66, 132]
    assert num_sm_parts(132, 70 * 1024, 128) == 1  # more rows than all SMs hold at once [FlashMLA 28]


def test_wrong_calls_say_what_came():
    with pytest.raises(ValueError, match=r"must be int32 .*, got float32"):
        tile_schedule(jnp.zeros(3), 4)
    with pytest.raises(ValueError, match=r"must be int32 .*, got int32 \(2, 3\)"):
        tile_schedule(jnp.zeros((2, 3), jnp.int32), 4)
    with pytest.raises(ValueError, match="num_sm_parts must be a whole number of at least 1, got 0"):
        tile_schedule(jnp.zeros(3, jnp.int32), 0)
    with pytest.raises(ValueError, match="array of int32, got list"):
        tile_schedule([1, 2], 4)
    with pytest.raises(ValueError, match="num_heads_q must be a whole number of at least 1, got 0"):
        num_sm_parts(132, 1, 0)
    with pytest.raises(ValueError, match=r"num_sm_parts must be a whole number of at least 1, got 2\.5"):
        tile_schedule(jnp.zeros(3, jnp.int32), 2.5)
    with pytest.raises(ValueError, match="multiple of num_heads_kv, got 1 and 2"):
        num_sm_parts(132, 1, 1, 2)
    with pytest.raises(ValueError, match="order '2024' is not known; choose from 2026-01, 2025-09, 2025-02"):
        tile_schedule(jnp.zeros(3, jnp.int32), 4, order="2024")


@pytest.mark.parametrize("number", [2**20 + 1, 2**31, 10**30, np.uint64(2**63)])
def test_numbers_out_of_range(number):
    lens = jnp.asarray([130, 4096, 70], jnp.int32)
    with pytest.raises(ValueError, match="at most 1048576"):
        tile_schedule(lens, 4, request_overhead=number)
    with pytest.raises(ValueError, match="at most 1048576"):
        tile_schedule(lens, number)


def test_overheads_that_add_up_to_too_much():
    with pytest.raises(ValueError, match="leaves the range of int32"):
        tile_schedule(jnp.ones(2048, jnp.int32), 4, request_overhead=2**20)


@pytest.mark.parametrize("order", ORDERS)
def test_64_bit_mode_changes_nothing(order):
    lens = jnp.asarray([70, 0, 64, 1000], jnp.int32)
    want = tile_schedule(lens, 7, order=order)
    with jax.enable_x64(True):
        got = tile_schedule(lens, 7, order=order)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype == jnp.int32 and (a == b).all()


@pytest.mark.parametrize("order", ["2026-01", "2025-02"])
def test_lengths_near_the_largest_int32(order):
    schedule = tile_schedule(jnp.asarray([2**31 - 1], jnp.int32), 2, order=order)
    assert (schedule.metadata >= 0).all() and (schedule.num_splits == jnp.asarray([0, 2])).all()
