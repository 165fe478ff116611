"""The Hopper decode kernel against FlashMLA: `python tests/gpu/against_flash_mla.py --json FILE [case ...]`.

Both run inside CUDA graphs of several calls, ours captured by XLA and theirs by torch, interleaved in one
process. A time is the slope between starting a graph a few and many times; it includes all that a call needs
(their combine kernel, our clearing of counters) except the schedule, which layers share.
"""

import argparse
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.attention.mosaic_gpu.config import KernelConfig
from mla_jax.attention.mosaic_gpu.launch import decode_with
from mla_jax.schedule import num_sm_parts, tile_schedule

DIM, LATENT, PAGE = 576, 512, 64
SCALE = DIM**-0.5
PEAK_TFLOPS, PEAK_GBPS = 782.0, 4362.0  # an H200's matmul in bf16 and its reads, measured
IMBALANCED = (4641, 45118, 1730, 1696)

CASES = [
    *(f"bf16_b128_h128_s1_{k}k~" for k in (4, 8, 16, 32)),
    *(f"bf16_b128_h128_s2_{k}k~" for k in (4, 16)),
    "bf16_b128_h128_s4_4k~",
    *(f"bf16_b{b}_h128_s1_8k" for b in (1, 4, 16, 64)),
    *(f"bf16_b128_h{h}_s1_4k~" for h in (64, 32, 16)),
    "bf16_b1_h16_s1_131k",
    "bf16_imbalanced_h16_s4",
    "fp16_b128_h128_s1_4k~",
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    dtype: str
    heads: int
    tokens: int
    lens: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Case":
        """`{bf16|fp16}_b{B}_h{H}_s{S}_{K}k[~]`; with ~ lengths are normal, sigma = mean / 2."""
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[name[:4]]
        heads, tokens = (int(re.search(rf"_{k}(\d+)", name).group(1)) for k in "hs")
        if "imbalanced" in name:
            return cls(name, dtype, heads, tokens, IMBALANCED)
        batch = int(re.search(r"_b(\d+)", name).group(1))
        thousands = int(re.search(r"_(\d+)k", name).group(1))
        mean = 131_072 if thousands == 131 else thousands * 1024
        lens = np.full(batch, mean)
        if name.endswith("~"):
            lens = np.maximum(np.random.default_rng(0).normal(mean, mean / 2, batch), tokens)
        return cls(name, dtype, heads, tokens, tuple(int(n) for n in lens))

    @property
    def flops(self) -> float:
        """Multiplications and additions of one call."""
        return 2.0 * self.heads * self.tokens * sum(self.lens) * (DIM + LATENT)

    @property
    def read_bytes(self) -> float:
        """Key bytes, each read once."""
        return float(sum(self.lens) * DIM * 2)


def make_arrays(case: Case, calls: int) -> tuple[list[jax.Array], jax.Array, jax.Array, jax.Array]:
    """Distinct queries per call, a shared cache with shuffled pages, table, lengths."""
    lens = np.array(case.lens, np.int32)
    pages = -(-lens // PAGE)
    order = np.random.default_rng(1).permutation(int(pages.sum())).astype(np.int32)
    table = np.zeros((len(lens), int(pages.max())), np.int32)
    at = 0
    for row, count in zip(table, pages, strict=True):
        row[:count] = order[at : at + count]
        at += count
    keys = jax.random.split(jax.random.key(0), calls + 1)
    shape = (len(lens), case.tokens, case.heads, DIM)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    queries = [draw(k, shape, jnp.dtype(case.dtype)) for k in keys[1:]]
    cache = draw(keys[0], (int(pages.sum()), PAGE, DIM), jnp.dtype(case.dtype))
    return queries, cache, jnp.asarray(table), jnp.asarray(lens)


def ours(case: Case, config: KernelConfig, arrays: Any) -> Callable[[], Any]:
    """A function that starts one decode per query, all in one executable; returns the results."""
    queries, cache, table, lens = arrays
    schedule = tile_schedule(lens, num_sm_parts(132, case.tokens, case.heads))

    def run(queries: list[jax.Array], cache: jax.Array, table: jax.Array, lens: jax.Array, schedule: Any) -> Any:
        scale = jnp.full((1,), SCALE, jnp.float32)
        args = (cache, table, lens, scale, None, schedule)
        return [decode_with(config, q, *args, causal=True) for q in queries]

    compiled = jax.jit(run).lower(queries, cache, table, lens, schedule).compile()
    return lambda: compiled(queries, cache, table, lens, schedule)


def peers(case: Case, arrays: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A function that starts a torch CUDA graph of one FlashMLA decode per query; one that waits for it."""
    import flash_mla  # noqa: F401
    import torch

    queries, cache, table, lens = arrays
    op = torch.ops.flash_mla_legacy.dense_decode_fwd
    q = [torch.from_dlpack(x) for x in queries]
    cache, table, lens = (
        torch.from_dlpack(cache).unsqueeze(2),
        torch.from_dlpack(table),
        torch.from_dlpack(lens),
    )
    _, _, *metadata = op(q[0], cache, LATENT, lens, table, SCALE, True, None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [op(x, cache, LATENT, lens, table, SCALE, True, *metadata)[:2] for x in q]

    def start(keep_alive: Any = (q, cache, table, lens, metadata)) -> Any:
        graph.replay()  # it reads those by address
        return results

    return start, torch.cuda.synchronize


Run = tuple[Callable[[], Any], Callable[[Any], Any]]  # start, and wait for what it returned


def seconds(run: Run, times: int) -> float:
    """Wall time of starting a graph several times and waiting for the last."""
    start, wait = run
    began = time.perf_counter()
    for _ in range(times):
        result = start()
    wait(result)
    return time.perf_counter() - began


def measure(runs: dict[str, Run], calls: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per call, per round, interleaved."""
    few, many = 2, 6
    for run in runs.values():
        seconds(run, few)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.01)  # the card slows down in sustained loops
            short = min(seconds(run, few) for _ in range(2))
            long = min(seconds(run, many) for _ in range(2))
            times[name].append((long - short) / ((many - few) * calls))
    return times


def bench(
    case: Case, configs: dict[str, KernelConfig], *, with_peer: bool, rounds: int, lock: str | None
) -> dict[str, Any]:
    """Time all configurations and FlashMLA on one case."""
    estimate = max(case.flops / 600e12, case.read_bytes / 3.5e12) + 1.5e-5
    calls = max(2, min(16, int(1e-3 / estimate)))
    arrays = make_arrays(case, calls)
    runs: dict[str, Run] = {}
    for name, config in configs.items():
        runs[name] = (ours(case, config, arrays), jax.block_until_ready)
    with open(lock or "/dev/null", "w") as file:
        if lock:
            fcntl.flock(file, fcntl.LOCK_EX)  # other cases compile meanwhile
        if with_peer:
            start, wait = peers(case, arrays)
            runs = {"flash_mla": (start, lambda _: wait()), **runs}
        row: dict[str, Any] = {"case": case.name}
        if with_peer:
            row["error_against_peer"] = compare(runs, configs)
        for name, times in measure(runs, calls, rounds).items():
            micros = [t * 1e6 for t in times]
            row[name] = {"us": statistics.median(micros), "min_us": min(micros), "max_us": max(micros)}
    return row


def compare(runs: dict[str, Any], configs: dict[str, KernelConfig]) -> dict[str, float]:
    """Relative RMS difference of the first call's output, per configuration."""
    theirs = runs["flash_mla"][0]()[0][0]
    runs["flash_mla"][1](None)
    theirs = theirs.float().cpu().numpy()
    found = {}
    for name in configs:
        mine = np.asarray(runs[name][0]()[0][0], np.float32)
        found[name] = float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))
    return found


