"""Drafts and an FP8 cache together: steps of a stack of DeepSeek-V3's attention, `end_to_end.py --json FILE`.

Plain bf16, FP8, MTP and MTP + FP8, each FP8 with queries in bf16 and in e4m3 (+q), with the same kernel, 8k tokens in
the cache. A process per heads, requests and
draft times all caches: all compile side by side, then time in turns (`step_time.py`). Tokens per second follow from
the time of a step and the tokens that it keeps of a draft: as many as the demo model keeps (`make bench-drafts`), or as
a model would whose drafts are each right with a given probability. Random weights keep hardly any.
"""

import argparse
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ACCEPTED = HERE.parent / "benchmarks" / "results"
FORMATS = ("bf16", "fp8_e4m3", "fp8_e4m3+q")  # the last with queries in e4m3 too
RIGHT = (0.7, 0.8, 0.9)  # DeepSeek-V3's report says 0.85 to 0.9 of the second token

Rows = list[dict[str, Any]]


def main() -> None:
    """Prints a row per case and writes all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--drafts", nargs="+", default=["off", "1-1-2", "3-1-4"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="the first is what others beat")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--implementation", default="mosaic_gpu")
    parser.add_argument("--run", type=int, default=48, help="steps in a row; three such runs are timed")
    parser.add_argument("--limit", type=int, default=240, help="seconds that all of it may take")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reports = list(run_all(args, Path(folder)))
    if not reports:
        sys.exit("No process came to an end.")
    file, accepted = accept_lengths()
    rows = [row for report in reports for row in report["rows"]]
    add_speeds(rows, accepted, args.formats[0])
    for row in rows:
        print(json.dumps(row), flush=True)
    result = {
        "what": "steps with drafts and FP8 caches, random latents in them; many compiled at once, so that took long",
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": reports[0]["jax"],
        "device": reports[0]["device"],
        "accept_lengths": {"measured": {"file": file, **accepted}} | {str(p): expected(args.drafts, p) for p in RIGHT},
        "rows": rows,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")


def run_all(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What each process found; the last words of those that failed."""
    cases = list(itertools.product(args.heads, args.batch, args.drafts))
    # A process has the GPU to itself when it is its turn, and takes no more of it before than compiling does. What
    # makes weights and caches is compiled once for all.
    about = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    about |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    running, end = [], time.monotonic() + args.limit
    for i, case in enumerate(cases):
        with (folder / f"{i}.err").open("w") as log:
            command = command_of(args, folder, i, len(cases), *case)
            running.append(subprocess.Popen(command, env=about | os.environ, stdout=log, stderr=log))
    for i, process in enumerate(running):
        try:
            process.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
        if (report := folder / f"{i}.json").exists():
            yield json.loads(report.read_text())
        else:
            print(cases[i], (folder / f"{i}.err").read_text()[-600:], file=sys.stderr)


def command_of(
    args: argparse.Namespace, folder: Path, index: int, processes: int, heads: int, batch: int, draft: str
) -> list[str]:
    """That times one case with all formats."""
    options = {
        "--json": folder / f"{index}.json",
        "--model": "v3",
        "--layers": args.layers,
        "--heads": heads,
        "--batch": batch,
        "--context": args.context,
        "--mtp": draft,
        "--implementations": args.implementation,
        "--steps": 8,
        "--run": args.run,
        "--after": processes,
        "--meet": folder / "meet",
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, str(HERE / "step_time.py"), *words, "--formats", *args.formats]


def accept_lengths() -> tuple[str, dict[str, float]]:
    """The newest file, and greedy tokens per step of the demo model by draft."""
    path = max(ACCEPTED.glob("????-??-??-accept-lengths.json"))
    rows = json.loads(path.read_text())["rows"]
    return path.name, {"off": 1.0} | {r["draft"]: r["accept_length"] for r in rows if r["temperature"] == 0}


def expected(drafts: list[str], right: float) -> dict[str, float]:
    """Tokens per step by draft if each token of a chain is right with that probability, and behind a wrong one none."""
    depths = {draft: 0 if draft == "off" else int(draft.split("-")[0]) for draft in drafts}
    return {draft: round(sum(right**i for i in range(depth + 1)), 4) for draft, depth in depths.items()}


def add_speeds(rows: Rows, accepted: dict[str, float], base_format: str) -> None:
    """Adds tokens per second to each row that was timed, and how much more than without drafts in the first format."""
    timed = [row for row in rows if "wall_us" in row]
    for row in timed:
        kept = {"measured": accepted[row["mtp"]]} | {str(p): expected([row["mtp"]], p)[row["mtp"]] for p in RIGHT}
        row["tokens_per_second"] = {by: round(row["batch"] * n / row["wall_us"] * 1e6, 1) for by, n in kept.items()}
    plain = {(r["heads"], r["batch"]): r for r in timed if (r["mtp"], r["kv_format"]) == ("off", base_format)}
    for row in timed:
        if base := plain.get((row["heads"], row["batch"])):
            speeds = base["tokens_per_second"]
            row["gain"] = {by: round(n / speeds[by] - 1, 4) for by, n in row["tokens_per_second"].items()}
            row["cache_against_plain"] = round(row["cache_bytes"] / base["cache_bytes"], 4)


if __name__ == "__main__":
    main()
