"""What ptxas says of the kernel, on a machine without a GPU."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("compile_for_hopper.py")
FEW = 128  # bytes per thread: a few scalars of the value roles, outside products and softmax
MORE = 384  # the score role has two products to make for bf16 queries over bytes, and fewer registers

if shutil.which("ptxas") is None:
    pytest.skip("no CUDA toolkit: ptxas is not on the path", allow_module_level=True)
if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("no jax-cuda13-plugin, which compiles for GPUs", allow_module_level=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "heads, q_dtype, cache_dtype, spills",
    [
        (64, "bfloat16", "bfloat16", FEW),
        (64, "float8_e4m3fn", "float8_e4m3fn", FEW),
        (8, "float8_e4m3fn", "float8_e4m3fn", FEW),
        (64, "bfloat16", "float8_e4m3fn", MORE),
        (8, "bfloat16", "uint8", FEW),
        (16, "bfloat16", "uint8", FEW),
        (128, "bfloat16", "uint8", FEW),
    ],
)
def test_spills(heads, q_dtype, cache_dtype, spills):
    batch, tokens, parts = 4, 2, 66
    settings = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    arguments = [sys.executable, str(SCRIPT), *map(str, (batch, tokens, heads, parts)), q_dtype, cache_dtype]
    environment = {**os.environ, **settings, "PYTHONPATH": str(SCRIPT.parents[3])}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["warnings"] == [], "ptxas serialized WGMMAs or ignored register budgets"
    assert report["spill_bytes"] <= spills
