"""What a CTA works on: its requests, their blocks of keys, and the ring of shared-memory slots they pass."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mla_jax.attention.mosaic_gpu.config import GROUP, HALF, PAGE, ROWS, KernelConfig, Problem
from mla_jax.attention.mosaic_gpu.hardware import Signal

Ref = Any


class Side(enum.IntEnum):
    """Which half of the latent dims a value role owns, as values, as output, and in the slots."""

    LEFT = 0  # 0:256
    RIGHT = 1  # 256:512


class SideSignals(NamedTuple):
    """A signal for each side, with as many indices each."""

    first: Signal
    indices: int

    def of(self, side: Any) -> Signal:
        """That of a side, which may be a traced number."""
        return self.first.behind(side * self.indices)

    def send(self, index: jax.Array) -> None:
        """To both sides."""
        for side in Side:
            self.of(side).send(index)


class Global(NamedTuple):
    """Arrays in device memory. `rows` is S * H; a row of q is query token `row // H`, head `row % H`."""

    q: Ref  # [B * max(query_parts, 1), rows, 576]
    cache: Ref  # [P, 64, 576]
    table: Ref  # [B, max_pages] int32
    lens: Ref  # [B] int32
    metadata: Ref  # [parts, 8] int32
    num_splits: Ref  # [B + 1] int32
    scale: Ref  # [1] float32
    tree: Ref  # [B, words, row_blocks * 64] int32, bit i of word w: the row sees key 32 w + i of the last S
    counters: Ref  # [B * row_blocks] int32, zeros
    out: Ref  # [B, rows, 512]
    lse: Ref  # [B, rows] float32
    part_out: Ref  # the workspace: see `pieces`
    part_lse: Ref
    part_scale: Ref
    progress: Ref  # [parts, row_blocks] int32, anything at first: see `company`


class Slots(NamedTuple):
    """The rings in shared memory. A slot holds a block of keys, or a request's queries before its first."""

    left: Ref  # [left_slots, 64, 256] dims 0:256, also the left values
    right: Ref  # [right_slots, 64, 256] dims 256:512, also the right values
    rope: Ref  # [left_slots, 64, 64] dims 512:576, overwritten by the probabilities once scores are done


class Span(NamedTuple):
    """What a part works on, read once: see `TileSchedule.metadata`."""

    begin_req: jax.Array  # B if the part is idle
    end_req: jax.Array  # the last request
    begin_block: jax.Array  # the first block of the first request
    end_block: jax.Array  # the end of the last request's blocks in this part

    @classmethod
    def load(cls, metadata: Ref, part: jax.Array) -> "Span":
        """The row of a part."""
        return cls(*(metadata[part, column] for column in range(4)))


@dataclasses.dataclass(frozen=True)
class SpanInMemory:
    """The same, read whenever it is asked for, where registers are short."""

    metadata: Ref
    part: jax.Array

    @property
    def begin_req(self) -> jax.Array:
        """See `Span`, as for the others."""
        return self.metadata[self.part, 0]

    @property
    def end_req(self) -> jax.Array:
        """The last request."""
        return self.metadata[self.part, 1]

    @property
    def begin_block(self) -> jax.Array:
        """The first block of the first request."""
        return self.metadata[self.part, 2]

    @property
    def end_block(self) -> jax.Array:
        """The end of the last request's blocks."""
        return self.metadata[self.part, 3]


