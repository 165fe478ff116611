"""Is `python -m mla_jax bench` repeatable: two runs of it, one after the other, and whether they agree.

`python tests/benchmarks/bench_twice.py [CASE... OPTION...]` passes its arguments on. A case agrees if the medians of
the two runs differ by less than either run's spread, from least to most; it is *inside* if each median also lies within
the other run's spread. Exit code 1 if a case or a limit of the machine does not agree.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

COMPANY = 10  # per cent of the processors by which two runs may differ to be comparable


class Measured(NamedTuple):
    """A median, the least and the most."""

    median: float
    low: float
    high: float


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    reports = [_run(sys.argv[1:]) for _ in range(2)]
    first, second = (dict(_measured(report)) for report in reports)
    others = [report["others_percent"] or 0.0 for report in reports]
    print(f"Other programs took {others[0]:.0f} and {others[1]:.0f} % of the processors.")
    if abs(others[0] - others[1]) > COMPANY:
        print("So the two runs did not see the same machine: try again when others leave it alone.")
    print(f"{'':<34}{'first':>10}{'least … most':>22}{'second':>10}{'least … most':>22}{'differ':>9}")
    both = [name for name in first if name in second]
    bad = [name for name in both if not _compare(name, first[name], second[name])]
    bad += [f"{name} (not timed in both)" for name in first.keys() ^ second.keys()]
    print(f"{len(both)} compared" + (f"; these do not agree: {'; '.join(bad)}" if bad else ", all agree"))
    return 1 if bad else 0


def _compare(name: str, a: Measured, b: Measured) -> bool:
    difference = abs(a.median - b.median)
    agree = difference < min(a.high - a.low, b.high - b.low)
    inside = b.low <= a.median <= b.high and a.low <= b.median <= a.high
    spans = (f"{m.median:>10.5g}{f'{m.low:.5g} … {m.high:.5g}':>22}" for m in (a, b))
    words = ("agrees" if agree else "DIFFERS") + (", inside" if inside else "")
    print(f"{name:<34}{''.join(spans)}{difference / a.median:>9.1%} {words}")
    return agree


def _run(arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "mla_jax", "bench", "--json", *arguments]
    lines = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    if not lines:
        sys.exit("bench measured nothing; it said why above")
    return json.loads(lines[-1])  # also if some case failed


def _measured(report: dict[str, Any]) -> Iterator[tuple[str, Measured]]:
    for row in report["rows"]:
        if "us" in row:
            yield f"{row['case']}, µs", Measured(row["us"], *row["spread_us"])
    limits, spread = report["limits"], report["limits"]["spread"]
    for name in ("read_gbps", "copy_gbps"):
        yield name, Measured(limits[name], *spread[name])
    for name, rate in limits["matmul_tflops"].items():
        yield f"{name}, TFLOP/s", Measured(rate, *spread["matmul_tflops"][name])


if __name__ == "__main__":
    sys.exit(main())
