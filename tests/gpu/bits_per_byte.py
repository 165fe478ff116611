"""Bits per byte of the demo model by cache and implementation, `bits_per_byte.py --json FILE`.

The held-out sample through `evaluate`, weights in bf16: the second half of each window goes through `mla_decode`, 32
tokens a step or one, as when it writes. `excess` is relative to "xla" with a bf16 cache and as many tokens a step.
Queries are bf16, or e4m3 with a factor for each row (`fp8_queries`).
"""

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import stack

from mla_jax.decode.accept import accept_length
from mla_jax.decode.calibrate import calibrate
from mla_jax.decode.evaluate import evaluate
from mla_jax.demo import HELDOUT
from mla_jax.speculative.config import Speculation

CALIBRATION = Path(__file__).parents[1] / "data" / "calibration.txt"  # not of the sample
BASE = ("xla", "bf16")


@dataclass(frozen=True)
class Cache:
    """Its format, whether with the scales of `calibrate`, and whether queries are e4m3 too."""

    kv_format: str
    calibrated: bool = False
    e4m3_queries: bool = False


CACHES = {
    "bf16": Cache("bf16"),
    "fp8_e4m3": Cache("fp8_e4m3"),
    "fp8_e4m3,calibrated": Cache("fp8_e4m3", calibrated=True),
    "fp8_e4m3,calibrated,e4m3_queries": Cache("fp8_e4m3", calibrated=True, e4m3_queries=True),
    "fp8_ds_mla": Cache("fp8_ds_mla"),
}


@dataclass(frozen=True)
class Job:
    """One score."""

    implementation: str
    cache: str
    tokens_per_step: int
    windows: int
    max_bytes: int | None
    draft: str | None


def main() -> None:
    """Prints a row per score and writes all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--implementations", nargs="+", default=["xla", "mosaic_gpu"])
    parser.add_argument("--caches", nargs="+", choices=tuple(CACHES), default=list(CACHES))
    parser.add_argument("--tokens-per-step", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--windows", type=int, default=64, help="of the sample at a time, requests of a step")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="of the sample; default: all")
    parser.add_argument("--draft", metavar="1-1-2", help="count the tokens that such drafts keep too")
    parser.add_argument("--jobs", type=int, default=16, help="processes")
    args = parser.parse_args()
    started = time.perf_counter()
    jobs = [
        Job(implementation, cache, tokens, args.windows, args.max_bytes, args.draft if tokens == 1 else None)
        for tokens, cache, implementation in itertools.product(args.tokens_per_step, args.caches, args.implementations)
    ]
    rows = []
    for row in run_all(jobs, args.jobs):
        add_excess(row, rows)
        rows.append(row)
        print(json.dumps(row), flush=True)
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": rows[0]["device"],
        "seconds": round(time.perf_counter() - started, 1),
        "rows": [{k: v for k, v in row.items() if k != "device"} for row in rows],
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def run_all(jobs: list[Job], processes: int) -> Iterator[dict[str, Any]]:
    """Rows in order. Most of the time is compilation."""
    if processes == 1:
        yield from map(score, jobs)
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share a GPU's memory
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        yield from pool.map(score, jobs)


def score(job: Job) -> dict[str, Any]:
    """A row."""
    jax.clear_caches()  # what is patched below is no part of their keys
    cache = CACHES[job.cache]
    config, params = stack.demo()
    if cache.calibrated:
        params = replace(params, kv_scales=calibrate(params, config, list(CALIBRATION.read_bytes())).scales)
    text = list(HELDOUT.read_bytes())
    how = {"kv_format": cache.kv_format, "fp8_queries": cache.e4m3_queries, "implementation": job.implementation}
    row: dict[str, Any] = {"implementation": job.implementation, "cache": job.cache}
    row |= {"tokens_per_step": job.tokens_per_step, "device": jax.devices()[0].device_kind}
    with patched(job):
        try:
            found = evaluate(params, config, text[: job.max_bytes], **how)
        except NotImplementedError as e:
            return row | {"skipped": str(e)}
        except Exception as e:  # the others are worth having
            return row | {"failed": f"{type(e).__name__}: {e}"[:500]}
        row |= {"bits_per_byte": found.bits_per_byte, "scored_tokens": found.scored_tokens}
        if job.draft is not None:
            speculation = Speculation(*(int(n) for n in job.draft.split("-")))
            row |= {"draft": job.draft, "accept_length": accept_length(params, config, text, speculation, **how).mean}
    return row


@contextlib.contextmanager
def patched(job: Job) -> Iterator[None]:
    """So many tokens a step and windows at a time."""
    with (
        mock.patch("mla_jax.decode.evaluate.DECODE_CHUNK", job.tokens_per_step),
        mock.patch("mla_jax.decode.evaluate.BATCH", job.windows),
    ):
        yield


def add_excess(row: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Relative to the base with as many tokens a step, which comes first."""
    same = [r for r in [*earlier, row] if r["tokens_per_step"] == row["tokens_per_step"]]
    base = next((r for r in same if (r["implementation"], r["cache"]) == BASE), None)
    if base is not None and "bits_per_byte" in row:
        row["excess"] = row["bits_per_byte"] / base["bits_per_byte"] - 1


if __name__ == "__main__":
    main()
