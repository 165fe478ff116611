"""README.md's table of kernel times: every case that was timed on a GPU, in the newest file that has it."""

import json
from pathlib import Path
from typing import Any

from mla_jax import FORMATS
from mla_jax.bench.cases import Case
from scripts.results import KERNELS, ROOT, grouped, table

HEAD = ("cache, requests, heads, new tokens, cached tokens", "implementation", "µs", "least … most", "FlashMLA, µs")
HEAD += ("times its speed", "GB/s", "TFLOP/s", "% of the limit", "run")
UNNAMED = "mosaic_gpu"  # what results timed before they named it


def kernels() -> str:
    """The table, and a line per file with the command, machine and date."""
    rows, reports = newest_rows()
    used = sorted({row["file"] for row in rows.values()})
    letters = {file: chr(ord("a") + i) for i, file in enumerate(used)}
    cases = sorted((Case.parse(name) for name in rows), key=_order)
    lines = (_line(case, rows[case.name], letters) for case in cases)
    return (
        table(HEAD, lines) + "\n\n" + "\n".join(f"- {letters[file]}: {_source(file, reports[file])}" for file in used)
    )


def newest_rows() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Rows by case, each with its file, and reports by file."""
    paths = (ROOT / KERNELS).glob("*.json")
    reports = {str(p.relative_to(ROOT)): json.loads(p.read_text()) for p in paths}
    rows = {}
    for file, report in sorted(reports.items(), key=lambda item: item[1]["date"]):
        if report["device"] != "cpu":
            rows |= {row["case"]: row | {"file": file} for row in report["rows"] if "us" in row}
    return rows, reports


def _order(case: Case) -> tuple[Any, ...]:
    return list(FORMATS).index(case.format), case.tokens, -case.heads, -len(case.lens), sum(case.lens)


def _line(case: Case, row: dict[str, Any], letters: dict[str, str]) -> tuple[str, ...]:
    peer, ratio = "–", "–"
    if "peer_us" in row:
        peer, ratio = f"{row['peer_us']:.1f}", f"{row['peer_us'] / row['us']:.2f}"
        ratio += " (slower)" if row["peer_us"] < row["us"] else ""
    return (
        f"{case.format}, {len(case.lens)}, {case.heads}, {case.tokens}, {_lengths(case)}",
        row.get("implementation", UNNAMED),
        f"{row['us']:.1f}",
        " … ".join(f"{us:.1f}" for us in row["spread_us"]),
        peer,
        ratio,
        grouped(row["gbps"], 4),
        f"{row['tflops']:.0f}",
        f"{row['percent_of_limit']:.0f}",
        letters[row["file"]],
    )


def _lengths(case: Case) -> str:
    if min(case.lens) == max(case.lens):
        return f"{case.lens[0] // 1024}k"
    if case.name.endswith("~"):
        return "~" + case.name.split("_")[-1].rstrip("~")
    return f"one of {max(case.lens) // 1000}k among 2k to 5k"


def _source(file: str, report: dict[str, Any]) -> str:
    wanted = (name for name in report["versions"] if name not in ("mla-jax", "jaxlib"))
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in wanted if report["versions"][name])
    commit = f", commit {report['commit']}" if "commit" in report else ""
    made = f"{report['device']}, {report['date'][:10]}, {versions}{commit}"
    return f"[{Path(file).name}]({file}): {made}; `{report['command']}`"
