"""`python -m mla_jax check`: the same problems through every implementation, one table."""

import argparse
import collections
import json
import sys
import time
from typing import Any

import jax

from mla_jax.check.compare import NAMES, Row, compare
from mla_jax.check.layers import compare_layers
from mla_jax.check.problems import problems
from mla_jax.cli.common import installed_versions, progress_bar
from mla_jax.errors import InputError

PACKAGES = ("mla-jax", "jax", "torch", "transformers", "sgl-flash-mla")


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "check",
        help="compare all implementations of attention",
        description="Runs decode problems, in the shapes of FlashMLA's own tests, through float64 NumPy and every "
        "implementation, and whole layers through transformers. Ends with exit code 1 if one fails or none could "
        "run; what cannot run here is skipped and says why.",
    )
    parser.add_argument(
        "--against",
        action="append",
        metavar="NAME",
        help=f"only these, comma-separated or repeated: {', '.join(NAMES)}; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="few problems, under 40 seconds on 2 cores")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command. Ends the program with exit code 1 if an implementation fails."""
    names = _names(args.against)
    began = time.perf_counter()
    rows: list[Row] = []
    if not args.json:
        print(_line("problem", "implementation", "", "max abs", "rel RMS", "lse error"))
    for problem in progress_bar(problems(quick=args.quick), unit="problem"):
        _add(rows, compare(problem, names), args.json)
    if args.against is None or "transformers" in names:
        others = NAMES if names == ("transformers",) else names
        for version in (3,) if args.quick else (2, 3):
            kinds = ("fp32",) if args.quick and jax.default_backend() == "cpu" else ("fp32", "bf16")
            _add(rows, compare_layers(version, others, kinds=kinds), args.json)
    counts = collections.Counter(row.status for row in rows)
    ok = not counts["fail"] and counts["pass"] > 0  # where nothing could run, nothing was checked
    seconds = round(time.perf_counter() - began, 1)
    report = {
        "rows": [row.as_json() for row in rows],
        "ok": ok,
        **{status: counts[status] for status in ("pass", "fail", "skip")},
        "device": jax.devices()[0].device_kind,
        "packages": installed_versions(PACKAGES),
        "quick": args.quick,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(report))
    else:
        _print_summary(rows, counts, seconds)
    if not ok:
        sys.stdout.flush()
        raise SystemExit(1)


def _names(against: list[str] | None) -> tuple[str, ...]:
    if against is None:
        return NAMES
    names = tuple(name.strip() for part in against for name in part.split(","))
    for name in names:
        if name not in NAMES:
            raise InputError(f"--against {name!r} is not known; choose from {', '.join(NAMES)}.")
    return names


def _add(rows: list[Row], more: list[Row], as_json: bool) -> None:
    rows += more
    if as_json:
        return
    for row in more:
        if row.status != "skip":
            numbers = (("" if n is None else f"{n:.1e}") for n in (row.max_abs, row.relative_rms, row.lse_error))
            print(_line(row.case, row.implementation, row.status, *numbers) + (f"  {row.reason}" if row.reason else ""))
        else:
            print(_line(row.case, row.implementation, row.status) + f"  {row.reason}")


def _line(case: str, name: str, status: str, *numbers: str) -> str:
    cells = "".join(f"{n:>10}" for n in numbers)
    return f"{case:<36} {name:<14} {status:<4}{cells}".rstrip()


def _print_summary(rows: list[Row], counts: collections.Counter[str], seconds: float) -> None:
    print(f"\n{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped in {seconds} s")
    skipped = collections.Counter((r.implementation, r.reason) for r in rows if r.status == "skip")
    for (name, reason), count in skipped.items():
        print(f"  {name}: {count} skipped: {reason}")
