"""FlashMLA inside XLA's CUDA graphs, and memory shared with torch: `python tests/gpu/flash_mla_in_graph.py WHAT FILE`.

WHAT: `replay` (a captured step of 24 layers under torch's allocations), `shared` (order and lifetime of DLPack),
`overhead` (times per layer; with XLA_FLAGS=--xla_gpu_enable_command_buffer= nothing is captured). Each adds its results
to the JSON FILE, with the command, versions, date and device.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import flash_mla_jax
from flash_mla_jax.call import runs
from mla_jax import mla_decode
from mla_jax.attention.api import step_schedule

LAYERS, DIM, PAGE = 24, 576, 64
SHAPES = {"b1 h16 128": (1, 16, 128), "b1 h128 128": (1, 128, 128), "b16 h128 1k": (16, 128, 1024),
          "b128 h128 4k": (128, 128, 4096)}  # fmt: skip


def problem(batch: int, heads: int, length: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """q, cache [pages, 64, 576], table and lengths between half of `length` and all of it."""
    keys = jax.random.split(jax.random.key(seed), 2)
    pages = -(-length // PAGE)
    q = jax.random.normal(keys[0], (batch, 1, heads, DIM), jnp.bfloat16)
    cache = jax.random.normal(keys[1], (batch * pages, PAGE, DIM), jnp.bfloat16)
    order = np.random.default_rng(seed).permutation(batch * pages).astype(np.int32)
    lens = np.random.default_rng(seed).integers(length // 2, length + 1, batch).astype(np.int32)
    return q, cache, jnp.asarray(order.reshape(batch, pages)), jnp.asarray(lens)


@jax.jit
def step(q: jax.Array, cache: jax.Array, table: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Layers whose output is added to the next one's query."""
    schedule = step_schedule("flash_mla", q, cache, lens)
    for _ in range(LAYERS):
        out, lse = mla_decode(q, cache, table, lens, schedule=schedule, implementation="flash_mla")
        q = add(q, out)
    return q, lse


@jax.jit
def add(q: jax.Array, out: jax.Array) -> jax.Array:
    """q with out added to its first 512 dims."""
    return q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, DIM - out.shape[-1])))


