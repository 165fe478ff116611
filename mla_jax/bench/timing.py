"""Time on the device, without the time that it takes to start something there."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

FEW, MANY = 2, 18  # starts in a burst; what one start costs the host varies, and is divided by the difference
PAUSE = 0.01  # seconds between bursts: a card that computes without pause lowers its clock


@dataclass(frozen=True)
class Program:
    """Something to time: `start` returns at once, `wait` returns when what it returned is there."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready


@dataclass(frozen=True)
class Times:
    """Of one program, in seconds, one for each round."""

    rounds: list[float]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)

    def spread_us(self) -> list[float]:
        """Least and most, in microseconds."""
        return [round(min(self.rounds) * 1e6, 2), round(max(self.rounds) * 1e6, 2)]


def measure(programs: Mapping[str, Program], calls: int, rounds: int) -> dict[str, Times]:
    """Seconds per call of programs that make so many calls, taken in turns, so that all see the same machine.

    A time is the slope between starting a program a few times and many times, so what starting costs does not count,
    as long as the device takes longer than that.
    """
    for program in programs.values():
        _seconds(program, FEW)
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            time.sleep(PAUSE)
            short, long = (min(_seconds(program, times) for _ in range(2)) for times in (FEW, MANY))
            found[name].append((long - short) / ((MANY - FEW) * calls))
    return {name: Times(rounds) for name, rounds in found.items()}


def _seconds(program: Program, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        result = program.start()
    program.wait(result)
    return time.perf_counter() - began
