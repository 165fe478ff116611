"""Time of a captured decode step: `python tests/gpu/step_time.py --json FILE [--model demo|v3] [--batch 1 8 64] …`.

Wall time is that of a run of steps that nobody waits for in between; device time is the sum of kernel times from
CUPTI. Run it once more with XLA_FLAGS=--xla_gpu_enable_command_buffer= for the same without capture, and with
JAX_COMPILATION_CACHE_DIR set to see what a second process compiles.
"""

import argparse
import datetime
import fcntl
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import stack

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.decode.speculative_step import speculative_step
from mla_jax.decode.step import decode_step
from mla_jax.model.cache import page_bytes
from mla_jax.schedule import tile_schedule
from mla_jax.speculative.config import Speculation

SINGLE = 16  # steps whose kernels are timed


def main() -> None:
    """Prints a row per case and writes all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", choices=("demo", "v3"), default="demo")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--formats", nargs="+", default=["bf16"], help="fp8_e4m3+q is with queries in e4m3 too")
    parser.add_argument("--implementations", nargs="+", default=["xla", "mosaic_gpu"])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 8], help="decode steps per call")
    parser.add_argument("--run", type=int, default=96, metavar="N", help="steps in a row, which are timed three times")
    parser.add_argument("--mtp", nargs="+", default=["off"], help="off, or steps-topk-draft_tokens, such as 3-1-4")
    parser.add_argument(
        "--after", type=int, default=1, metavar="N", help="time when N processes have compiled, in turns"
    )
    parser.add_argument("--meet", type=Path, default=Path(tempfile.gettempdir()) / "step_time", help="where they meet")
    parser.add_argument("--schedule", action="store_true", help="time tile_schedule too")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [schedule_row()] if args.schedule else []
    config, make_params = model_of(args)
    shapes = jax.eval_shape(make_params)
    room = 3 * args.run + SINGLE + 2 * max(args.steps) + 32  # steps that are run below, and some more
    cases = list(itertools.product(args.batch, args.formats, args.implementations, args.steps, args.mtp))
    with ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        steps = [pool.submit(compile_step, config, shapes, b, args.context, room, *how) for b, *how in cases]
    turn = wait_for_turn(args.meet, args.after)  # noqa: F841 (held until the process ends)
    params = jax.block_until_ready(make_params())  # not before: others wait with theirs too, and a GPU holds few
    for (batch, name, implementation, per_call, mtp), step in zip(cases, steps, strict=True):
        kv_format, _ = stack.cache_and_queries(name)
        case = {"model": args.model, "layers": config.num_layers, "heads": config.num_heads, "batch": batch}
        case |= {
            "context": args.context,
            "kv_format": name,
            "implementation": implementation,
            "steps_per_call": per_call,
            "mtp": mtp,
        }
        try:
            compiled, seconds = step.result()
            case |= {"cache_bytes": cache_bytes(config, batch, args.context, kv_format, mtp)}
            state = stack.running_state(config, params, batch, args.context, room, kv_format, speculation_of(mtp))
            state = replace(state, cache=stack.with_latents(state.cache))
            case |= time_step(params, state, compiled, per_call, args.run) | seconds
        except NotImplementedError as e:
            case |= {"skipped": str(e)}
        except Exception as e:  # the others are worth having
            case |= {"failed": f"{type(e).__name__}: {e}"[:500]}
        rows.append(case)
        print(json.dumps(case), flush=True)
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "capture": "xla_gpu_enable_command_buffer=" not in os.environ.get("XLA_FLAGS", ""),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compilation_cache": os.environ.get("JAX_COMPILATION_CACHE_DIR"),
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def model_of(args: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """Its config, and what makes its weights."""
    if args.model == "demo":
        config, params = stack.demo()
        return config, lambda: params
    config = stack.v3_config(args.layers, args.heads)
    return config, lambda: stack.v3_params(config)


def cache_bytes(config: Any, batch: int, context: int, kv_format: str, mtp: str) -> int:
    """What the context takes in all layers, in whole pages; the draft layer's too where there are drafts."""
    return batch * -(-context // PAGE_SIZE) * page_bytes(config, kv_format, mtp=mtp != "off")


def compile_step(
    config: Any,
    params: Any,
    batch: int,
    context: int,
    room: int,
    name: str,
    implementation: str,
    steps: int,
    mtp: str,
) -> tuple[Any, dict[str, float]]:
    """The executable, and what it took. Several at a time take longer each. Shapes of the weights will do."""
    speculation = speculation_of(mtp)
    kv_format, fp8_queries = stack.cache_and_queries(name)
    state = jax.eval_shape(lambda: stack.running_state(config, params, batch, context, room, kv_format, speculation))
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    started = time.perf_counter()
    options = {"config": config, "greedy": True, "implementation": implementation, "steps": steps}
    options["fp8_queries"] = fp8_queries
    if speculation is None:
        lowered = decode_step.lower(params, state, slots, **options)
    else:
        lowered = speculative_step.lower(params, state, slots, speculation=speculation, **options)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return compiled, {
        "lower_s": round(traced - started, 2),
        "compile_s": round(time.perf_counter() - traced, 2),
    }


def wait_for_turn(folder: Path, processes: int) -> Any:
    """An open lock, once that many processes have compiled: compiling runs kernels too, to choose among them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.ready").touch()
    patience = time.monotonic() + 150
    while len(list(folder.glob("*.ready"))) < processes and time.monotonic() < patience:
        time.sleep(0.2)
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def speculation_of(mtp: str) -> Speculation | None:
    """Of its short form."""
    return None if mtp == "off" else Speculation(*(int(n) for n in mtp.split("-")))


def time_step(params: Any, state: Any, step: Any, per_call: int, in_a_row: int) -> dict[str, Any]:
    """Runs a compiled step and times it."""
    batch = state.status.shape[0]
    slots = jnp.arange(batch, dtype=jnp.int32)

    def run(state: Any, steps: int) -> Any:
        with jax.transfer_guard_device_to_host("disallow"):
            for _ in range(steps // per_call):
                state, emitted = step(params, state, slots)
        return state, emitted

    state, emitted = run(state, 2 * per_call)  # captured by now
    jax.block_until_ready(emitted)
    walls = []
    for _ in range(3):
        begin = time.perf_counter()
        state, emitted = run(state, in_a_row)
        jax.block_until_ready(emitted)
        walls.append((time.perf_counter() - begin) / in_a_row * 1e6)
    wall = statistics.median(walls)
    state, kernels = kernel_times(run, state, SINGLE)
    device = sum(t for _, t in kernels) / SINGLE * 1e3  # 0 without a GPU
    assert (np.asarray(emitted.tokens).max(axis=1) >= 0).all()  # still running
    return {
        "wall_us": round(wall, 1),
        "wall_spread_us": round(max(walls) - min(walls), 1),
        "device_us": round(device, 1),
        "wall_minus_device_us": round(wall - device, 1),
        "kernels_per_step": len(kernels) / SINGLE,
        "steps_per_second": round(1e6 / wall, 1),
    }


def kernel_times(run: Any, state: Any, steps: int) -> tuple[Any, list[tuple[str, float]]]:
    """The state after more steps, and (name, milliseconds) of each kernel in them, inside graphs too."""
    if jax.default_backend() != "gpu":
        return state, []
    from jax.experimental.mosaic.gpu import profiler

    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    jax.block_until_ready(state)
    cupti._cupti_init()
    try:
        state, emitted = run(state, steps)
        jax.block_until_ready(emitted)
    finally:
        timings = cupti._cupti_get_timings(True)
    return state, list(timings)


def schedule_row() -> dict[str, Any]:
    """tile_schedule for 128 requests and 132 parts, 20 of them in a row, each of which needs the one before."""
    times = 20

    def chain(lens: jax.Array) -> jax.Array:
        for _ in range(times):
            made = jax.lax.optimization_barrier(tile_schedule(lens, 132))  # all of it, not what is used below
            lens = lens + made.metadata[0, 0]  # 0, which XLA cannot know
        return lens

    run = jax.jit(chain)
    lens = jnp.asarray(np.random.default_rng(0).integers(1, 9000, 128), jnp.int32)
    jax.block_until_ready(run(lens))
    walls = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(20):
            out = run(lens)
        jax.block_until_ready(out)
        walls.append((time.perf_counter() - begin) / 20 / times * 1e6)
    row = {"tile_schedule_us": round(statistics.median(walls), 2), "batch": 128, "parts": 132}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
