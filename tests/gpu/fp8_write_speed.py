"""The cache's write path on a GPU: `python tests/gpu/fp8_write_speed.py --json FILE`.

One step writes one token of 128 requests in 61 layers, each layer's latents converted to the format and scattered to
the pages of their sequences in a donated cache. Several steps are unrolled into one executable, which XLA captures;
a time is the slope between few and many steps, so that starting the executable does not count. Bytes are the bf16
latents that are read and the rows that are written. Beside it: a copy of the same latents layer by layer, which
shows what starting 61 small kernels costs, and one large copy, the ceiling.
"""

import argparse
import datetime
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import PagedKVCache, dequantize_kv, quantize_kv

DIM, PAGE = 576, 64
FORMATS = ("bf16", "fp8_e4m3", "fp8_ds_mla")
LAUNCHES = 5  # of an executable, without waiting between them


@dataclass(frozen=True)
class Size:
    """Of the problem."""

    batch: int = 128
    layers: int = 61
    pages: int = 16  # of each request
    steps: tuple[int, int] = (2, 6)  # unrolled into the short and the long executable
    copy_bytes: int = 2**30  # read by the large copy

    @property
    def latent_bytes(self) -> int:
        """That a step reads."""
        return self.batch * self.layers * DIM * 2


SMALL = Size(batch=4, layers=2, pages=2, steps=(1, 2), copy_bytes=2**16)  # for a CPU: does it run


def write_steps(size: Size, kv_format: str) -> tuple[Callable[[int], Any], Any, tuple[Any, ...]]:
    """(function of the number of steps, the cache, and the other arguments)."""
    scales = jnp.full((size.layers,), 0.02) if kv_format == "fp8_e4m3" else None
    num_pages = 1 + size.batch * size.pages
    cache = PagedKVCache.create(size.layers, num_pages, DIM, kv_format, scales=scales)
    table = 1 + np.random.default_rng(0).permutation(num_pages - 1).reshape(size.batch, size.pages).astype(np.int32)
    positions = np.random.default_rng(1).integers(0, size.pages * PAGE - size.steps[1], (size.batch, 1), np.int32)

    def steps(count: int) -> Any:
        def run(cache: PagedKVCache, latents: jax.Array, table: jax.Array, positions: jax.Array) -> PagedKVCache:
            for step in range(count):
                for layer in range(size.layers):
                    cache = cache.write(layer, table, positions + step, latents[step % 2, layer])
                # A later step may not be merged with this one.
                cache = replace(cache, layers=jax.lax.optimization_barrier(cache.layers))
            return cache

        return jax.jit(run, donate_argnums=0)

    return steps, cache, (latents_of(size), jnp.asarray(table), jnp.asarray(positions))


def latents_of(size: Size) -> jax.Array:
    """For two steps in turn: bf16 `[2, layers, B, 1, D]`."""
    return jax.random.normal(jax.random.key(0), (2, size.layers, size.batch, 1, DIM), jnp.bfloat16)


def copy_steps(size: Size) -> tuple[Callable[[int], Any], Any, tuple[Any, ...]]:
    """The latents of each layer negated into a buffer of its own: as many kernels, nothing scattered."""

    def steps(count: int) -> Any:
        def run(buffers: tuple[jax.Array, ...], latents: jax.Array) -> tuple[jax.Array, ...]:
            for step in range(count):
                buffers = tuple(-latents[step % 2, layer] for layer in range(size.layers))
                buffers, latents = jax.lax.optimization_barrier((buffers, latents))
            return buffers

        return jax.jit(run)

    latents = latents_of(size)
    return steps, tuple(-latents[0, layer] for layer in range(size.layers)), (latents,)


