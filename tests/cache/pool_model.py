"""The page pool in plain Python: lists of page objects, no arrays. Shared by the tests of pages and cache."""

import re
from dataclasses import dataclass, field

import numpy as np


class Page:
    """A page; its identity is all that matters."""


@dataclass
class Sequence:
    history: list[int] = field(default_factory=list)  # the token value of every row
    pages: list[Page] = field(default_factory=list)


class PoolModel:
    """What `PagePool` and `PagedKVCache` promise, one sequence at a time."""

    def __init__(self, num_pages: int, max_seqs: int, width: int, page_size: int):
        self.ownable, self.width, self.page_size = num_pages - 1, width, page_size
        self.seqs = [Sequence() for _ in range(max_seqs)]
        self.next_token = 1

    @property
    def lens(self) -> list[int]:
        return [len(seq.history) for seq in self.seqs]

    def owners(self, page: Page) -> int:
        return sum(page in seq.pages for seq in self.seqs)

    @property
    def num_live(self) -> int:
        return len({page for seq in self.seqs for page in seq.pages})

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def extend(self, new_lens: list[int]) -> list[bool]:
        plans, free = {}, self.ownable - self.num_live
        for slot, (seq, wanted) in enumerate(zip(self.seqs, new_lens, strict=True)):
            length = len(seq.history)
            if length <= wanted <= self.width * self.page_size:
                inside_shared = wanted > length and length % self.page_size and self.owners(seq.pages[-1]) > 1
                keep = len(seq.pages) - bool(inside_shared)
                plans[slot] = (self.pages_for(wanted) - keep, keep)
        ok = [False] * len(self.seqs)
        for slot, (need, keep) in sorted(plans.items(), key=lambda item: (item[1][0], item[0])):
            if need > free:
                continue
            free, ok[slot], seq = free - need, True, self.seqs[slot]
            seq.pages = seq.pages[:keep] + [Page() for _ in range(need)]
            for _ in range(new_lens[slot] - len(seq.history)):
                seq.history.append(self.next_token)
                self.next_token += 1
        return ok

    def truncate(self, new_lens: list[int]) -> None:
        for seq, length in zip(self.seqs, new_lens, strict=True):
            seq.history = seq.history[: max(length, 0)]
            seq.pages = seq.pages[: self.pages_for(len(seq.history))]

    def release(self, mask: list[bool]) -> None:
        self.truncate([0 if gone else n for gone, n in zip(mask, self.lens, strict=True)])

    def fork(self, src: int, dst: int, length: int) -> bool:
        slots = range(len(self.seqs))
        if src not in slots or dst not in slots or src == dst or self.seqs[dst].history:
            return False
        if not 0 <= length <= len(self.seqs[src].history):
            return False
        partial = length % self.page_size > 0
        if partial and self.num_live == self.ownable:
            return False
        full = self.seqs[src].pages[: length // self.page_size]
        self.seqs[dst] = Sequence(self.seqs[src].history[:length], full + [Page()] * partial)
        return True

    def keep(self, before: list[int], accepted: list[list[int]]) -> None:
        """Of the rows past `before`, keeps the accepted ones (offsets) side by side."""
        for seq, start, offsets in zip(self.seqs, before, accepted, strict=True):
            seq.history = seq.history[:start] + [seq.history[start + i] for i in offsets]
            seq.pages = seq.pages[: self.pages_for(len(seq.history))]


def assert_same_pages(pool, model: PoolModel) -> None:
    """The pool's table is the model's, up to the names of the pages; counts and lengths are equal."""
    assert pool.check()
    table, lens = np.asarray(pool.block_table), np.asarray(pool.kv_lens)
    assert lens.tolist() == model.lens
    free, live = int(pool.num_free), int(pool.num_live)
    assert free + live == pool.owners.shape[0] - 1
    assert live == model.num_live
    model_page_of: dict[int, Page] = {}
    for row, seq in zip(table, model.seqs, strict=True):
        for page_id, page in zip(row, seq.pages, strict=False):
            owned = model_page_of.setdefault(int(page_id), page) is page
            assert owned, f"page {page_id} has two owners and is not shared"
    assert len(model_page_of) == model.num_live, "a shared page was copied"


def assert_one_sentence(message: str) -> None:
    assert message.endswith(".") and "\n" not in message, message
    assert not re.search(r"\.\s+[A-Z]", message), f"more than one sentence: {message}"
