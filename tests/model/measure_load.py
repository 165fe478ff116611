"""Run as a program: makes or loads a checkpoint of random bf16 weights with experts, and prints its memory as JSON.

python measure_load.py make DIR MEGABYTES
python measure_load.py load DIR DTYPE
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from mla_jax import MLAConfig, load_checkpoint
from mla_jax.config import MoEConfig
from mla_jax.model.checkpoint import tensor_shapes

SHAPE = MLAConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=1,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    moe=MoEConfig(16, 4, 704, 1, first_dense=1),
)


def make(folder: Path, megabytes: int) -> int:
    """Adds layers until the weights take as much; one shard for each. Returns the bytes of the weights."""
    config, total = SHAPE, 0
    while total < megabytes * 1e6:
        config = dataclasses.replace(config, num_layers=config.num_layers + 1)
        total = 2 * sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    bfloat16, rng, files = jax.numpy.bfloat16, np.random.default_rng(0), {}
    for name, shape in tensor_shapes(config).items():
        files.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})[name] = shape
    for part, shapes in files.items():
        save_file({n: rng.standard_normal(s, np.float32).astype(bfloat16) for n, s in shapes.items()}, folder / part)
    weight_map = {name: part for part, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def resident(which: str) -> int:
    """Bytes of this process in memory: VmRSS, now, or VmHWM, at most so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{which}:"))


def load(folder: Path, dtype: str) -> dict[str, int]:
    jax.device_put(np.zeros(1)).block_until_ready()  # the backend is up before we look
    before = resident("VmRSS")
    _, params = jax.block_until_ready(load_checkpoint(folder, dtype))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return {"size": size, "before": before, "peak": resident("VmHWM"), "after": resident("VmRSS")}


if __name__ == "__main__":
    what, folder, argument = sys.argv[1:]
    print(json.dumps(make(Path(folder), int(argument)) if what == "make" else load(Path(folder), argument)))
