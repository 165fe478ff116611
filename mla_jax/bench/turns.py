"""Runs the cases of a benchmark in turns: a round of each, then the next of each, so that all see the same machine.

A machine's speed drifts within seconds. If the rounds of a case followed each other, its spread would say how steady
the machine was in that moment, and the next run would lie outside of it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mla_jax.bench.cases import Case, in_groups
from mla_jax.bench.company import Company
from mla_jax.bench.limits import Limits, factors, limit_programs
from mla_jax.bench.run import Ready, Wanted, row_of
from mla_jax.bench.share import Elsewhere, Here, Reason, Share
from mla_jax.bench.timing import Times

Row = dict[str, Any]


class Results:
    """What has been found so far of cases, which are known by their place."""

    def __init__(self, cases: Sequence[Case]):
        self.cases = list(cases)
        self.span_s = 0.0  # of all rounds
        self.others_percent: float | None = None  # of the processors' time in the last group's rounds
        self._ready: dict[int, Ready] = {}
        self._reasons: dict[int, Reason] = {}
        self._seconds: dict[int, dict[str, list[float]]] = {}
        self._limits: dict[str, list[float]] = {}

    def add_ready(self, at: int, ready: Ready | Reason) -> None:
        """A case was compiled, or cannot be."""
        if isinstance(ready, Ready):
            self._ready[at] = ready
        else:
            self._reasons[at] = ready

    def add_limits(self, seconds: Mapping[str, float]) -> None:
        """A round of the machine's limits."""
        for name, value in seconds.items():
            self._limits.setdefault(name, []).append(value)

    def add_round(self, at: int, seconds: Mapping[str, Any]) -> None:
        """A round of a case: seconds by program, or why there are none."""
        if "failed" in seconds or "skipped" in seconds:
            self._reasons.setdefault(at, dict(seconds))
            return
        programs = self._seconds.setdefault(at, {name: [] for name in seconds})
        for name, value in seconds.items():
            programs[name].append(value)

    @property
    def limits(self) -> Limits | None:
        """Of the machine; None before the first round."""
        return Limits.of({name: Times(rounds) for name, rounds in self._limits.items()}) if self._limits else None

    def rows(self) -> list[Row]:
        """Of all cases that were timed, or cannot be, in order; why not is under `skipped` or `failed`."""
        found = (self._row(at) for at in range(len(self.cases)))
        return [row for row in found if row is not None]

    def _row(self, at: int) -> Row | None:
        case, limits = self.cases[at], self.limits
        if at in self._reasons:
            return {"case": case.name} | self._reasons[at]
        if at not in self._seconds or limits is None:
            return None
        times = {name: Times(rounds) for name, rounds in self._seconds[at].items()}
        return row_of(case, self._ready[at], times, limits)


def steps(cases: Sequence[Case], rounds: int, budget: float) -> int:
    """How often `run_cases` says something, with these arguments."""
    return len(cases) + rounds * len(_groups(cases, budget))


def run_cases(results: Results, wanted: Wanted, jobs: int, budget: float) -> Iterator[str]:
    """Fill the results; says what it has done after each step.

    Cases that hold more than `budget` bytes together are run in several groups, one after the other. With jobs, several
    processes compile at once; they measure in turns, when all of a group is compiled, since short programs are late on
    a machine whose cores are busy.
    """
    limits = limit_programs(name for case in results.cases for name in factors(case))
    for program in limits.values():
        program.warm_up()
    shares: list[Share] = [Here(wanted)]
    if jobs > 1:
        shares = [Elsewhere(wanted) for _ in range(min(jobs, len(results.cases)))]
    for group in _groups(results.cases, budget):
        yield from _compile(group, shares, results)
        began, company = time.monotonic() - results.span_s, Company()
        for number in range(1, wanted.rounds + 1):
            results.add_limits({name: program.seconds() for name, program in limits.items()})
            for share in shares:
                for at, found in share.round().items():
                    results.add_round(at, found)
            results.span_s, results.others_percent = time.monotonic() - began, company.percent()
            yield f"round {number} of {wanted.rounds}"


def _compile(group: dict[int, Case], shares: Sequence[Share], results: Results) -> Iterator[str]:
    places = list(group)
    for i, share in enumerate(shares):
        share.begin({at: group[at] for at in places[i :: len(shares)]})
    waiting = [share.ready() for share in shares]
    for i in range(len(places)):
        at, ready = next(waiting[i % len(shares)])
        results.add_ready(at, ready)
        yield f"{group[at].name} is compiled" if isinstance(ready, Ready) else f"{group[at].name} cannot be timed"


def _groups(cases: Sequence[Case], budget: float) -> list[dict[int, Case]]:
    return in_groups(dict(enumerate(cases)), budget)
