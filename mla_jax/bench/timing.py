"""Time on the device, without the time that it takes to start something there."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

FEW, MANY = 2, 18  # starts in a burst; what one start costs the host varies, and is divided by the difference
PAUSE = 0.01  # seconds between bursts: a card that computes without pause lowers its clock


@dataclass(frozen=True)
class Program:
    """Something to time: `start` returns at once, `wait` returns when what it returned is there.

    Attributes:
        calls: of what is timed, that each start makes.
    """

    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    calls: int = 1

    def warm_up(self) -> None:
        """What the first starts do once."""
        _burst(self, FEW)

    def seconds(self) -> float:
        """Of one call, measured once: a round of this program.

        The slope between starting it a few times and many times, so what starting costs does not count, as long as the
        device takes longer than that.
        """
        time.sleep(PAUSE)
        short, long = (min(_burst(self, times) for _ in range(2)) for times in (FEW, MANY))
        return (long - short) / ((MANY - FEW) * self.calls)


@dataclass(frozen=True)
class Times:
    """Of one program, in seconds, one for each round."""

    rounds: Sequence[float]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)

    @property
    def us(self) -> float:
        """The median in microseconds."""
        return round(self.median * 1e6, 2)

    def spread_us(self) -> list[float]:
        """Least and most of all rounds, in microseconds."""
        return [round(min(self.rounds) * 1e6, 2), round(max(self.rounds) * 1e6, 2)]


def _burst(program: Program, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        result = None  # so that the next one takes its memory: XLA rebuilds a CUDA graph whose addresses have changed
        result = program.start()
    program.wait(result)
    return time.perf_counter() - began
