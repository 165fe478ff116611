"""Who else used the processors: two runs on a CPU can only be compared if others left it alone, or kept at it."""

import multiprocessing
import os
import time
from pathlib import Path


class Company:
    """Counts from its making on what others take of the processors' time."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def percent(self) -> float | None:
        """Of all processors' time, used by other processes or given to other machines; None if nobody says."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = busy - self._busy - (_own_seconds() - self._own)
        available = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        return round(100 * min(max(others / available, 0.0), 1.0), 1)


def _busy_seconds() -> float | None:
    """Of all processors since the machine started."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _own_seconds() -> float:
    """Of this process and those that it has started."""
    seconds = time.process_time()
    for child in multiprocessing.active_children():
        try:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # it has ended
    return seconds
