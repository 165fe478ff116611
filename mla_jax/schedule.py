"""Who reads which cache pages: the split-KV schedule that all layers of one decode step share.

A persistent decode kernel starts `num_sm_parts` groups of CTAs ("parts") and gives each a contiguous share
of all (request, page) work, so that every SM is busy however unequal the requests are. A request that is
cut by a boundary between parts is merged afterwards.

Put all requests on one line: request `i` occupies `blocks_i + 5` units, the 5 (`request_overhead`) standing
for the cost of starting and ending a request. A part takes `quota = ceil(total / parts)` units, except that a
boundary which would leave a request with 5 units or fewer moves on to that request's end:

    x_0 = 0,   x_{p+1} = snap(x_p + quota),   snap(z) = C if some request starts at C in (z, z + 5], else z

Between two snaps the boundaries are equidistant, so all of them follow from the chain of snaps, which is
found for every request at once and followed by pointer doubling: O(log parts) steps, no loop over parts or
requests.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.errors import InputError, described

ORDERS = ("2026-01", "2025-09", "2025-02")  # of the columns, by the FlashMLA release that introduced them
REQUEST_OVERHEAD = 5  # blocks: what starting and ending a request costs FlashMLA, in units of one page's work
LARGEST = 2**20  # of any number that a schedule is made from: far beyond any GPU, and safe in int32
LARGEST_SUM = 2**30  # of what requests cost beside their pages
ROWS_PER_CTA = 64  # query rows (S * H) that one CTA handles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileSchedule:
    """Work of every part.

    Attributes:
        metadata: int32 `[parts, 8]`, a row per part, in one of three orders; "block" is a page of 64 tokens within the
            request named before it, end_req is inclusive, other ends are exclusive:

            - 2026-01: begin_req, end_req, begin_block, end_block, begin_split, first_is_split, last_is_split, 0
            - 2025-09: begin_req, begin_block, end_req, end_block, begin_split, 0, 0, 0
            - 2025-02: begin_req, begin_token, end_req, end_token, begin_split, 0, 0, 0

            A part without work has begin_req B, and its other columns mean nothing.
        num_splits: int32 `[B + 1]`, cumulative: request b is computed in `num_splits[b + 1] - num_splits[b]` pieces.
        kv_lens: int32 `[B]`, the lengths that it was made for. A schedule of other lengths gives wrong output, and
            kernels cannot see it: where a schedule is kept for reuse, `check` can.
        order: of the columns, one of the three.
    """

    metadata: Int32[Array, "parts 8"]
    num_splits: Int32[Array, "B+1"]
    kv_lens: Int32[Array, " B"]
    order: str = dataclasses.field(default=ORDERS[0], metadata={"static": True})

    def require_order(self, order: str, reader: str) -> None:
        """Raise ValueError unless the columns are in the order that `reader` takes."""
        if self.order != order:
            raise InputError(
                f"schedule has its columns in the order of {self.order}, {reader} takes that of {order}; make it with "
                f"step_schedule, or with order={order!r}."
            )

    def require_requests(self, requests: int) -> None:
        """Raise ValueError unless the arrays are those of a schedule for so many requests; does not read them."""
        arrays = {"metadata": (self.metadata, ("parts", 8)), "num_splits": (self.num_splits, ("B + 1",))}
        for name, (found, shape) in arrays.items():
            fits = isinstance(found, np.ndarray | jax.Array) and found.dtype == jnp.int32
            if not (fits and found.ndim == len(shape) and found.shape[0] > 0 and found.shape[1:] == shape[1:]):
                expected = f"int32 [{', '.join(map(str, shape))}]"
                raise InputError(
                    f"schedule.{name} must be {expected}, got {described(found)}; make it with tile_schedule."
                )
        if self.num_splits.shape[0] != requests + 1:
            raise InputError(
                f"schedule is for {self.num_splits.shape[0] - 1} requests, q has {requests}; make it from this call's "
                "kv_lens."
            )

    def check(self, kv_lens: Int32[Array, " B"]) -> bool:
        """True if this is a schedule for these lengths; for debugging and tests.

        Raises ValueError that names the first request whose length has changed. Reads the device.
        """
        made, asked = np.asarray(self.kv_lens), np.asarray(kv_lens)
        if made.shape != asked.shape:
            raise InputError(f"The schedule is stale: made for {made.shape[0]} requests, used for {asked.shape[0]}.")
        changed = np.flatnonzero(made != asked)
        if len(changed):
            first = int(changed[0])
            raise InputError(
                f"The schedule is stale: made when request {first} had {made[first]} tokens, used when it has "
                f"{asked[first]} ({len(changed)} of {len(made)} requests differ); make a new one with tile_schedule."
            )
        return True


def num_sm_parts(num_sms: int, seq_len_q: int, num_heads_q: int, num_heads_kv: int = 1) -> int:
    """Parts that fill a GPU when every part needs one CTA per 64 query rows; never below 1.

    Args:
        num_sms: streaming multiprocessors of the GPU; an H200 has 132.
        seq_len_q: S, new tokens per request.
        num_heads_q: H, query heads.
        num_heads_kv: heads of the cache: 1 for MLA.

    Raises ValueError for a size below 1.
    """
    sizes = {"num_sms": num_sms, "seq_len_q": seq_len_q, "num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv}
    for name, size in sizes.items():
        _check_number(name, size)
    if num_heads_q % num_heads_kv:
        raise InputError(f"num_heads_q must be a multiple of num_heads_kv, got {num_heads_q} and {num_heads_kv}.")
    rows = seq_len_q * num_heads_q // num_heads_kv
    return max(num_sms // num_heads_kv // -(-rows // ROWS_PER_CTA), 1)


def tile_schedule(
    kv_lens: Int32[Array, " B"],
    num_sm_parts: int,
    *,
    order: str = ORDERS[0],
    request_overhead: int = REQUEST_OVERHEAD,
) -> TileSchedule:
    """Divide the pages of all requests over `num_sm_parts` parts.

    Args:
        kv_lens: keys per request; 0 is allowed and counts as one block of work (in order 2025-02 as none).
        num_sm_parts: parts to fill, from `num_sm_parts()`.
        order: of the columns, see `TileSchedule`. FlashMLA's dense kernels take 2026-01 since that month and 2025-09
            before; its dense FP8 kernel takes 2025-02 to this day.
        request_overhead: what starting and ending a request costs the kernel, in blocks, at least 1.

    Returns:
        A `TileSchedule`; with the default overhead equal, bit for bit, to that of FlashMLA's scheduler.

    Raises:
        ValueError: kv_lens is not a non-empty int32 vector, there is no part, or an unknown order.

    All requests together must have fewer than 2^31 - request_overhead * B blocks.

    Cost: jitted, no host read; O(B^2) integer operations fused into one reduction, beside them
    O((B + parts) log parts).
    """
    if not isinstance(kv_lens, jax.Array | np.ndarray):
        raise InputError(f"kv_lens must be a JAX or NumPy array of int32, got {type(kv_lens).__name__}.")
    if kv_lens.ndim != 1 or kv_lens.shape[0] == 0 or kv_lens.dtype != jnp.int32:
        raise InputError(f"kv_lens must be int32 [B] with B at least 1, got {kv_lens.dtype.name} {kv_lens.shape}.")
    for name, number in (("num_sm_parts", num_sm_parts), ("request_overhead", request_overhead)):
        _check_number(name, number)
        if number > LARGEST:
            raise InputError(f"{name} must be at most {LARGEST}, got {number}.")
    if order not in ORDERS:
        raise InputError(f"order {order!r} is not known; choose from {', '.join(ORDERS)}.")
    overhead = int(request_overhead)
    if overhead * kv_lens.shape[0] > LARGEST_SUM:
        raise InputError(f"request_overhead = {overhead} for {kv_lens.shape[0]} requests leaves the range of int32.")
    with jax.enable_x64(False):  # all is int32, whatever sums are where 64 bits are the default
        return _schedule(kv_lens, int(num_sm_parts), order, overhead)


def _check_number(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {number!r}.")


@jax.jit(static_argnums=(1, 2, 3))
def _schedule(kv_lens: Array, parts: int, order: str, overhead: int) -> TileSchedule:
    blocks = lax.div(jnp.maximum(kv_lens - 1, 0), PAGE_SIZE) + 1
    if order == "2025-02":
        cut = _cut(jnp.where(kv_lens > 0, blocks, 0), parts, overhead)
        columns = _token_columns(cut, kv_lens)
    else:
        cut = _cut(blocks, parts, overhead)
        columns = _block_columns(cut, kv_lens, blocks)
        if order == "2025-09":
            begin_req, end_req, begin_block, end_block, begin_split, *_ = columns
            columns = [begin_req, begin_block, end_req, end_block, begin_split]
    columns = [c.astype(jnp.int32) for c in columns]
    metadata = jnp.stack(columns + [jnp.zeros(parts, jnp.int32)] * (8 - len(columns)), axis=1)
    return TileSchedule(metadata, cut.num_splits, kv_lens, order)


def _block_columns(cut: "_Cut", kv_lens: Array, blocks: Array) -> list[Array]:
    last_block = jnp.where(kv_lens > 0, blocks, 0)[cut.end_req]
    end_block = jnp.where(cut.end_unit > 0, cut.end_unit, last_block)
    pieces = jnp.diff(cut.num_splits)
    first_split = pieces[jnp.minimum(cut.begin_req, kv_lens.shape[0] - 1)] > 1
    last_split = pieces[cut.end_req] > 1
    return [cut.begin_req, cut.end_req, cut.begin_unit, end_block, cut.begin_split, first_split, last_split]


def _token_columns(cut: "_Cut", kv_lens: Array) -> list[Array]:
    end_len = kv_lens[cut.end_req]
    end_token = jnp.where(cut.end_unit > 0, jnp.minimum(cut.end_unit * PAGE_SIZE, end_len), end_len)
    return [cut.begin_req, cut.begin_unit * PAGE_SIZE, cut.end_req, end_token, cut.begin_split]


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Where parts begin and end; a unit is a block of its request, end_unit 0 means a complete `end_req`."""

    begin_req: Array  # [parts]
    begin_unit: Array  # [parts]
    begin_split: Array  # [parts]
    end_req: Array  # [parts]
    end_unit: Array  # [parts]
    num_splits: Array  # [B + 1]


