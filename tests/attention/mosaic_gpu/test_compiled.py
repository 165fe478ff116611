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
SPILL_LIMIT = 128  # bytes per thread: a few scalars of the value roles, outside products and softmax

if shutil.which("ptxas") is None:
    pytest.skip("no CUDA toolkit: ptxas is not on the path", allow_module_level=True)
if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    pytest.skip("no jax-cuda13-plugin, which compiles for GPUs", allow_module_level=True)


@pytest.mark.timeout(300)
def test_spills():
    batch, tokens, heads, parts = 4, 2, 64, 66
    settings = {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    arguments = [sys.executable, str(SCRIPT), *map(str, (batch, tokens, heads, parts))]
    environment = {**os.environ, **settings, "PYTHONPATH": str(SCRIPT.parents[3])}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["warnings"] == [], "ptxas serialized WGMMAs or ignored register budgets"
    assert report["spill_bytes"] <= SPILL_LIMIT
