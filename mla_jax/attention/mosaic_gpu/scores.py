"""The score role: queries stay in registers, S = Q K^T, softmax, probabilities into shared memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.config import HALF, LOG2E, PAGE, ROPE, ROWS, TILE, WORD
from mla_jax.attention.mosaic_gpu.hardware import clear_rows, make_visible, negate, store_some, warpgroup_barrier
from mla_jax.attention.mosaic_gpu.work import Cta, Ref, Segment, Turn, Work

MATRIX = plgpu.Layout.WGMMA
ROW = MATRIX.reduce(1)  # one value per row of a MATRIX
LOWEST = -1e30  # the running maximum before any key: finite, so that no inf - inf arises
COLUMNS = 8  # of a MATRIX in which each thread holds two: the narrowest
SLACK = 8.0  # a probability may reach 2**SLACK before the maximum follows: rescaling outputs is dear, this is free
HIDDEN = -1e33  # a masked logit: far below LOWEST, so that its probability is 0 even if no key is visible


class Queries(NamedTuple):
    """64 queries as A operands of the score products, as far as registers go."""

    left: jax.Array  # [64, 256]
    right: jax.Array  # [64, 64 * register_tiles - 256], the dims after those


class Softmax(NamedTuple):
    """Running softmax over the keys seen so far, base 2."""

    top: jax.Array  # [64] largest logit, or up to SLACK below it
    totals: jax.Array  # [64, 8] sums of exp2(logit - top) over every eighth key: adding them up can wait

    @classmethod
    def empty(cls) -> "Softmax":
        """Before the first key."""
        top = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW)
        return cls(top, plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), MATRIX))

    def follow(self, highest: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `top` becomes with a block's highest logits, and the decay of what came before."""
        top = jnp.where(highest > self.top + SLACK, highest, self.top)
        return top, jnp.exp2(self.top - top)

    def advance(self, top: jax.Array, decay: jax.Array) -> "Softmax":
        """The same sums for another `top`."""
        return Softmax(top, self.totals * lax.broadcast_in_dim(decay, self.totals.shape, [0]))

    def add(self, probabilities: jax.Array) -> "Softmax":
        """With the probabilities of some keys more: a thread's own numbers, no exchange with other threads."""
        totals = self.totals
        for column in range(0, probabilities.shape[1], COLUMNS):
            totals += probabilities[:, column : column + COLUMNS]
        return Softmax(self.top, totals)


def score(cta: Cta) -> None:
    """Score every block of every request, and write the log-sum-exp.

    The softmax of a block comes before any product of the next: it is short while this warpgroup issues nothing, and
    the value roles keep the tensor cores busy meanwhile.
    """
    config = cta.config
    scale = cta.memory.scale[0]
    logit_scale = jnp.abs(scale) * LOG2E

    def request(r: jax.Array, turn: Turn) -> Turn:
        segment = cta.segment(r)
        queries = _take_queries(cta, turn, negative=scale < 0)
        turn = turn.after(config)

        def block(masked: bool, i: jax.Array, carry: tuple[Softmax, jax.Array, Turn]) -> Any:
            softmax, products, turn = carry
            softmax = _publish(cta, segment, i, turn, softmax, products, logit_scale, masked=masked)
            products = _products(cta, queries, turn.after(config))
            cta.next_scores_done.send(turn.left)
            return softmax, products, turn.after(config)

        products = _products(cta, queries, turn)
        last = segment.end - 1
        mask_from = lax.max(lax.min(first_masked_block(cta, segment.length), last), segment.first)
        carry = (Softmax.empty(), products, turn)
        carry = lax.fori_loop(segment.first, mask_from, functools.partial(block, False), carry)
        softmax, products, turn = lax.fori_loop(mask_from, last, functools.partial(block, True), carry)
        softmax = _publish(cta, segment, last, turn, softmax, products, logit_scale, masked=True, last=True)
        cta.next_scores_done.send(turn.left)
        store_lse(cta, segment, softmax.top, softmax.totals.sum(axis=1))
        return turn.after(config)

    cta.for_each_request(request, Turn.start())
    plgpu.wait_smem_to_gmem(0)