def large_copy_steps(size: Size) -> tuple[Callable[[int], Any], Any, tuple[Any, ...]]:
    """One array negated into another, far larger than any cache of the chip."""

    def steps(count: int) -> Any:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(count):
                x = jax.lax.optimization_barrier(-x)
            return x

        return jax.jit(run)

    return steps, jnp.ones((size.copy_bytes // 2,), jnp.bfloat16), ()


def compile_steps(size: Size, problem: tuple[Callable[[int], Any], Any, tuple[Any, ...]]) -> list[Any]:
    """Executables of a few and of many steps."""
    steps, state, rest = problem
    return [steps(count).lower(state, *rest).compile() for count in size.steps]


def seconds_per_step(
    size: Size, problem: tuple[Callable[[int], Any], Any, tuple[Any, ...]], compiled: list[Any], rounds: int
) -> Any:
    """(Seconds per step of each round, the optimized program of the short executable)."""
    _, state, rest = problem
    times: list[list[float]] = [[], []]
    for round_index in range(rounds + 2):
        for program, found in zip(compiled, times, strict=True):
            jax.block_until_ready(state)
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                state = program(state, *rest)
            jax.block_until_ready(state)
            if round_index >= 2:  # the first ones warm up: captured graphs are made then
                found.append((time.perf_counter() - began) / LAUNCHES)
    few, many = size.steps
    return [(long - short) / (many - few) for short, long in zip(*times, strict=True)], compiled[0].as_text()


def kernels(program: str) -> int:
    """Instructions of the entry computation that start a kernel, a copy or a call of a library."""
    entry = program[program.index("\nENTRY ") :]
    return len(re.findall(r"= \S+ (?:fusion|scatter|copy|custom-call|sort|convert|transpose)\(", entry))


def check(size: Size, kv_format: str) -> float:
    """Largest difference between what a step leaves in the last layer and what the codec says, which must be 0."""
    steps, cache, (latents, table, positions) = write_steps(size, kv_format)
    scale, last = cache.scale(size.layers - 1), size.layers - 1
    cache = steps(1)(cache, latents, table, positions)
    got = cache.gather(last, table, positions)
    want = dequantize_kv(quantize_kv(latents[0, last], kv_format, scale), kv_format, scale)
    return float(jnp.max(jnp.abs(got - want)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="a size for a CPU, to see that it runs")
    args = parser.parse_args()
    size = SMALL if args.small else Size()
    problems = {name: write_steps(size, name) for name in FORMATS}
    problems |= {"copy layer by layer": copy_steps(size), "ceiling": large_copy_steps(size)}
    with ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        compiled = dict(zip(problems, pool.map(partial(compile_steps, size), problems.values()), strict=True))
    copied, _ = seconds_per_step(size, problems.pop("ceiling"), compiled["ceiling"], args.rounds)
    ceiling = 2 * size.copy_bytes / statistics.median(copied)
    rows = []
    for name, problem in problems.items():
        is_copy = name not in FORMATS
        row_bytes = DIM * 2 if is_copy else problem[1].format.bytes_per_token(DIM)
        difference = None if is_copy else check(size, name)
        times, program = seconds_per_step(size, problem, compiled[name], args.rounds)
        moved = size.latent_bytes + size.batch * size.layers * row_bytes
        middle = statistics.median(times)
        rows.append(
            {
                "write": name,
                "us_per_step": round(middle * 1e6, 2),
                "spread_us": [round(min(times) * 1e6, 2), round(max(times) * 1e6, 2)],
                "us_per_layer": round(middle * 1e6 / size.layers, 3),
                "bytes": moved,
                "gbps": round(moved / middle / 1e9, 1),
                "percent_of_copy": round(100 * moved / middle / ceiling, 1),
                "kernels_per_layer": round(kernels(program) / (size.steps[0] * size.layers), 2),
                "largest_difference": difference,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    device = jax.devices()[0]
    result = {
        "command": " ".join(["python tests/gpu/fp8_write_speed.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "jax": jax.__version__,
        "batch": size.batch,
        "layers": size.layers,
        "copy_ceiling_gbps": round(ceiling / 1e9, 1),
        "rows": rows,
    }
    print(f"copy ceiling {ceiling / 1e9:.0f} GB/s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
