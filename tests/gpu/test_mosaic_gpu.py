"""The Hopper kernel on a Hopper GPU, against float64 numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import GOLDEN, Problem, assert_close, golden

from mla_jax import mla_decode
from mla_jax.attention.api import implementation_for, step_schedule
from mla_jax.attention.mosaic_gpu.requirements import cannot_run
from mla_jax.schedule import TileSchedule, num_sm_parts, tile_schedule

ROOM = 8192  # tokens: with the same for all lengths, the grid compiles once per batch, tokens, heads and causality
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
REASON = cannot_run()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
decode = functools.partial(mla_decode, implementation="mosaic_gpu")


def run(problem, schedule=None):
    q, cache, table, lens, mask = problem.arrays()
    out, lse = decode(
        q,
        cache,
        jnp.asarray(table),
        jnp.asarray(lens),
        sm_scale=problem.scale,
        causal=problem.causal,
        tree_mask=None if mask is None else jnp.asarray(mask),
        schedule=schedule,
    )
    assert_close(out, lse, *problem.expected(q, cache, table, lens, mask))
    return out, lse


@pytest.mark.parametrize("heads, tokens", [(16, 1), (128, 1), (16, 4), (128, 2), (9, 2), (3, 1), (63, 1), (126, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ragged_lengths(heads, tokens, dtype):
    run(Problem((*EDGES * 3, 1000, 4097, 513), heads=heads, tokens=tokens, dtype=dtype))


@pytest.mark.parametrize("length, heads", [(8192, 128), (20_000, 16), (700, 64)])
def test_one_request_over_all_parts(length, heads):
    run(Problem((length,), heads=heads))


@pytest.mark.parametrize("heads, tokens", [(16, 4), (128, 2), (4, 32), (2, 70)])
def test_tree_masks(heads, tokens):
    run(Problem((*EDGES, 777), heads=heads, tokens=tokens, tree=True))


@pytest.mark.parametrize("scale", [-0.05, 0.0, 0.135234])
def test_scales(scale):
    run(Problem((0, 65, 300), heads=32, scale=scale))


@pytest.mark.parametrize("power", [-90, 90])
@pytest.mark.parametrize("lens", [(8192,), (8192, 0, 65, 3000)])
def test_pieces_of_numbers_far_from_one(lens, power):
    """A power of two in the values is one in the output, bit for bit, however requests are shared."""
    problem = Problem(lens, heads=128)
    q, cache, table, lens, _ = problem.arrays()
    near, far = jnp.float32(1 / 24), jnp.float32(2.0**-power / 24)
    shared = (jnp.asarray(table), jnp.asarray(lens))
    out, lse = decode(q, cache, *shared, sm_scale=near)
    moved = (cache.astype(jnp.float32) * jnp.float32(2.0**power)).astype(cache.dtype)
    far_out, far_lse = decode(q, moved, *shared, sm_scale=far)
    np.testing.assert_array_equal(np.asarray(far_out, np.float32), np.asarray(out, np.float32) * np.float32(2.0**power))
    np.testing.assert_array_equal(far_lse, lse)


def test_default_on_hopper():
    problem = Problem((300, 65), tokens=2, heads=16)
    q, cache, table, lens, _ = problem.arrays()
    arrays = (q, cache, jnp.asarray(table), jnp.asarray(lens))
    assert implementation_for(None, q, cache) == "mosaic_gpu"
    assert implementation_for(None, q.astype(jnp.float32), cache.astype(jnp.float32)) == "xla"
    schedule = step_schedule(None, q, cache, arrays[3])
    assert isinstance(schedule, TileSchedule)
    for got, want in zip(mla_decode(*arrays, schedule=schedule), decode(*arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_xla_takes_over_for_large_trees():
    problem = Problem((300, 65), tokens=257, heads=2, tree=True)
    q, cache, table, lens, mask = problem.arrays()
    arrays, mask = (q, cache, jnp.asarray(table), jnp.asarray(lens)), jnp.asarray(mask)
    with pytest.raises(NotImplementedError, match="up to 256 tokens"):
        decode(*arrays, tree_mask=mask)
    assert_close(*mla_decode(*arrays, tree_mask=mask), *problem.expected(q, cache, table, lens, np.asarray(mask)))


@pytest.mark.parametrize("parts", [1, 2, 7, 131])
def test_any_schedule(parts):
    problem = Problem((3000, 5, 900), heads=16)
    run(problem, tile_schedule(jnp.asarray(problem.lens, jnp.int32), parts))


@pytest.mark.parametrize("heads, tokens, parts", [(128, 1, 1), (128, 2, 3)])
def test_row_blocks_of_long_requests_wait_for_each_other(heads, tokens, parts):
    problem = Problem((20_000, 5, 17_000), heads=heads, tokens=tokens)
    run(problem, tile_schedule(jnp.asarray(problem.lens, jnp.int32), parts))


@pytest.mark.full
@pytest.mark.parametrize(
    "batch, tokens, heads", list(itertools.product((1, 2, 6, 64), (1, 2, 4), (1, 3, 9, 63, 64, 126, 128)))
)
def test_upstream_grid(batch, tokens, heads):
    rng = np.random.default_rng(batch)
    for length, ragged, causal in itertools.product((20, 140, 4096), (False, True), (False, True)):
        lens = np.full(batch, length)
        if ragged:
            lens = np.clip(rng.normal(length, length / 2, batch), tokens, ROOM).astype(int)
            lens[rng.integers(batch)] *= batch == 1  # one is empty, unless there is no other
        run(Problem(tuple(int(n) for n in lens), tokens=tokens, heads=heads, causal=causal, room=ROOM))


def test_hundred_repeats_are_bit_identical():
    problem = Problem((8192, 0, 65, 3000), heads=128)
    q, cache, table, lens, _ = problem.arrays()
    args = (q, cache, jnp.asarray(table), jnp.asarray(lens))
    first = [np.asarray(x).view(np.uint8) for x in decode(*args)]
    for _ in range(100):
        for a, b in zip(decode(*args), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), b)


@pytest.mark.parametrize("tag", GOLDEN)
def test_equals_cuda_kernel(tag):
    arrays, scale, causal, want_out, want_lse = golden(tag)
    assert_close(*decode(*arrays, sm_scale=scale, causal=causal), want_out, want_lse)


def test_layers_compile_once():
    problem = Problem((100, 300), heads=16)
    q, cache, table, lens, _ = problem.arrays()

    @jax.jit
    def layers(q, cache, table, lens, scale):
        schedule = tile_schedule(lens, num_sm_parts(132, 1, 16))
        assert isinstance(schedule, TileSchedule)
        for _ in range(8):
            out, _ = decode(q, cache, table, lens, sm_scale=scale, schedule=schedule)
            q = jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 64)))
        return q

    args = (q, cache, jnp.asarray(table), jnp.asarray(lens), jnp.float32(0.04))
    assert layers.lower(*args).as_text().count("func.func private @decode_with") == 1
    assert np.isfinite(np.asarray(layers(*args), np.float32)).all()
