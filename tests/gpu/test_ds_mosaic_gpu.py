"""The Hopper kernel for caches in fp8_ds_mla on a Hopper GPU, against float64 numpy over the dequantized cache."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from ds_problems import (
    SCALES_OF_ZEROS,
    SIZES,
    WILD_SCALE,
    assert_ds_close,
    assert_golden_ds_close,
    ds_arrays,
    golden_ds,
    rope_only,
)
from problems import Problem

from mla_jax import mla_decode
from mla_jax.attention.mosaic_gpu.requirements import cannot_run
from mla_jax.cache.codec import dequantize_kv, quantize_kv
from mla_jax.schedule import tile_schedule

EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
REASON = cannot_run()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
decode = functools.partial(mla_decode, implementation="mosaic_gpu")


def run(problem, sizes="rows", *, power_of_two=False, schedule=None):
    q, cache, table, lens, mask = arrays = ds_arrays(problem, sizes, power_of_two=power_of_two)
    options = {"sm_scale": problem.scale, "causal": problem.causal, "tree_mask": mask}
    assert_ds_close(*decode(q, cache, table, lens, schedule=schedule, **options), problem, arrays)


@pytest.mark.parametrize(
    "heads, tokens",
    [(16, 1), (128, 1), (16, 4), (128, 2), (9, 2), (3, 1), (32, 1), (40, 1), (63, 1), (126, 1), (16, 8), (128, 8)],
)
def test_ragged_lengths(heads, tokens):
    run(Problem((*EDGES * 3, 1000, 4097, 513), heads=heads, tokens=tokens))


@pytest.mark.parametrize("heads, tokens", [(16, 4), (128, 2)])
def test_without_causal_mask(heads, tokens):
    run(Problem((*EDGES, 513), heads=heads, tokens=tokens, causal=False))


@pytest.mark.parametrize("length, heads", [(8192, 128), (20_000, 16), (700, 64)])
def test_one_request_over_all_parts(length, heads):
    run(Problem((length,), heads=heads))


def test_row_blocks_of_long_requests_wait_for_each_other():
    problem = Problem((20_000, 5, 17_000), heads=128)
    run(problem, schedule=tile_schedule(jnp.asarray(problem.lens, jnp.int32), 2))


@pytest.mark.parametrize("heads, tokens", [(16, 4), (128, 2), (4, 32), (1, 70)])
def test_tree_masks(heads, tokens):
    run(Problem((*EDGES, 777), heads=heads, tokens=tokens, tree=True))


@pytest.mark.parametrize("scale", [-0.05, 0.0, 0.135234])
def test_softmax_scales(scale):
    run(Problem((0, 65, 300), heads=32, scale=scale))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_of_latents(sizes, power_of_two, heads):
    scale = WILD_SCALE if sizes.startswith("wild") else Problem.scale
    run(Problem((0, 1, 65, 300, 4097), heads=heads, scale=scale), sizes, power_of_two=power_of_two)


def test_a_cache_of_zeros():
    q, cache, table, lens, _ = ds_arrays(Problem((0, 65, 300)))
    zeros = quantize_kv(jnp.zeros((*cache.shape[:2], 576), jnp.bfloat16), "fp8_ds_mla")
    for rows in (zeros, jnp.zeros_like(cache)):  # scales of 1, and of 0
        out, lse = decode(q, rows, table, lens)
        assert (np.asarray(out, np.float32) == 0).all()
        np.testing.assert_allclose(np.asarray(lse)[1:, :, 0], np.log([[65.0], [300.0]]) + np.zeros((2, 16)), rtol=1e-5)


@pytest.mark.parametrize("scale", SCALES_OF_ZEROS)
@pytest.mark.parametrize("zero_queries", [False, True])
def test_nothing_but_rope(scale, zero_queries):
    problem = Problem((65, 0, 3), heads=8)
    *arrays, _ = everything = rope_only(ds_arrays(problem), scale, zero_queries=zero_queries)
    assert_ds_close(*decode(*arrays), problem, everything)


def test_repeats_are_bit_identical():
    q, cache, table, lens, _ = ds_arrays(Problem((8192, 0, 65, 3000), heads=128))
    first = [np.asarray(x).view(np.uint8) for x in decode(q, cache, table, lens)]
    for _ in range(100):
        for again, x in zip(decode(q, cache, table, lens), first, strict=True):
            np.testing.assert_array_equal(np.asarray(again).view(np.uint8), x)


def test_equals_cuda_kernel():
    arrays, scale, *want = golden_ds()
    assert_golden_ds_close(*decode(*arrays, sm_scale=scale), *want)


@pytest.mark.parametrize("heads, length", [(64, 4000), (128, 8192)])
def test_no_worse_than_flash_mla(heads, length):
    pytest.importorskip("flash_mla")
    problem = Problem((length, 300), heads=heads)
    q, cache, table, lens, _ = ds_arrays(problem)
    table = jnp.where(table < 0, 0, jnp.minimum(table, cache.shape[0] - 1))
    wide = np.asarray(dequantize_kv(cache, "fp8_ds_mla"))
    want, _, _ = problem.expected(np.asarray(q, np.float32), wide, np.asarray(table), lens, None)
    errors = [
        np.linalg.norm(np.asarray(mla_decode(q, cache, table, lens, implementation=name)[0], np.float64) - want)
        for name in ("mosaic_gpu", "flash_mla")
    ]
    assert errors[0] <= errors[1], errors
