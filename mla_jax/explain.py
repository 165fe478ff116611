"""A tile schedule in words and pictures: which part computes which pages of which request."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.errors import InputError
from mla_jax.schedule import REQUEST_OVERHEAD, tile_schedule

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
BAR_WIDTH = 64  # characters
MAX_PARTS = 65_536  # far beyond any GPU; a larger number is a slip
SHOWN_PARTS = 40  # lines of the text chart, unless all are asked for


@dataclass(frozen=True)
class Piece:
    """Blocks first_block … end_block − 1 of a request, done by one part. An empty request is a piece of 0 blocks.

    Attributes:
        cost: in units of one block: what the scheduler counts for starting and ending a request in a part comes on top.
    """

    part: int
    request: int
    first_block: int
    end_block: int
    split: int
    num_splits: int
    cost: int


@dataclass(frozen=True)
class Explanation:
    """What `explain` returns; `str()` of it is its text.

    Attributes:
        kv_lens: tokens per request.
        num_parts: parts that share the work.
        pieces: in the order in which the parts take them.
        request_overhead: blocks that the scheduler counts for starting and ending a request in a part.
    """

    kv_lens: tuple[int, ...]
    num_parts: int
    pieces: tuple[Piece, ...]
    request_overhead: int = REQUEST_OVERHEAD

    @property
    def load(self) -> list[int]:
        """Cost of each part's work, in blocks; 0 for an idle part."""
        load = [0] * self.num_parts
        for piece in self.pieces:
            load[piece.part] += piece.cost
        return load

    @property
    def balance(self) -> float:
        """Mean load of all parts over the largest: 1 is perfect, and the share of time that an average part works."""
        return sum(self.load) / self.num_parts / max(self.load)

    @property
    def num_blocks(self) -> int:
        """Pages of 64 tokens that are read."""
        return sum(piece.end_block - piece.first_block for piece in self.pieces)

    @property
    def num_split_requests(self) -> int:
        """Requests that more than one part works on; their partial results are merged afterwards."""
        return len({piece.request for piece in self.pieces if piece.num_splits > 1})

    def summary(self) -> dict[str, float | int | list[int]]:
        """The numbers, for JSON."""
        load = self.load
        return {
            "requests": len(self.kv_lens),
            "blocks": self.num_blocks,
            "request_overhead": self.request_overhead,
            "parts": self.num_parts,
            "idle_parts": load.count(0),
            "largest_load": max(load),
            "mean_load": round(sum(load) / self.num_parts, 2),
            "balance": round(self.balance, 4),
            "split_requests": self.num_split_requests,
            "splits": [max(p.num_splits for p in self.pieces if p.request == r) for r in range(len(self.kv_lens))],
        }

    def chart(self, all_parts: bool = False) -> str:
        """A line per working part: its load as a bar, a letter per request, and the pieces in words."""
        by_part: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            by_part.setdefault(piece.part, []).append(piece)
        scale = min(1.0, BAR_WIDTH / max(self.load))
        width = round(max(self.load) * scale)
        shown = list(by_part.items())[: None if all_parts else SHOWN_PARTS]
        lines = [
            f"part {part:>{len(str(self.num_parts))}}  {_bar(pieces, scale):<{width}}  "
            + ", ".join(_in_words(piece) for piece in pieces)
            for part, pieces in shown
        ]
        if len(shown) < len(by_part):
            lines.append(f"… and {len(by_part) - len(shown)} more working parts")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def text(self, all_parts: bool = False) -> str:
        """The numbers in three lines, then the chart."""
        s = self.summary()
        unit = "one character is one block" if max(self.load) <= BAR_WIDTH else f"scaled to {BAR_WIDTH} characters"
        return (
            f"{s['requests']} requests, {s['blocks']} blocks of {PAGE_SIZE} tokens, {s['parts']} parts, "
            f"{s['idle_parts']} of them idle\n"
            f"Load of a part in blocks (a request in a part costs {self.request_overhead} more): "
            f"largest {s['largest_load']}, mean {s['mean_load']}, balance {self.balance:.1%}\n"
            f"Requests split over several parts: {s['split_requests']}; the most splits of one: "
            f"{max(p.num_splits for p in self.pieces)}\n\n"
            f"{self.chart(all_parts)}\n\n({unit}; · is the cost of starting and ending a request)"
        )


