"""The kernel in Pallas' interpreter, with race detection: every role and signal, no GPU."""

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from problems import GOLDEN, Problem, assert_close, golden

from mla_jax.attention.mosaic_gpu.config import KernelConfig
from mla_jax.attention.mosaic_gpu.launch import decode_with
from mla_jax.schedule import tile_schedule

CASES = {
    "edges, one part": (Problem((0, 1, 63, 64, 65)), 1),
    "split request": (Problem((400, 64), tokens=2, heads=32), 3),
    "two row blocks, fp16": (Problem((65, 129), heads=126, dtype="float16"), 2),
    "tree": (Problem((70, 3), tokens=3, heads=4, tree=True), 1),
    "large tree": (Problem((70, 30), tokens=40, heads=1, tree=True), 1),
    "shorter than its queries, negative scale": (Problem((1, 2), tokens=4, heads=3, scale=-0.1), 2),
}


CONFIGS = [
    KernelConfig(register_tiles=5),
    KernelConfig(left_slots=2),
]


def run(config, parts, arrays, scale, *, causal=True, mask=None):
    q, cache, table, lens = (jnp.asarray(x) for x in arrays)
    schedule = tile_schedule(lens, parts)
    scale = jnp.full((1,), scale, jnp.float32)
    mask = None if mask is None else jnp.asarray(mask)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return decode_with(config, q, cache, table, lens, scale, mask, schedule, causal=causal, interpret=interpret)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name, config", [*((name, KernelConfig()) for name in CASES), *(("split request", c) for c in CONFIGS)]
)
def test_equals_float64(name, config, capfd):
    problem, parts = CASES[name]
    *arrays, mask = problem.arrays()
    out, lse = run(config, parts, arrays, problem.scale, causal=problem.causal, mask=mask)
    assert_close(out, lse, *problem.expected(*arrays, mask))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tag", GOLDEN)
def test_equals_cuda_kernel(tag, capfd):
    arrays, scale, causal, want_out, want_lse = golden(tag)
    out, lse = run(KernelConfig(), 2, arrays, scale, causal=causal)
    assert_close(out, lse, want_out, want_lse)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
