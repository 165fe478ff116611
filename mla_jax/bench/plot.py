"""The results of a benchmark as a picture."""

from pathlib import Path
from typing import Any

from mla_jax.errors import InputError
from mla_jax.explain import check_can_draw, picture_name


def draw(report: dict[str, Any], file: str | Path) -> str:
    """A bar per case: per cent of what the machine could do, ours and, where it was timed, FlashMLA's.

    Returns the name of the picture, which is a PNG if FILE says nothing else. Needs matplotlib
    (`pip install mla-jax[plot]`). Raises ValueError if it is missing, or the file cannot be written.
    """
    check_can_draw()
    from matplotlib.figure import Figure

    rows = [row for row in report["rows"] if "us" in row][::-1]
    figure = Figure(figsize=(8, 1.4 + 0.42 * max(len(rows), 1)), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        axes.barh(at + 0.18, row["percent_of_limit"], 0.34, color="C0", label="mla_jax" if at == 0 else None)
        note = f"{row['us']:.1f} µs"
        if "ratio" in row:
            theirs = row["percent_of_limit"] / row["ratio"]
            axes.barh(at - 0.18, theirs, 0.34, color="0.7", label="FlashMLA" if at == 0 else None)
            note += f", {row['ratio']:.2f} × FlashMLA's speed"
        axes.text(1, at + 0.18, note, va="center", fontsize=7, color="white")
    axes.axvline(100, color="0.4", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows], fontsize=8)
    axes.set(xlabel="per cent of the limit (memory or arithmetic, whichever binds)", xlim=(0, 110))
    axes.set_title(f"mla_decode on {report['device']}, {report['date'][:10]}", fontsize=10)
    if rows:
        axes.legend(loc="lower right", fontsize=8)
    try:
        figure.savefig(name := picture_name(file), dpi=150)
    except (OSError, ValueError) as e:
        raise InputError(f"{file} cannot be written ({e}).") from None
    return name