def explain(
    kv_lens: Sequence[int] | np.ndarray | jax.Array, num_parts: int, request_overhead: int = REQUEST_OVERHEAD
) -> Explanation:
    """Who computes what when `tile_schedule` divides these requests over num_parts parts.

    Args:
        kv_lens: tokens per request, one or more, 0 allowed.
        num_parts: from `num_sm_parts`.
        request_overhead: as `tile_schedule` takes it: FlashMLA's by default.

    Raises:
        ValueError: no request, a negative length, no part, or an overhead out of range.
    """
    lengths = np.asarray(kv_lens)
    whole = lengths.ndim == 1 and lengths.size > 0 and np.issubdtype(lengths.dtype, np.integer)
    if not whole or lengths.min() < 0 or lengths.max() >= 2**31:
        raise InputError(f"kv_lens must be one or more lengths from 0 to 2³¹ − 1, got {lengths.tolist()!r:.80}.")
    if not 1 <= num_parts <= MAX_PARTS:
        raise InputError(f"num_parts must be from 1 to {MAX_PARTS}, got {num_parts}.")
    lens: list[int] = lengths.tolist()
    blocks = [-(-n // PAGE_SIZE) for n in lens]
    if sum(blocks) + request_overhead * len(lens) >= 2**31:
        raise InputError(f"kv_lens: all blocks together, {request_overhead} more per request, must be fewer than 2³¹.")
    schedule = tile_schedule(jnp.asarray(lens, jnp.int32), num_parts, request_overhead=request_overhead)
    rows, first_split = np.asarray(schedule.metadata), np.asarray(schedule.num_splits)
    pieces = []
    for part, (begin, end, begin_block, end_block, begin_split, *_) in enumerate(rows.tolist()):
        if begin == len(lens):
            continue
        for request in range(begin, end + 1):
            first = begin_block if request == begin else 0
            last = end_block if request == end else blocks[request]
            split = begin_split if request == begin else 0
            num_splits = int(first_split[request + 1] - first_split[request])
            pieces.append(Piece(part, request, first, last, split, num_splits, last - first + request_overhead))
    return Explanation(tuple(lens), num_parts, tuple(pieces), request_overhead)


def check_can_draw() -> None:
    """Raises ValueError in one sentence without matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("A picture needs matplotlib; install it with: pip install 'mla-jax[plot]'.") from None


def picture_name(file: str | Path) -> str:
    """What a picture that is to be written to FILE will be called: matplotlib adds .png to a name without a suffix."""
    name = str(file)
    return name if os.path.splitext(name)[1][1:] else name.rstrip(".") + ".png"


def plot(explanation: Explanation, file: str | Path) -> str:
    """Draws the schedule as a picture: a row per part, a coloured bar per piece.

    Returns the picture's name, which is a PNG if FILE says nothing else. Needs matplotlib
    (`pip install mla-jax[plot]`). Raises ValueError if it is missing or the file cannot be written.
    """
    check_can_draw()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, max(2.0, min(24.0, 0.9 + 0.17 * explanation.num_parts))), layout="constrained")
    axes = figure.add_subplot()
    start = [0] * explanation.num_parts
    for piece in explanation.pieces:
        left = start[piece.part]
        bar = axes.barh(
            piece.part,
            piece.cost,
            left=left,
            height=0.9,
            color=f"C{piece.request % 10}",
            edgecolor="white",
            linewidth=0.4,
            hatch="//" if piece.num_splits > 1 else None,
        )
        axes.bar_label(
            bar,
            [str(piece.request)],
            label_type="center",
            fontsize=7,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
        start[piece.part] += piece.cost
    axes.axvline(sum(start) / len(start), color="0.5", linewidth=1, linestyle="--", label="mean load")
    axes.set(
        xlabel=f"load (blocks of {PAGE_SIZE} tokens, {explanation.request_overhead} more per request)",
        ylabel="part",
        title=f"{len(explanation.kv_lens)} requests on {explanation.num_parts} parts, balance "
        f"{explanation.balance:.0%} (hatched: a split request; numbers: the request)",
    )
    axes.invert_yaxis()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower right", frameon=False)
    if Path(file).is_dir():
        raise InputError(f"{file} is a folder; name the picture, such as {Path(file) / 'schedule.png'}.")
    try:
        figure.savefig(name := picture_name(file), dpi=150)
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or str(e).split(" (")[0]
        raise InputError(f"{file} cannot be written ({reason}).") from None
    return name


def _bar(pieces: list[Piece], scale: float) -> str:
    bar = ""
    for piece in pieces:
        letter = LETTERS[piece.request % len(LETTERS)]
        work = round((piece.end_block - piece.first_block) * scale)
        bar += letter * work + "·" * max(round(piece.cost * scale) - work, 0)
    return bar


def _in_words(piece: Piece) -> str:
    letter = LETTERS[piece.request % len(LETTERS)]
    if piece.first_block == piece.end_block:
        return f"{letter}: request {piece.request} (empty)"
    words = f"{letter}: request {piece.request}, blocks {piece.first_block}–{piece.end_block - 1}"
    return words + (f" (split {piece.split + 1} of {piece.num_splits})" if piece.num_splits > 1 else "")