def _take_queries(cta: Cta, turn: Turn, *, negative: jax.Array) -> Queries:
    """Move queries out of their slots, and give the slots back."""
    plgpu.barrier_wait(cta.left_full.at[turn.left])
    plgpu.barrier_wait(cta.right_full.at[turn.right])
    left, right, rope = cta.slots.left.at[turn.left], cta.slots.right.at[turn.right], cta.slots.rope.at[turn.left]

    @pl.when(negative)
    def _() -> None:
        for part in (left, right, rope):
            negate(part, emulate=cta.emulate)
        plgpu.commit_smem()

    kept = cta.config.register_tiles * TILE - HALF  # right dims that stay in registers
    moved = HALF - kept
    cta.queries.at[:, pl.ds(0, moved)][...] = plgpu.load(right.at[:, pl.ds(kept, moved)], layout=MATRIX)
    cta.queries.at[:, pl.ds(moved, ROPE)][...] = plgpu.load(rope, layout=MATRIX)
    queries = Queries(plgpu.load(left, layout=MATRIX), plgpu.load(right.at[:, pl.ds(0, kept)], layout=MATRIX))
    plgpu.commit_smem()  # the slots have been read, and what was stored is there for products
    cta.scored.send(turn.left)
    return queries


def _products(cta: Cta, queries: Queries, turn: Turn) -> jax.Array:
    """Q K^T of one block: [64, 64] float32.

    The right half is waited for late: its slot is that of the block before the last, whose values may be in use.
    """
    left, right, rope = cta.slots.left.at[turn.left], cta.slots.right.at[turn.right], cta.slots.rope.at[turn.left]
    kept = queries.right.shape[1]
    moved = HALF - kept
    right_kept, right_moved = right.at[:, pl.ds(0, kept)], right.at[:, pl.ds(kept, moved)]
    query_moved, query_rope = cta.queries.at[:, pl.ds(0, moved)], cta.queries.at[:, pl.ds(moved, ROPE)]
    if cta.emulate:

        def dot(q: jax.Array, k: Ref) -> jax.Array:
            return jnp.dot(q.astype(jnp.float32), k[...].astype(jnp.float32).T)

        plgpu.barrier_wait(cta.left_full.at[turn.left])
        products = dot(queries.left, left) + dot(query_rope[...], rope)
        plgpu.commit_smem()  # the slot has been read
        plgpu.barrier_wait(cta.right_full.at[turn.right])
        products += dot(queries.right, right_kept) + dot(query_moved[...], right_moved)
        plgpu.commit_smem()
        return products

    def issue(products: Any) -> jax.Array:
        plgpu.barrier_wait(cta.left_full.at[turn.left])
        plgpu.wgmma(products, queries.left, left.transpose((1, 0)))
        plgpu.wgmma(products, query_rope, rope.transpose((1, 0)))
        plgpu.barrier_wait(cta.right_full.at[turn.right])
        plgpu.wgmma(products, queries.right, right_kept.transpose((1, 0)))
        plgpu.wgmma(products, query_moved, right_moved.transpose((1, 0)))
        return products[...]

    return pl.run_scoped(issue, plgpu.ACC((ROWS, PAGE), jnp.float32))


def _publish(
    cta: Cta,
    segment: Segment,
    block: jax.Array,
    turn: Turn,
    softmax: Softmax,
    products: jax.Array,
    scale: jax.Array,
    *,
    masked: bool,
    last: bool = False,
) -> Softmax:
    """Softmax of a block's products; probabilities and what value roles need beside them go to shared memory."""
    visible = visible_keys(cta, segment, block) if masked else None

    logits, highest = logits_of(products, scale, visible)
    top, decay = softmax.follow(highest)
    probabilities = jnp.exp2(logits - lax.broadcast_in_dim(top, logits.shape, [0]))
    softmax = softmax.advance(top, decay).add(probabilities)
    warpgroup_barrier(emulate=cta.emulate)  # all four warps are done with the keys' rope part
    cta.slots.rope.at[turn.left][...] = probabilities.astype(cta.problem.dtype)
    cta.decay(turn.left)[...] = decay
    if last:
        cta.inverse_total(turn.left)[...] = 1.0 / nonzero(softmax.totals.sum(axis=1))
    if masked:

        def clear(first: jax.Array) -> None:
            clear_rows(cta.slots.left.at[turn.left], first, emulate=cta.emulate)
            clear_rows(cta.slots.right.at[turn.right], first, emulate=cta.emulate)

        clear_unowned(segment, block, clear)
    make_visible(emulate=cta.emulate)
    cta.scored.send(turn.left)
    return softmax