def report(case: Case, row: dict[str, Any], name: str) -> dict[str, Any]:
    """The row in the form of the issue's table."""
    us = row[name]["us"]
    tflops, gbps = case.flops / us / 1e6, case.read_bytes / us / 1e3
    peer = row.get("flash_mla", {}).get("us")
    return {
        "case": case.name,
        "us": round(us, 2),
        "peer_us": peer and round(peer, 2),
        "ratio": peer and round(peer / us, 4),
        "tflops": round(tflops, 1),
        "gbps": round(gbps, 1),
        "percent_of_limit": round(100 * max(tflops / PEAK_TFLOPS, gbps / PEAK_GBPS), 1),
        "spread_us": [round(row[name]["min_us"], 2), round(row[name]["max_us"], 2)],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--json", help="write results to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lock", help="a file: several of these processes compile together, and measure in turn")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--config", action="append", default=[], help="name:field=value,field=value")
    args = parser.parse_args()
    configs = {"mosaic_gpu": KernelConfig()}
    for text in args.config:
        name, _, fields = text.partition(":")
        values = dict(field.split("=") for field in fields.split(",") if field)
        configs[name] = KernelConfig(**{k: json.loads(v) for k, v in values.items()})
    rows, raw = [], []
    for name in args.cases:
        case = Case.parse(name)
        try:
            row = bench(case, configs, with_peer=not args.no_peer, rounds=args.rounds, lock=args.lock)
        except Exception as error:
            print(f"{name}: {error!r}"[:600], file=sys.stderr, flush=True)
            continue
        raw.append(row)
        rows.append(report(case, row, "mosaic_gpu"))
        others = {k: round(v["us"], 1) for k, v in row.items() if isinstance(v, dict) and "us" in v}
        errors = {k: f"{v:.1e}" for k, v in row.get("error_against_peer", {}).items()}
        print(json.dumps(rows[-1]), others, errors, flush=True)
    device = jax.devices()[0]
    result = {
        "command": " ".join(["python tests/gpu/against_flash_mla.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "versions": {n: _version(n) for n in ("jax", "jaxlib", "torch", "sgl-flash-mla")},
        "rows": rows,
        "raw": raw,
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
