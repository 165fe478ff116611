"""The FP8 kernel in Pallas' interpreter, with race detection: every role and signal, no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest
from fp8_problems import GOLDEN_RMS, LSE_ABSOLUTE, assert_fp8_close, fp8_arrays, golden_fp8
from jax.experimental.pallas import mosaic_gpu as plgpu
from problems import Problem

from mla_jax.attention.mosaic_gpu.fp8_launch import decode_fp8_with, fp8_config_for
from mla_jax.schedule import tile_schedule

CASES = {
    "edges, one part": (Problem((0, 1, 63, 64, 65)), 1),
    "split request": (Problem((400, 64), tokens=2, heads=32), 3),
    "two row blocks": (Problem((65, 129), heads=126), 2),
    "tree": (Problem((70, 3), tokens=3, heads=4, tree=True), 1),
    "shorter than its queries, negative scale": (Problem((1, 2), tokens=4, heads=3, scale=-0.1), 2),
}


BY_DEFAULT = ("split request",)  # of queries in bf16, which differ in one product and one item only


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name, q_dtype",
    [
        *((name, "float8_e4m3fn") for name in CASES),
        *(pytest.param(name, "bfloat16", marks=() if name in BY_DEFAULT else pytest.mark.full) for name in CASES),
    ],
)
def test_equals_float64(name, q_dtype, capfd):
    problem, parts = CASES[name]
    kv_scale = 0.25
    q, cache, table, lens, mask = arrays = fp8_arrays(problem, q_dtype, 1 / kv_scale)
    scales = (jnp.full((1,), problem.scale * kv_scale, jnp.float32), jnp.full((1,), kv_scale, jnp.float32))
    out, lse = decode_fp8_with(
        fp8_config_for(q),
        q,
        cache,
        table,
        lens,
        *scales,
        mask,
        tile_schedule(lens, parts),
        causal=problem.causal,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert_fp8_close(out, lse, problem, arrays, kv_scale)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.timeout(120)
def test_a_negative_length_is_none(capfd):
    """The interpreter raises where a kernel reads past its queries."""
    problem = Problem((70, 0), heads=3)
    q, cache, table, lens, _ = fp8_arrays(problem, "float8_e4m3fn")
    scales = (jnp.full((1,), problem.scale, jnp.float32), jnp.ones(1, jnp.float32))
    options = {"causal": True, "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    outputs = [
        decode_fp8_with(fp8_config_for(q), q, cache, table, n, *scales, None, tile_schedule(n, 1), **options)
        for n in (lens, jnp.asarray([70, -7], jnp.int32))
    ]
    for a, b in zip(*outputs, strict=True):
        assert (a == b).all()
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_a_scale_for_each_query_row(q_dtype, capfd):
    """Of either sign, and 0; three heads leave rows that nobody asked for."""
    problem = Problem((70, 3, 0), tokens=2, heads=3)
    q, cache, table, lens, mask = fp8_arrays(problem, q_dtype)
    rng = np.random.default_rng(5)
    row_scale = rng.choice([-1, 1], q.shape[:3]) * 2.0 ** rng.uniform(-3, 1, q.shape[:3])
    row_scale[0, 0, 0] = 0
    row_scale = jnp.asarray(row_scale, jnp.float32)
    assert (row_scale[0] < 0).any() and (row_scale[0] > 0).any()
    out, lse = decode_fp8_with(
        fp8_config_for(q),
        q,
        cache,
        table,
        lens,
        jnp.full((1,), problem.scale, jnp.float32),
        jnp.ones(1),
        mask,
        tile_schedule(lens, 1),
        causal=problem.causal,
        row_scale=row_scale,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    meant = q.astype(jnp.float32) * row_scale[..., None]
    assert_fp8_close(out, lse, problem, (meant, cache, table, lens, mask))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.timeout(120)
def test_equals_cuda_kernel(capfd):
    arrays, options, want_out, want_lse = golden_fp8()
    logit_scale, kv_scale = np.prod(list(options.values())), options["kv_scale"]
    scales = (jnp.full((1,), scale, jnp.float32) for scale in (logit_scale, kv_scale))
    out, lse = decode_fp8_with(
        fp8_config_for(arrays[0]),
        *arrays,
        *scales,
        None,
        tile_schedule(arrays[-1], 2),
        causal=True,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert np.linalg.norm(np.asarray(out, np.float64) - want_out) <= GOLDEN_RMS * np.linalg.norm(want_out)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=LSE_ABSOLUTE)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