def _cut(blocks: Int32[Array, " B"], parts: int, overhead: int) -> _Cut:
    batch = blocks.shape[0]
    index = jnp.arange(batch + 1, dtype=jnp.int32)
    # Everything here is small, and a kernel launch costs more than it computes: sums over all pairs become one
    # reduction each, where a cumulative sum or a binary search would be several kernels.
    before = jnp.arange(batch, dtype=jnp.int32)[None, :] < index[:, None]
    starts = jnp.sum(jnp.where(before, blocks + overhead, 0), axis=1, dtype=jnp.int32)  # [B + 1]
    total = starts[-1]
    quota = lax.div(total + (parts - 1), parts)
    bounds = jnp.minimum(_boundaries(starts, quota, parts, overhead), total)  # [parts + 1]
    req = jnp.sum(starts[None, :] <= bounds[:, None], axis=1, dtype=jnp.int32) - 1
    unit = bounds - starts[req]
    begin_split, cuts_before = _count_cuts(req[:-1], unit[:-1] > 0, batch)
    end_req = jnp.where(unit[1:] > 0, req[1:], req[1:] - 1)
    return _Cut(req[:-1], unit[:-1], begin_split, end_req, unit[1:], index + cuts_before)


def _count_cuts(begin_req: Array, inside: Array, batch: int) -> tuple[Array, Array]:
    """Boundaries that lie inside a request add a piece to it: how many of a part's request lie at or before its own,
    and how many lie in requests before each. One reduction for both."""
    parts = begin_req.shape[0]
    row = jnp.arange(parts + batch + 1, dtype=jnp.int32)
    is_part = row < parts
    request = jnp.where(is_part, begin_req[jnp.minimum(row, parts - 1)], row - parts)
    earlier = jnp.arange(parts, dtype=jnp.int32)[None, :] <= row[:, None]
    same = (begin_req[None, :] == request[:, None]) & earlier
    counted = jnp.where(is_part[:, None], same, begin_req[None, :] < request[:, None]) & inside[None, :]
    counts = jnp.sum(counted, axis=1, dtype=jnp.int32)
    return jnp.where(inside, counts[:parts], 0), counts[parts:]