@dataclasses.dataclass(frozen=True)
class Work:
    """What the roles of one CTA share in every kernel. Vectors are indexed as a kernel's config says."""

    config: Any  # with the number of registers of each role
    problem: Problem
    emulate: bool
    memory: Global
    row_vectors: Ref  # [2 n + 1, 64] float32 in shared memory
    scored: SideSignals  # the score role to a side: queries are taken, or probabilities are there
    span: Span | SpanInMemory
    part: jax.Array
    row_block: jax.Array

    @property
    def rows(self) -> Any:
        """This CTA's rows among the rows of a request."""
        return pl.ds(self.row_block * ROWS, self.problem.copied_rows)

    @property
    def pieces_by_thread(self) -> bool:
        """Whether numbers of a row of a piece lie in the order of `pieces.store_rows`."""
        return False

    def decay(self, index: jax.Array) -> Ref:
        """[64] what the output so far is multiplied with before these probabilities count."""
        return self.row_vectors.at[index]

    def inverse_total(self, index: jax.Array) -> Ref:
        """[64] 1 / the sum of the probabilities up to these; 1 where no key was seen."""
        return self.row_vectors.at[self.row_vectors.shape[0] // 2 + index]

    @property
    def lse_stage(self) -> Ref:
        """[64] lse on its way to device memory."""
        return self.row_vectors.at[self.row_vectors.shape[0] - 1]

    def existing(self, request: jax.Array) -> jax.Array:
        """The nearest request that exists, for reads whose result is not used."""
        return lax.max(lax.min(request, jnp.int32(self.problem.batch - 1)), jnp.int32(0))

    def for_each_request(self, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
        """Fold `body(request, carry)` over this part's requests."""
        return lax.fori_loop(self.span.begin_req, self.span.end_req + 1, body, carry)

    def segment(self, request: jax.Array) -> "Segment":
        """The blocks of `request` that are this part's."""
        length = lax.min(self.memory.lens[request], jnp.int32(self.memory.table.shape[1] * PAGE))
        pages = lax.max(lax.div(length + (PAGE - 1), jnp.int32(PAGE)), jnp.int32(1))
        first = jnp.where(request == self.span.begin_req, self.span.begin_block, 0)
        end = jnp.where(request == self.span.end_req, lax.min(self.span.end_block, pages), pages)
        return Segment(request, length, first, lax.max(end, first + 1))

    def partial_slot(self, request: jax.Array) -> jax.Array:
        """Where this part leaves its piece of a request that other parts share.

        A part has at most two such requests, its first and its last.
        """
        return self.part + jnp.where(request == self.span.begin_req, 0, self.problem.parts)

    def piece(self, request: jax.Array, rows: Any, side: Any) -> tuple[Ref, Ref]:
        """Where a side leaves its half of rows of this part's piece of a request, and their scales."""
        slot, groups = self.partial_slot(request), HALF // GROUP
        numbers = self.memory.part_out.at[slot, rows, pl.ds(side * HALF, HALF)]
        return numbers, self.memory.part_scale.at[slot, rows, pl.ds(side * groups, groups)]

    def pieces(self, request: jax.Array) -> jax.Array:
        """Number of parts that share the request."""
        return self.memory.num_splits[request + 1] - self.memory.num_splits[request]

    def counter(self, request: jax.Array) -> Ref:
        """Counts the warpgroups that have left their piece of a shared request."""
        return self.memory.counters.at[request * self.problem.row_blocks + self.row_block]


@dataclasses.dataclass(frozen=True)
class Cta(Work):
    """What the roles of the 16-bit kernel share. Indices of signals and vectors are left slots where not said."""

    slots: Slots
    left_full: Ref  # barriers, by left slot: left half and rope part have arrived
    right_full: Ref  # barriers, by right slot
    queries: Ref  # [64, shared_query_dims] the queries' last dims, in shared memory
    next_scores_done: Signal  # the score role to the left side, which waits so that those are not delayed
    right_done: Signal  # the right side to the left: probabilities are used

    @property
    def pieces_by_thread(self) -> bool:
        """They do."""
        return not self.emulate


class Segment(NamedTuple):
    """Blocks `first` to `end` (exclusive, at least one) of a request with `length` keys."""

    request: jax.Array
    length: jax.Array
    first: jax.Array
    end: jax.Array


class Turn(NamedTuple):
    """Position in the rings: the slots in turn."""

    left: jax.Array
    right: jax.Array

    @classmethod
    def start(cls) -> "Turn":
        """Before the first item."""
        return cls(jnp.int32(0), jnp.int32(0))

    def after(self, config: KernelConfig) -> "Turn":
        """The next slots."""

        def following(slot: jax.Array, slots: int) -> jax.Array:
            return jnp.where(slot == slots - 1, 0, slot + 1)

        return Turn(following(self.left, config.left_slots), following(self.right, config.right_slots))

    def of(self, side: Side) -> jax.Array:
        """The slot of a side."""
        return self.left if side == Side.LEFT else self.right
