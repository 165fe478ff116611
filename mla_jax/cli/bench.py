"""`python -m mla_jax bench`: device time of `mla_decode` on named cases, beside the machine's limits and FlashMLA."""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from mla_jax.attention.mosaic_gpu.config import KernelConfig
from mla_jax.bench.cases import CPU_CASES, GPU_CASES, Case
from mla_jax.bench.plot import draw
from mla_jax.bench.run import Wanted, peer_cannot_run
from mla_jax.bench.settings import parse_settings
from mla_jax.bench.turns import Results, run_cases, steps
from mla_jax.cli.common import check_can_write, installed_versions, physical_memory, progress_bar
from mla_jax.errors import InputError
from mla_jax.explain import check_can_draw

PACKAGES = ("mla-jax", "jax", "jaxlib", "torch", "sgl-flash-mla")


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("bench", help="time mla_decode on this machine")
    parser.add_argument(
        "cases", nargs="*", help="such as bf16_b128_h64_s1_4k, with ~ for ragged lengths; default: some for the device"
    )
    parser.add_argument("--implementation", metavar="NAME", help="of mla_decode; default: the fastest that can run")
    parser.add_argument("--against", choices=("flash_mla",), help="time this beside it, in the same process")
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="measurements of each case, taken in turns; default 15"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="processes that compile at once, to measure in turns; default 1",
    )
    parser.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="FIELD=VALUE,…",
        help="time the Hopper kernel with these, too; may be given more than once",
    )
    parser.add_argument("--output", metavar="FILE", help="write the results there as JSON, after every round")
    parser.add_argument("--plot", metavar="FILE", help="draw them (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    for option in ("rounds", "jobs"):
        if getattr(args, option) < 1:
            raise InputError(f"--{option} must be at least 1, got {getattr(args, option)}.")
    for option, file in (("--output", args.output), ("--plot", args.plot)):
        if file is not None:
            check_can_write(file, option)
    if args.plot is not None:
        check_can_draw()
    if args.jobs > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share a GPU's memory
    names = args.cases or (CPU_CASES if jax.default_backend() == "cpu" else GPU_CASES)
    cases = [Case.parse(name) for name in names]
    reason = None if args.against is None else peer_cannot_run()
    if reason is not None:
        raise NotImplementedError(f"--against {args.against} cannot run: {reason.rstrip('.')}.")
    for text in args.settings:
        parse_settings(text, KernelConfig())
    for case in cases:
        _check_case(case, args.implementation, alone=len(cases) == 1)
    report = _run(cases, Wanted(args.implementation, args.against is not None, tuple(args.settings), args.rounds), args)
    print(json.dumps(report) if args.json else _text(report), flush=True)
    if args.plot is not None:
        print(f"Picture written to {draw(report, args.plot)}", file=sys.stderr)
    if any("failed" in row for row in report["rows"]) or all("skipped" in row for row in report["rows"]):
        sys.exit(1)  # also if nothing was timed


def _run(cases: list[Case], wanted: Wanted, args: argparse.Namespace) -> dict[str, Any]:
    """The report, which is written to --output whenever something was found."""
    results, budget = Results(cases), _memory_budget()
    total = steps(cases, wanted.rounds, budget)
    for what in progress_bar(run_cases(results, wanted, args.jobs, budget), unit="step", total=total):
        report = _report(results)
        if len(cases) == 1 and "skipped" in (report["rows"] or [{}])[0]:
            raise NotImplementedError(report["rows"][0]["skipped"])
        if args.output is not None:
            _write(Path(args.output), json.dumps(report, indent=1) + "\n")
        _log(what)
    for row in report["rows"]:
        _log(_line(row))
    return report


def _write(file: Path, text: str) -> None:
    """All of it or nothing, so that whoever reads it meanwhile, or after a crash, finds a report."""
    beside = file.with_name(f".{file.name}.new")
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):  # a link stays one; a device, a pipe
            file.write_text(text)
            return
        beside.write_text(text)
        beside.replace(file)
    except OSError as error:  # what is measured is worth more than the file
        print(f"warning: --output: {error}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _memory_budget() -> float:
    """Bytes that cases may hold together; what they compute with comes on top."""
    if jax.default_backend() == "cpu":
        return physical_memory() / 4
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**34) / 2


def _log(line: str) -> None:
    if not sys.stderr.isatty():  # a log, which should show how far it came
        print(line, file=sys.stderr, flush=True)


def _check_case(case: Case, implementation: str | None, *, alone: bool) -> None:
    """Raises what `run_case` would, before the machine's limits are measured."""
    if case.held_bytes > 2 * _memory_budget():
        raise InputError(
            f"{case.name} takes {case.held_bytes / 2**30:.0f} GiB with its queries, too much for this machine."
        )
    try:
        case.implementation(implementation)
    except NotImplementedError:
        if alone:
            raise


def _report(results: Results) -> dict[str, Any]:
    limits = results.limits
    return {
        "rows": results.rows(),
        "limits": None if limits is None else dataclasses.asdict(limits),
        "span_s": round(results.span_s, 1),
        "others_percent": results.others_percent,
        "device": jax.devices()[0].device_kind,
        "versions": installed_versions(PACKAGES),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m mla_jax", *sys.argv[1:]]),
    }


def _text(report: dict[str, Any]) -> str:
    others = report["others_percent"]
    company = "" if others is None else f"; other programs took {others:.0f} % of the processors"
    head = f"{'case':<26}{'implementation':<16}{'µs':>10}  {'least … most':>20}"
    return "\n".join(
        [
            f"{report['device']}; medians of rounds in turns over {report['span_s']:.0f} s, least and most{company}",
            *_limit_lines(report["limits"]),
            f"{head}{'TFLOP/s':>9}{'GB/s':>8}{'% of limit':>12}{'× peer':>8}",
            *(_line(row) for row in report["rows"]),
        ]
    )


def _limit_lines(limits: dict[str, Any]) -> list[str]:
    spread = limits["spread"]
    found = [("reads", "GB/s", limits["read_gbps"], spread["read_gbps"])]
    found += [("copies", "GB/s", limits["copy_gbps"], spread["copy_gbps"])]
    for name, rate in limits["matmul_tflops"].items():
        found.append((f"multiplies {name}", "TFLOP/s", rate, spread["matmul_tflops"][name]))
    return [
        f"    {name:<38}{rate:>10.4g}  {f'{low:.4g} … {high:.4g}':>20} {unit}"
        for name, unit, rate, (low, high) in found
    ]


def _line(row: dict[str, Any]) -> str:
    if "us" not in row:
        return f"{row['case']:<26}{row.get('skipped') or row['failed']}"
    low, high = row["spread_us"]
    ratio = f"{row['ratio']:.3f}" if "ratio" in row else "–"
    lines = [
        f"{row['case']:<26}{row['implementation']:<16}{row['us']:>10.1f}  {f'{low:.1f} … {high:.1f}':>20}"
        f"{row['tflops']:>9.4g}{row['gbps']:>8.4g}{row['percent_of_limit']:>12.1f}{ratio:>8}"
    ]
    if "peer_us" in row:
        lines.append(_other_line(row["peer"], row["peer_us"], row["peer_spread_us"]))
    lines += [_other_line(other["settings"], other["us"], other["spread_us"]) for other in row.get("settings", [])]
    return "\n".join(lines)


def _other_line(name: str, us: float, spread_us: list[float]) -> str:
    low, high = spread_us
    return f"    {name:<38}{us:>10.1f}  {f'{low:.1f} … {high:.1f}':>20}"
