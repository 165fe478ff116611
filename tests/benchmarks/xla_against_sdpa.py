"""The chunked XLA decode against torch's SDPA on this CPU, in one run: `make bench-cpu [ARGS="--json FILE"]`.

The peer gathers the pages first, because SDPA cannot follow a block table, and takes heads as query rows over the one
latent head, which is its fastest form. Calls alternate; the table shows medians. float32, 16 heads, context 4096.
"""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from mla_jax import mla_decode

BATCH, HEADS, CONTEXT, PAGE, D, V = 8, 16, 4096, 64, 576, 512
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    pages = CONTEXT // PAGE
    cache = rng.standard_normal((BATCH * pages + 1, PAGE, D), np.float32)
    q = rng.standard_normal((BATCH, 1, HEADS, D), np.float32)
    table = (1 + rng.permutation(BATCH * pages)).reshape(BATCH, pages).astype(np.int32)
    ours = _ours(q, cache, table)
    peer = _peer(q, cache, table)
    difference = np.abs(ours() - peer()).max()
    assert difference < 1e-4, difference
    times: dict[str, list[float]] = {"mla_jax xla": [], "torch SDPA": []}
    for _ in range(ROUNDS):
        for name, call in zip(times, (ours, peer), strict=True):
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    print(
        f"b {BATCH}, h {HEADS}, context {CONTEXT}, float32, {torch.get_num_threads()} threads; "
        f"jax {jax.__version__}, torch {torch.__version__}; largest difference {difference:.1e}"
    )
    for name, values in times.items():
        print(
            f"  {name:<12} {medians[name]:7.1f} ms  (fastest {min(values) * 1e3:.1f}, slowest {max(values) * 1e3:.1f})"
        )
    print(f"  ratio        {medians['torch SDPA'] / medians['mla_jax xla']:7.2f}")
    if args.json:
        ms = {
            name: {"median": medians[name], "least": min(values) * 1e3, "most": max(values) * 1e3}
            for name, values in times.items()
        }
        result = {
            "command": "python tests/benchmarks/xla_against_sdpa.py",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": jax.devices()[0].device_kind,
            "threads": torch.get_num_threads(),
            "jax": jax.__version__,
            "torch": torch.__version__,
            "ms": ms,
        }
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def _ours(q: np.ndarray, cache: np.ndarray, table: np.ndarray) -> Callable[[], np.ndarray]:
    arrays = [jnp.asarray(x) for x in (q, cache, table)]
    lens = jnp.full((BATCH,), CONTEXT, jnp.int32)
    return lambda: np.asarray(mla_decode(*arrays, lens, implementation="xla")[0])


def _peer(q: np.ndarray, cache: np.ndarray, table: np.ndarray) -> Callable[[], np.ndarray]:
    query, pages, index = torch.from_numpy(q), torch.from_numpy(cache), torch.from_numpy(table).long()

    def call() -> np.ndarray:
        keys = pages[index].reshape(BATCH, 1, CONTEXT, D)
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, keys[..., :V], scale=D**-0.5)
        return out.numpy()

    return call


if __name__ == "__main__":
    main()