def _boundaries(starts: Array, quota: Array, parts: int, overhead: int) -> Array:
    """x_0 .. x_parts of the module's docstring: [parts + 1], not yet clipped to the total."""
    nxt, hops = _next_snap(starts, quota, parts, overhead)
    tables = [(nxt, hops)]
    while 2 ** len(tables) <= parts:
        nxt, hops = nxt[nxt], jnp.minimum(hops + hops[nxt], parts + 1)
        tables.append((nxt, hops))
    part = jnp.arange(parts + 1, dtype=jnp.int32)
    at = jnp.zeros(parts + 1, jnp.int32)  # the last snapped request at or before x_part
    reached = jnp.zeros(parts + 1, jnp.int32)  # the part that begins there
    for nxt, hops in reversed(tables):
        after = reached + hops[at]
        fits = after <= part
        at, reached = jnp.where(fits, nxt[at], at), jnp.where(fits, after, reached)
    return starts[at] + (part - reached) * quota


def _next_snap(starts: Array, quota: Array, parts: int, overhead: int) -> tuple[Array, Array]:
    """For a part that begins at request i: the next start that a boundary snaps to, and after how many parts.

    Boundary k after i lies at starts[i] + k * quota and snaps to request j iff starts[j] - starts[i] is in
    (k * quota, k * quota + overhead]. Requests are no shorter than that, so at most one j fits a k; the
    smallest k wins.
    """
    count = starts.shape[0]
    ahead = starts[None, :] - starts[:, None]  # [i, j]
    # The smallest k >= 1 whose window reaches j: ceil((ahead - overhead) / quota), rounded towards zero below.
    hops = jnp.maximum(lax.div(ahead - (overhead + 1), jnp.broadcast_to(quota, ahead.shape)) + 1, 1)
    snaps = (ahead > hops * quota) & (hops <= parts)
    never = jnp.int32((parts + 1) * count)
    key = jnp.min(jnp.where(snaps, hops * count + jnp.arange(count, dtype=jnp.int32)[None, :], never), axis=1)
    return jnp.where(key < never, lax.rem(key, count), 0), lax.div(key, count)
