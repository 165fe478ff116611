"""Loading takes the memory of the loaded weights, and little more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "measure_load.py"
LARGEST = 2 * 8192 * 1024  # bytes of the largest stored tensor, the embedding
CODE = 80e6  # bytes that the process may grow by for compiled code and the allocator's slack, whatever the size


def run(*arguments: object) -> dict[str, int]:
    done = subprocess.run([sys.executable, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_peak_is_the_checkpoint_and_its_largest_tensor(tmp_path, dtype):
    run("make", tmp_path, 200)
    memory = run("load", tmp_path, dtype)
    print(f"{dtype}: {memory}")
    assert memory["size"] > 200e6
    assert memory["peak"] - memory["before"] <= memory["size"] + LARGEST + CODE  # a second copy would be 3 times that


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_of_the_whole_process_for_two_gigabytes(tmp_path, dtype):
    run("make", tmp_path, 2000)
    memory = run("load", tmp_path, dtype)
    print(f"{dtype}: peak {memory['peak'] / memory['size']:.3f} × the weights, Python and JAX in it")
    assert memory["peak"] <= 1.15 * memory["size"]
