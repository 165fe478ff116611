"""The Hopper kernel for FP8 caches on a Hopper GPU, against float64 numpy over the dequantized cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_problems import GOLDEN_RMS, LSE_ABSOLUTE, assert_fp8_close, fp8_arrays, golden_fp8
from problems import Problem

from mla_jax import mla_decode, quantize_queries
from mla_jax.attention.mosaic_gpu.requirements import cannot_run
from mla_jax.schedule import tile_schedule

EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
REASON = cannot_run()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
decode = functools.partial(mla_decode, implementation="mosaic_gpu")
both = pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "bfloat16"])


def run(problem, q_dtype, kv_scale=1.0, schedule=None):
    q, cache, table, lens, mask = arrays = fp8_arrays(problem, q_dtype, 1 / kv_scale)
    options = {"sm_scale": problem.scale, "causal": problem.causal, "tree_mask": mask, "kv_scale": kv_scale}
    out, lse = decode(q, cache, table, lens, schedule=schedule, **options)
    assert_fp8_close(out, lse, problem, arrays, kv_scale)
    return out, lse


@both
@pytest.mark.parametrize(
    "heads, tokens", [(16, 1), (128, 1), (16, 4), (128, 2), (9, 2), (3, 1), (63, 1), (126, 1), (16, 8)]
)
def test_ragged_lengths(heads, tokens, q_dtype):
    run(Problem((*EDGES * 3, 1000, 4097, 513), heads=heads, tokens=tokens), q_dtype)


@both
@pytest.mark.parametrize("length, heads", [(8192, 128), (20_000, 16), (700, 64)])
def test_one_request_over_all_parts(length, heads, q_dtype):
    run(Problem((length,), heads=heads), q_dtype)


@both
def test_row_blocks_of_long_requests_wait_for_each_other(q_dtype):
    problem = Problem((20_000, 5, 17_000), heads=128)
    run(problem, q_dtype, schedule=tile_schedule(jnp.asarray(problem.lens, jnp.int32), 2))


@both
@pytest.mark.parametrize("heads, tokens", [(16, 4), (128, 2), (4, 32)])
def test_tree_masks(heads, tokens, q_dtype):
    run(Problem((*EDGES, 777), heads=heads, tokens=tokens, tree=True), q_dtype)


@both
@pytest.mark.parametrize("kv_scale", [1e-6, 0.03, 1e3])
def test_scales(kv_scale, q_dtype):
    q, cache, table, lens, _ = fp8_arrays(problem := Problem((0, 65, 300), heads=32), q_dtype)
    options = {"sm_scale": problem.scale / kv_scale, "kv_scale": kv_scale}
    out, lse = decode(q, cache, table, lens, **options)
    plain, plain_lse = decode(q, cache, table, lens, sm_scale=problem.scale)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(plain_lse), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        np.asarray(out, np.float32) / kv_scale, np.asarray(plain, np.float32), rtol=2**-6, atol=1e-4
    )


@both
@pytest.mark.parametrize("scale", [-0.05, 0.0, 0.135234])
def test_softmax_scales(scale, q_dtype):
    run(Problem((0, 65, 300), heads=32, scale=scale), q_dtype)


@both
@pytest.mark.parametrize("heads, tokens", [(16, 1), (9, 2), (128, 2)])
def test_a_scale_for_each_query_row(heads, tokens, q_dtype):
    """Of either sign, and 0."""
    problem = Problem((*EDGES, 700), heads=heads, tokens=tokens)
    q, cache, table, lens, _ = fp8_arrays(problem, q_dtype)
    rng = np.random.default_rng(heads)
    q_scale = rng.choice([-1, 1], q.shape[:3]) * 2.0 ** rng.uniform(-3, 1, q.shape[:3])
    q_scale[1, 0, 0] = 0
    q_scale = jnp.asarray(q_scale, jnp.float32)
    out, lse = decode(q, cache, table, lens, sm_scale=problem.scale, q_scale=q_scale)
    assert_fp8_close(out, lse, problem, (q.astype(jnp.float32) * q_scale[..., None], cache, table, lens, None))


def test_queries_quantized_in_the_same_program():
    """As the model's step does it; XLA may not keep more bits of them than e4m3 has."""
    problem = Problem((*EDGES, 700), heads=128)
    q, cache, table, lens, _ = fp8_arrays(problem, "bfloat16")
    rounded, q_scale = quantize_queries(q)
    want = decode(rounded, cache, table, lens, sm_scale=problem.scale, q_scale=q_scale)

    def step(q, implementation):
        rounded, q_scale = quantize_queries(q)
        options = {"sm_scale": problem.scale, "q_scale": q_scale, "implementation": implementation}
        return mla_decode(rounded, cache, table, lens, **options)

    for got, wanted in zip(jax.jit(lambda q: step(q, "mosaic_gpu"))(q), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
    out, lse = jax.jit(lambda q: step(q, "xla"))(q)
    assert_fp8_close(out, lse, problem, (rounded.astype(jnp.float32) * q_scale[..., None], cache, table, lens, None))


def test_a_cache_of_zeros():
    q, cache, table, lens, _ = fp8_arrays(Problem((0, 65, 300)), "bfloat16")
    out, lse = decode(q, jnp.zeros_like(cache), table, lens)
    assert (np.asarray(out, np.float32) == 0).all()
    np.testing.assert_allclose(np.asarray(lse)[1:, :, 0], np.log([[65.0], [300.0]]) + np.zeros((2, 16)), rtol=1e-5)


@both
def test_repeats_are_bit_identical(q_dtype):
    q, cache, table, lens, _ = fp8_arrays(Problem((8192, 0, 65, 3000), heads=128), q_dtype)
    first = [np.asarray(x).view(np.uint8) for x in decode(q, cache, table, lens)]
    for _ in range(100):
        for again, x in zip(decode(q, cache, table, lens), first, strict=True):
            np.testing.assert_array_equal(np.asarray(again).view(np.uint8), x)


def test_equals_cuda_kernel():
    arrays, options, want_out, want_lse = golden_fp8()
    out, lse = decode(*arrays, **options)
    assert np.linalg.norm(np.asarray(out, np.float64) - want_out) <= GOLDEN_RMS * np.linalg.norm(want_out)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=LSE_ABSOLUTE)


@pytest.mark.parametrize("heads, length", [(16, 4000), (128, 8192)])
def test_no_worse_than_flash_mla(heads, length):
    pytest.importorskip("flash_mla")
    problem = Problem((length, 300), heads=heads)
    q, cache, table, lens, _ = fp8_arrays(problem, "float8_e4m3fn")
    table = jnp.where(table < 0, 0, jnp.minimum(table, cache.shape[0] - 1))
    want, _, _ = problem.expected(*(np.asarray(x, np.float32) for x in (q, cache)), np.asarray(table), lens, None)
    errors = [
        np.linalg.norm(np.asarray(mla_decode(q, cache, table, lens, implementation=name)[0], np.float64) - want)
        for name in ("mosaic_gpu", "flash_mla")
    ]
    assert errors[0] <= errors[1], errors