def logits_of(products: jax.Array, scale: jax.Array, visible: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Logits of a block in base 2, and each row's highest; `scale`, not negative, is one number or one for each row."""
    logits = products * lax.broadcast_in_dim(scale, products.shape, range(scale.ndim))
    if visible is None:
        return logits, products.max(axis=1) * scale  # fewer multiplications wait for each other
    logits = jnp.where(visible, logits, HIDDEN)
    return logits, logits.max(axis=1)


def first_masked_block(cta: Work, length: jax.Array) -> jax.Array:
    """The first block with a key that some row must not see."""
    seen_by_all = length - (cta.problem.tokens if cta.problem.tree else cta.problem.tokens - 1)
    if not (cta.problem.causal or cta.problem.tree):
        seen_by_all = length
    return lax.div(lax.max(seen_by_all, jnp.int32(0)), jnp.int32(PAGE))


def visible_keys(cta: Work, segment: Segment, block: jax.Array, *, rows: int = ROWS, row_axis: int = 0) -> jax.Array:
    """Which keys of a block each row sees: [rows, 64], or [64, rows] with row_axis 1."""
    problem = cta.problem
    shape = (rows, PAGE) if row_axis == 0 else (PAGE, rows)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 1 - row_axis, layout=MATRIX) + block * PAGE
    if problem.tree:
        position = key - (segment.length - problem.tokens)
        return (key < segment.length) & _seen_in_tree(cta, segment, position, row_axis)
    if not problem.causal or problem.tokens == 1:
        return key < segment.length
    row = plgpu.broadcasted_iota(jnp.int32, shape, row_axis, layout=MATRIX) + cta.row_block * ROWS
    limit = segment.length - (problem.tokens - 1) + lax.div(row, jnp.int32(problem.heads))
    return key < jnp.minimum(limit, segment.length)


def _seen_in_tree(cta: Work, segment: Segment, position: jax.Array, row_axis: int) -> jax.Array:
    """What the tree mask says of keys at these positions among the last S; those before are seen."""
    seen = position < 0
    rows = pl.ds(cta.row_block * ROWS, position.shape[row_axis])
    for word in range(cta.memory.tree.shape[1]):
        bits = cta.memory.tree.at[segment.request, word, rows]
        bits = plgpu.load(bits, layout=MATRIX.reduce(1 - row_axis), optimized=False)
        bit = position - WORD * word
        shift = lax.max(lax.min(bit, jnp.int32(WORD - 1)), jnp.int32(0))
        is_set = (lax.shift_right_logical(lax.broadcast_in_dim(bits, shift.shape, [row_axis]), shift) & 1) == 1
        seen |= (bit == shift) & is_set
    return seen


def clear_unowned(segment: Segment, block: jax.Array, clear: Callable[[jax.Array], None]) -> None:
    """Call `clear(first)` if rows of a block, from `first`, are past the end.

    Nobody owns those: they may hold NaN, and 0 * NaN is NaN.
    """
    past = (block + 1) * PAGE > segment.length
    pl.when(past)(lambda: clear(lax.max(segment.length - block * PAGE, jnp.int32(0))))


def nonzero(total: jax.Array) -> jax.Array:
    """total, or 1 where no key was seen: dividing by it leaves the zeros of such a row."""
    return jnp.where(total == 0, 1.0, total)


def store_lse(cta: Work, segment: Segment, top: jax.Array, total: jax.Array) -> None:
    """Natural-log lse of a whole request; base 2 of a piece.

    top, total: of 64 rows or of those that there are; a row's largest logit, and the sum of its exp2(logit - top).
    """
    r, rows = segment.request, top.shape[0]
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log2(nonzero(total)))
    whole = cta.pieces(r) == 1

    @pl.when(whole)
    def _() -> None:
        plgpu.wait_smem_to_gmem(0)  # the previous request's copy has left the stage
        cta.lse_stage.at[pl.ds(0, rows)][...] = lse * (1 / LOG2E)
        plgpu.commit_smem()
        staged = cta.lse_stage.at[pl.ds(0, cta.problem.copied_rows)]
        plgpu.copy_smem_to_gmem(staged, cta.memory.lse.at[r, cta.rows])

    @pl.when(~whole)
    def _() -> None:
        store_some(
            cta.memory.part_lse.at[cta.partial_slot(r), pl.ds(cta.row_block * ROWS, rows)], lse, emulate=cta.emulate
        )
