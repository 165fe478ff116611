"""The kernel for fp8_ds_mla in Pallas' interpreter, with race detection: every role and signal, no GPU."""

import jax.numpy as jnp
import pytest
from ds_problems import (
    SCALES_OF_ZEROS,
    WILD_SCALE,
    assert_ds_close,
    assert_golden_ds_close,
    ds_arrays,
    golden_ds,
    rope_only,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from problems import Problem

from mla_jax.attention.mosaic_gpu.ds_launch import decode_ds_with, ds_config_for
from mla_jax.schedule import tile_schedule

CASES = {
    "edges, one part": (Problem((0, 1, 63, 64, 65)), 1),
    "split request": (Problem((400, 64), tokens=2, heads=32), 3),
    "two row blocks": (Problem((65, 129), heads=126), 2),
    "tree": (Problem((70, 3), tokens=3, heads=4, tree=True), 1),
    "shorter than its queries, negative scale": (Problem((1, 2), tokens=4, heads=3, scale=-0.1), 2),
}
HOSTILE = Problem((200, 0, 65), heads=8, scale=WILD_SCALE)


def run(arrays, scale, parts, capfd, *, causal=True, mask=None):
    q, cache, table, lens = arrays
    out, lse = decode_ds_with(
        ds_config_for(q),
        q,
        cache,
        table,
        lens,
        jnp.full((1,), scale, jnp.float32),
        mask,
        tile_schedule(lens, parts),
        causal=causal,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    return out, lse


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, capfd):
    problem, parts = CASES[name]
    *arrays, mask = everything = ds_arrays(problem)
    out, lse = run(arrays, problem.scale, parts, capfd, causal=problem.causal, mask=mask)
    assert_ds_close(out, lse, problem, everything)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("sizes", ["wild rows", "wild tiles", "zeros"])
def test_hostile_sizes(sizes, power_of_two, capfd):
    *arrays, _ = everything = ds_arrays(HOSTILE, sizes, power_of_two=power_of_two)
    out, lse = run(arrays, HOSTILE.scale, 2, capfd)
    assert_ds_close(out, lse, HOSTILE, everything)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scale", SCALES_OF_ZEROS)
@pytest.mark.parametrize(
    "zero_queries",
    [False, True],
)
def test_nothing_but_rope(scale, zero_queries, capfd):
    problem = Problem((65, 0, 3), heads=8)
    *arrays, _ = everything = rope_only(ds_arrays(problem), scale, zero_queries=zero_queries)
    out, lse = run(arrays, problem.scale, 1, capfd)
    assert_ds_close(out, lse, problem, everything)


@pytest.mark.timeout(120)
def test_equals_cuda_kernel(capfd):
    arrays, scale, *want = golden_ds()
    assert_golden_ds_close(*run(arrays, scale, 2, capfd), *want)
