"""Committed result files, and how their numbers are printed in README.md."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KERNELS, GPU, CPU = "mla_jax/bench/results", "tests/gpu/results", "tests/benchmarks/results"


def is_measured(folder: str, what: str) -> bool:
    """Whether there is such a result yet."""
    return any((ROOT / folder).glob(f"????-??-??-{what}.json"))


def newest(folder: str, what: str) -> tuple[str, Any]:
    """Path from the repository's root, and contents, of the last result of that name: `{date}-{what}.json`."""
    path = max((ROOT / folder).glob(f"????-??-??-{what}.json"))
    return str(path.relative_to(ROOT)), json.loads(path.read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    head = tuple(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def grouped(number: float, digits: int = 3) -> str:
    """Rounded to some leading digits, thousands apart."""
    return f"{float(f'{number:.{digits}g}'):,.0f}".replace(",", " ")


def microseconds(us: float) -> str:
    """With about three digits."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