def step_outside_jit(q: jax.Array, cache: jax.Array, table: jax.Array, lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same layer by layer, each with the metadata that the kernel makes."""
    k_cache = cache[:, :, None]
    for _ in range(LAYERS):
        out, lse = flash_mla_jax.flash_mla_with_kvcache(q, k_cache, table, lens)
        q = add(q, out)
    return q, lse


def replay(rounds: int = 1000) -> dict[str, Any]:
    """Steps with changing inputs while torch allocates, writes, frees and empties its cache."""
    inputs = [problem(8, 16, 700, seed) for seed in range(8)]
    expected = [step_outside_jit(*x) for x in inputs]
    jax.block_until_ready([step(*x) for x in inputs[:2]])
    warm = (runs.total, runs.captured)
    rng, held, wrong = np.random.default_rng(0), [], 0
    for i in range(rounds):
        held.append(torch.full((int(rng.integers(1, 4 << 20)),), float("nan"), device="cuda"))
        if len(held) > 6:
            del held[int(rng.integers(0, len(held)))]
        if i % 10 == 0:
            held.clear()
            torch.cuda.empty_cache()
        fresh = [x + 0 for x in inputs[i % 8]] if i % 5 == 0 else inputs[i % 8]  # now and then at another address
        got = step(*fresh)
        wrong += not all(bool(jnp.array_equal(a, b)) for a, b in zip(got, expected[i % 8], strict=True))
    return {
        "rounds": rounds,
        "layers": LAYERS,
        "wrong": wrong,
        "callback_runs_before": warm[0],
        "callback_runs_during": runs.total - warm[0],
        "of_these_captured": runs.captured - warm[1],
        "jit_entries": step._cache_size(),
    }


SIZE = 2048


@jax.jit
def slow(x: jax.Array, value: jax.Array) -> jax.Array:
    """`value` everywhere, after some time."""
    for _ in range(6):
        x = jnp.tanh(x @ x)
    return x * 0 + value


@jax.jit
def sum_after_work(x: jax.Array, load: jax.Array) -> jax.Array:
    """x, read after some time."""
    for _ in range(6):
        load = jnp.tanh(load @ load)
    return x + jnp.min(load) * 0


def shared(rounds: int = 1000, naive_rounds: int = 30) -> dict[str, Any]:
    """How often torch or JAX saw old data, or data written after a drop; and how often without what we add."""
    load = jnp.full((SIZE, SIZE), 1e-3, jnp.float32)
    slow(load, jnp.float32(0)).block_until_ready()

    def stale(to_torch: Callable[[Any], Any], count: int) -> int:
        bad = 0
        for i in range(count):
            tensor = to_torch(slow(load, jnp.float32(i + 1)))
            back = flash_mla_jax.from_torch(tensor * 2)
            bad += not bool(jnp.all(back == 2 * (i + 1)))
        return bad

    def corrupted_in_torch(to_torch: Callable[[Any], Any], count: int) -> int:
        bad = 0
        for i in range(count):
            array = jax.block_until_ready(jnp.full((SIZE, SIZE), i + 1, jnp.float32))
            tensor = to_torch(array)
            torch.cuda._sleep(2_000_000)  # cycles, about a millisecond
            result = tensor + 0
            del array, tensor
            trash = [jnp.full((SIZE, SIZE), -1, jnp.float32) for _ in range(3)]
            jax.block_until_ready(trash)
            bad += not bool((result == i + 1).all())
        return bad

    def corrupted_in_jax(from_torch: Callable[[Any], Any], count: int) -> int:
        bad = 0
        for i in range(count):
            tensor = torch.full((SIZE, SIZE), float(i + 1), device="cuda")
            array = from_torch(tensor)
            result = sum_after_work(array, load)
            del array, tensor
            trash = [torch.full((SIZE, SIZE), -1.0, device="cuda") for _ in range(3)]
            bad += not bool(jnp.all(result == i + 1))
            del trash
        return bad

    q, cache, table, lens = problem(8, 16, 700)
    want = flash_mla_jax.flash_mla_with_kvcache(q, cache[:, :, None], table, lens)[0]

    def corrupted_calls(count: int) -> int:
        bad = 0
        for _ in range(count):
            out, _ = flash_mla_jax.flash_mla_with_kvcache(q + 0, (cache + 0)[:, :, None], table + 0, lens + 0)
            trash = [cache * jnp.bfloat16(-3) for _ in range(2)]
            bad += not bool(jnp.array_equal(out, want))
            del trash
        return bad

    naive_to, naive_from = torch.from_dlpack, jax.dlpack.from_dlpack
    return {
        "rounds": rounds,
        "stale_jax_to_torch_to_jax": stale(flash_mla_jax.to_torch, rounds),
        "corrupted_after_drop_in_torch": corrupted_in_torch(flash_mla_jax.to_torch, rounds),
        "corrupted_after_drop_in_jax": corrupted_in_jax(flash_mla_jax.from_torch, rounds),
        "corrupted_calls_after_drop": corrupted_calls(rounds),
        "still_kept": flash_mla_jax.release_dropped(wait=True),
        "naive": {
            "rounds": naive_rounds,
            "stale_jax_to_torch_to_jax": stale(naive_to, naive_rounds),
            "corrupted_after_drop_in_torch": corrupted_in_torch(naive_to, naive_rounds),
            "corrupted_after_drop_in_jax": corrupted_in_jax(naive_from, naive_rounds),
        },
    }


def torch_step(q: jax.Array, cache: jax.Array, table: jax.Array, lens: jax.Array) -> tuple[Any, Any]:
    """The same layers in torch: a function that runs them, and a CUDA graph of it."""
    import flash_mla  # noqa: F401

    op = torch.ops.flash_mla_legacy.dense_decode_fwd
    q, cache, table, lens = (torch.from_dlpack(x).clone() for x in jax.block_until_ready((q, cache, table, lens)))
    cache = cache.unsqueeze(2)
    metadata = op(q, cache, 512, lens, table, DIM**-0.5, False, None, None)[2:]

    def layers() -> None:
        for _ in range(LAYERS):
            q[..., :512] += op(q, cache, 512, lens, table, DIM**-0.5, False, *metadata)[0]

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return layers, graph


def overhead(rounds: int = 5) -> dict[str, Any]:
    """µs per layer, median of rounds; each of 24 layers' decode and the addition of its output."""
    captured = "enable_command_buffer=" not in os.environ.get("XLA_FLAGS", "")
    table: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        arrays = problem(*shape)
        calls = 40 if shape[0] < 64 else 8
        times = {"captured" if captured else "not captured": _time(lambda: step(*arrays), calls, rounds)}  # noqa: B023
        if captured:
            layers, graph = torch_step(*arrays)
            wait = torch.cuda.synchronize
            times |= {
                "outside jit": _time(lambda: step_outside_jit(*arrays), 2, rounds),  # noqa: B023
                "torch graph": _time(graph.replay, calls, rounds, wait),
                "torch": _time(layers, 2, rounds, wait),
            }
        table[name] = times
        print(name, times, flush=True)
    return table


def _time(run: Callable[[], Any], calls: int, rounds: int, wait: Callable[..., Any] | None = None) -> float:
    wait = wait or jax.block_until_ready
    results = []
    for i in range(rounds + 2):
        began = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(*([result] if wait is jax.block_until_ready else []))
        if i > 1:
            results.append((time.perf_counter() - began) / calls / LAYERS * 1e6)
    return round(statistics.median(results), 2)


def main() -> None:
    """Command line."""
    what, file = sys.argv[1], pathlib.Path(sys.argv[2])
    began = time.perf_counter()
    result = {"replay": replay, "shared": shared, "overhead": overhead}[what]()
    entry = {
        "command": f"python tests/gpu/flash_mla_in_graph.py {what} FILE",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "jaxlib", "torch", "sgl-flash-mla")},
        "seconds": round(time.perf_counter() - began, 1),
        "result": result,
    }
    print(json.dumps(entry), flush=True)
    entries = json.loads(file.read_text()) if file.exists() else []
    file.write_text(json.dumps([*entries, entry], indent=1))


if __name__ == "__main__":
    main()
