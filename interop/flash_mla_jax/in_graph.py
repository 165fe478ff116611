"""Values that only the device knows, made harmless inside the graph: page ids, lengths, indices, metadata.

The kernels check none of them: a wrong one reads or writes memory of somebody else.
"""

import jax
import jax.numpy as jnp
from jax import lax

PAGE = 64  # tokens
INT = jnp.int32


def clamped(block_table: jax.Array, cache_seqlens: jax.Array, num_blocks: int) -> tuple[jax.Array, jax.Array]:
    """Page ids within the cache, lengths within the table. Right values are not changed.

    Entries past a request's length are never read, so what they become does not matter.
    """
    longest = block_table.shape[1] * PAGE
    return jnp.clip(block_table, 0, num_blocks - 1), jnp.clip(cache_seqlens, 0, longest)


def valid_indices(indices: jax.Array, num_tokens: int) -> jax.Array:
    """-1, FlashMLA's mark of an index to skip, in place of every index outside the cache."""
    return jnp.where((indices >= 0) & (indices < num_tokens), indices, -1)


def matching_schedule(
    metadata: jax.Array, num_splits: jax.Array, lens: jax.Array, *, tokens: bool
) -> tuple[jax.Array, jax.Array]:
    """The schedule, if it divides exactly the work of these lengths; else one that does, with everything in one part.

    A schedule of other lengths would make a kernel read past a table and write past its scratch. The one in its place
    gives the right result slowly.

    Args:
        metadata: int32 `[parts, 8]`, rows in the order of 2026-01, or with `tokens` in that of 2025-02, see FlashMLA.
        num_splits: int32 `[b + 1]`.
        lens: int32 `[b]`, not negative.
        tokens: the order of the dense FP8 kernel, where positions are tokens and a request of length 0 has no work.

    Cost: O(parts · (parts + b)) integer operations, which XLA does once for all calls with the same arguments.
    """
    division = _in_blocks(metadata, lens, tokens)
    right = _covers_all(division) & _splits_are_counted(division, num_splits, flags=not tokens)
    plain = _one_part(metadata.shape[0], lens, tokens)
    every = jnp.arange(lens.shape[0] + 1, dtype=INT)
    return jnp.where(right, metadata, plain), jnp.where(right, num_splits, every)


def _in_blocks(metadata: jax.Array, lens: jax.Array, tokens: bool) -> dict[str, jax.Array]:
    """Columns by name, positions as blocks of 64 tokens; `whole` is false where one is not at a block's border."""
    batch = lens.shape[0]
    if tokens:
        begin_req, begin, end_req, end, split, *rest = metadata.T
        blocks = lax.div(lens + (PAGE - 1), jnp.full_like(lens, PAGE))
    else:
        begin_req, end_req, begin, end, split, *rest = metadata.T
        blocks = lax.div(jnp.maximum(lens - 1, 0), jnp.full_like(lens, PAGE)) + 1
    last = jnp.clip(end_req, 0, batch - 1)
    whole = jnp.ones_like(begin_req, dtype=bool)
    if tokens:
        whole = (lax.rem(begin, jnp.full_like(begin, PAGE)) == 0) & (
            (end == lens[last]) | (lax.rem(end, jnp.full_like(end, PAGE)) == 0)
        )
        begin, end = (lax.div(x + offset, jnp.full_like(x, PAGE)) for x, offset in ((begin, 0), (end, PAGE - 1)))
    else:
        end = jnp.where(lens[last] == 0, jnp.where(end == 0, 1, -1), end)  # an empty request counts as a block, unread
    return {
        "begin_req": begin_req, "end_req": end_req, "begin": begin, "end": end, "split": split, "whole": whole,
        "first_split": rest[0], "last_split": rest[1], "blocks": blocks,
    }  # fmt: skip


def _covers_all(of: dict[str, jax.Array]) -> jax.Array:
    """True if the parts, in order, take every block of every request once."""
    blocks, begin_req, end_req, begin, end = (of[n] for n in ("blocks", "begin_req", "end_req", "begin", "end"))
    batch = blocks.shape[0]
    active = begin_req < batch
    first, last = blocks[jnp.clip(begin_req, 0, batch - 1)], blocks[jnp.clip(end_req, 0, batch - 1)]
    in_range = (begin_req >= 0) & (begin_req <= end_req) & (end_req < batch) & (end >= 0) & (end <= last)
    in_range &= (begin == 0) | ((begin > 0) & (begin < first))
    in_range &= (begin_req < end_req) | (begin < end) | (first == 0)
    in_range &= (end > 0) | (last == 0)
    # Where the next part has to begin.
    done = end == last
    next_req = jnp.where(active, jnp.where(done, end_req + 1, end_req), batch)
    next_begin = jnp.where(done, 0, end)
    expected_req = jnp.concatenate([jnp.zeros(1, INT), next_req[:-1]])
    expected_begin = jnp.concatenate([jnp.zeros(1, INT), next_begin[:-1]])
    follows = (begin_req == expected_req) & (~active | (begin == expected_begin))
    return jnp.all(follows) & jnp.all(~active | (in_range & of["whole"])) & (next_req[-1] == batch)


def _splits_are_counted(of: dict[str, jax.Array], num_splits: jax.Array, *, flags: bool) -> jax.Array:
    """True if every piece of a request has its own number."""
    begin_req, batch, parts = of["begin_req"], of["blocks"].shape[0], of["begin_req"].shape[0]
    active = begin_req < batch
    inside = active & (of["begin"] > 0)
    earlier = jnp.arange(parts)[None, :] <= jnp.arange(parts)[:, None]
    same = (begin_req[None, :] == begin_req[:, None]) & inside[None, :] & inside[:, None]
    right = jnp.all(~active | (of["split"] == jnp.sum(same & earlier, axis=1, dtype=INT)))
    request = jnp.arange(batch + 1, dtype=INT)
    cuts = jnp.sum(inside[None, :] & (begin_req[None, :] < request[:, None]), axis=1, dtype=INT)
    right &= jnp.all(num_splits == request + cuts)
    if flags:
        pieces = jnp.diff(num_splits)
        for req, flag in ((begin_req, of["first_split"]), (of["end_req"], of["last_split"])):
            right &= jnp.all(~active | ((flag != 0) == (pieces[jnp.clip(req, 0, batch - 1)] > 1)))
    return right


def _one_part(parts: int, lens: jax.Array, tokens: bool) -> jax.Array:
    batch = lens.shape[0]
    last = lens[-1]
    blocks = lax.div(last + (PAGE - 1), jnp.full_like(last, PAGE))
    row = [0, 0, batch - 1, last] if tokens else [0, batch - 1, 0, blocks]
    row += [0] * 4
    everything = jnp.stack([jnp.asarray(x, INT) for x in row])
    idle = jnp.asarray([batch] + [0] * 7, INT)
    return jnp.where((jnp.arange(parts) == 0)[:, None], everything[None], idle[None])
