"""The page allocator: which page of the cache holds which 64 tokens of which sequence, all on the device."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.errors import InputError


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("block_table", "kv_lens", "owners"),
    meta_fields=("page_size",),
)
@dataclass(frozen=True)
class PagePool:
    """Pages, and the N sequence slots that own them. Immutable: every method returns the pool that follows.

    Nothing here reads the device or changes a shape, so all of it can be part of a jitted, captured step. Lengths
    and page ids are int32. Page 0 belongs to nobody: rows that belong to no sequence are written there.

    Attributes:
        block_table: int32 `[N, M]`, page of tokens i·page_size … of each sequence; 0 past its length.
        kv_lens: int32 `[N]`, tokens of each sequence; 0 is an empty slot.
        owners: int32 `[P]`, how many sequences hold a page (page 0 counts as always held).
        page_size: tokens per page.
    """

    block_table: Int[Array, "N M"]
    kv_lens: Int[Array, "N"]
    owners: Int[Array, "P"]
    page_size: int = field(default=PAGE_SIZE, metadata={"static": True})

    @classmethod
    def create(cls, num_pages: int, max_seqs: int, max_pages_per_seq: int, page_size: int = PAGE_SIZE) -> "PagePool":
        """A pool of empty slots. `num_pages` counts the reserved page 0, so num_pages − 1 can be owned.

        Raises ValueError for sizes below 1, or below 2 pages.
        """
        check_size("PagePool.create: num_pages (page 0 is reserved)", num_pages, at_least=2)
        sizes = {"max_seqs": max_seqs, "max_pages_per_seq": max_pages_per_seq, "page_size": page_size}
        for name, size in sizes.items():
            check_size(f"PagePool.create: {name}", size)
        return cls(
            block_table=jnp.zeros((max_seqs, max_pages_per_seq), jnp.int32),
            kv_lens=jnp.zeros((max_seqs,), jnp.int32),
            owners=jnp.zeros((num_pages,), jnp.int32).at[0].set(1),
            page_size=page_size,
        )

    @property
    def num_free(self) -> Int[Array, ""]:
        """Pages that nobody owns; num_free + num_live = num_pages − 1."""
        return jnp.sum(self.owners == 0, dtype=jnp.int32)

    @property
    def num_live(self) -> Int[Array, ""]:
        """Pages that one or more sequences own."""
        return self.owners.shape[0] - 1 - self.num_free

    @jax.jit
    def extend(self, new_lens: Int[Array, "N"]) -> tuple["PagePool", Bool[Array, "N"]]:
        """Gives each sequence the pages it needs to hold new_lens tokens.

        Returns the pool and ok `[N]`. A sequence is refused (ok False, nothing of it changes) if the pages do not
        suffice, if it would exceed max_pages_per_seq, or if new_lens is below its length. Those that need fewest
        pages are served first, then lower slots, so a request that is too large starves nobody.

        A sequence that was cut inside a page it shares (`truncate` after `fork`) gets a page of its own in place
        of the shared one before it grows; `PagedKVCache.copy_on_write` then copies the rows it keeps. Sequences
        that are never cut below the length at which they were forked need no such copy.

        Raises ValueError unless new_lens is int32 `[N]`.

        Cost: N² + P + N·M int32 operations, no loop.
        """
        self._check_slots("new_lens", new_lens, jnp.int32)
        table, lens = self.block_table, self.kv_lens
        held, wanted = self._pages_for(lens), self._pages_for(new_lens)
        last = jnp.take_along_axis(table, jnp.maximum(held - 1, 0)[:, None], axis=1)[:, 0]
        unshare = (new_lens > lens) & (lens % self.page_size > 0) & (self.owners[last] > 1)
        first = held - unshare.astype(jnp.int32)  # first table entry to fill
        need = jnp.maximum(wanted - first, 0)
        legal = (new_lens >= lens) & (wanted <= table.shape[1])
        ok = legal & (_need_up_to_and_with(jnp.where(legal, need, 0)) <= self.num_free)

        need = jnp.where(ok, need, 0)
        rank = (jnp.cumsum(need) - need)[:, None] + self._entries() - first[:, None]
        fill = ok[:, None] & (self._entries() >= first[:, None]) & (self._entries() < wanted[:, None])
        (free,) = jnp.nonzero(self.owners == 0, size=self.owners.shape[0], fill_value=0)
        fresh = jnp.take(free.astype(jnp.int32), rank, mode="clip")
        owners = self._count(self.owners, fresh, fill, 1)
        owners = self._count(owners, last, unshare & ok, -1)
        pool = replace(
            self,
            block_table=jnp.where(fill, fresh, table),
            kv_lens=jnp.where(ok, new_lens, lens),
            owners=owners,
        )
        return pool, ok

    @jax.jit
    def truncate(self, new_lens: Int[Array, "N"]) -> "PagePool":
        """Cuts sequences to new_lens tokens; entries at or above a length change nothing, negative ones mean 0.

        Page p of a sequence is given back iff p · page_size ≥ new_lens; a shared one stays with its other owners.

        Raises ValueError unless new_lens is int32 `[N]`.

        Cost: P + N·M int32 operations, no loop.
        """
        self._check_slots("new_lens", new_lens, jnp.int32)
        new_lens = jnp.clip(new_lens, 0, self.kv_lens)
        keep, held = self._pages_for(new_lens)[:, None], self._pages_for(self.kv_lens)[:, None]
        drop = (self._entries() >= keep) & (self._entries() < held)
        return replace(
            self,
            block_table=jnp.where(drop, 0, self.block_table),
            kv_lens=new_lens,
            owners=self._count(self.owners, self.block_table, drop, -1),
        )

    @jax.jit
    def release(self, mask: Bool[Array, "N"]) -> "PagePool":
        """Empties the slots where mask is True and gives their pages back.

        Raises ValueError unless mask is bool `[N]`. Cost: that of `truncate`.
        """
        self._check_slots("mask", mask, jnp.bool_)
        return self.truncate(jnp.where(mask, 0, self.kv_lens))

    @jax.jit
    def fork(
        self, src: int | Int[Array, ""], dst: int | Int[Array, ""], length: int | Int[Array, ""]
    ) -> tuple["PagePool", Bool[Array, ""]]:
        """Lets the empty slot dst start with the first length tokens of src.

        Full pages are shared; a partial last page becomes a page of dst's own, whose rows `PagedKVCache.fork`
        copies. Returns the pool and ok. Refused, with nothing changed, if no page is free for that, if dst is not
        empty, if src holds fewer than length tokens, or if a slot does not exist.

        Raises ValueError unless src, dst and length are whole numbers.

        Cost: P + M int32 operations, no loop.
        """
        src, dst, length = (
            as_index(f"PagePool.fork: {name}", x) for name, x in (("src", src), ("dst", dst), ("length", length))
        )
        num_slots, width = self.block_table.shape
        exist = (src >= 0) & (src < num_slots) & (dst >= 0) & (dst < num_slots) & (src != dst)
        src, dst = jnp.clip(src, 0, num_slots - 1), jnp.clip(dst, 0, num_slots - 1)
        legal = exist & (self.kv_lens[dst] == 0) & (length >= 0) & (length <= self.kv_lens[src])
        full, partial_page = length // self.page_size, length % self.page_size > 0
        ok = legal & (~partial_page | (self.num_free > 0))

        entries = jnp.arange(width, dtype=jnp.int32)
        fresh = jnp.argmin(self.owners).astype(jnp.int32)  # a page that nobody owns, if there is one
        row = jnp.where(entries < full, self.block_table[src], 0)
        row = jnp.where((entries == full) & partial_page, fresh, row)
        pool = replace(
            self,
            block_table=self.block_table.at[dst].set(jnp.where(ok, row, self.block_table[dst])),
            kv_lens=self.kv_lens.at[dst].set(jnp.where(ok, length, self.kv_lens[dst])),
            owners=self._count(self.owners, row, ok & (entries < self._pages_for(length)), 1),
        )
        return pool, ok

    def check(self) -> bool:
        """True if every page is owned as counted and the table is 0 past each length; for debugging and tests.

        Raises ValueError that names the first fault. Reads the device.
        """
        table, lens, owners = (np.asarray(x) for x in (self.block_table, self.kv_lens, self.owners))
        held = -(-lens // self.page_size)
        if (lens < 0).any() or (held > table.shape[1]).any():
            slot = int(np.flatnonzero((lens < 0) | (held > table.shape[1]))[0])
            raise InputError(f"PagePool.check: slot {slot} has length {lens[slot]}, outside its table.")
        inside = np.arange(table.shape[1]) < held[:, None]
        counted = np.bincount(table[inside], minlength=owners.shape[0])
        counted[0] += 1
        for fault, what in (
            (table[~inside] != 0, "entries past a length that are not 0"),
            (table[inside] == 0, "owned entries that point to the reserved page 0"),
            (counted != owners, "pages whose owners are not as counted"),
        ):
            if fault.any():
                raise InputError(
                    f"PagePool.check: {int(fault.sum())} {what}, the first at {int(np.flatnonzero(fault)[0])}."
                )
        return True

    def _pages_for(self, lens: Int[Array, "*n"]) -> Int[Array, "*n"]:
        return (lens - 1) // self.page_size + 1  # not lens + page_size − 1, which may pass 2³¹

    def _check_slots(self, name: str, values: Any, dtype: Any) -> None:
        expected = f"{name} must be {jnp.dtype(dtype).name} [max_seqs] = {self.kv_lens.shape}"
        if not isinstance(values, jax.Array):  # inside jit arrays of NumPy have become JAX's
            raise InputError(f"{expected}, got {type(values).__name__}; pass one value for each slot.")
        if values.shape != self.kv_lens.shape or values.dtype != dtype:
            found = f"{values.dtype.name} {values.shape}"
            raise InputError(f"{expected}, got {found}; pass one value for each slot.")

    def _entries(self) -> Int[Array, "1 M"]:
        return jnp.arange(self.block_table.shape[1], dtype=jnp.int32)[None]

    def _count(
        self, owners: Int[Array, "P"], pages: Int[Array, "*n"], where: Bool[Array, "*n"], step: int
    ) -> Int[Array, "P"]:
        return owners.at[jnp.where(where, pages, owners.shape[0])].add(step, mode="drop")


def check_size(what: str, size: Any, at_least: int = 1) -> None:
    """Raises ValueError unless size is a whole number that is large enough."""
    if not isinstance(size, int | np.integer) or size < at_least:
        raise InputError(f"{what} must be a whole number of at least {at_least}, got {size!r}.")


def as_index(what: str, value: Any) -> Int[Array, ""]:
    """The value as an int32 scalar. Raises ValueError unless it is one whole number."""
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise InputError(f"{what} must be an int32, got {value}.")
    value = jnp.asarray(value)
    if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
        raise InputError(f"{what} must be one whole number, got {value.dtype.name} {value.shape}.")
    return value.astype(jnp.int32)


def _need_up_to_and_with(need: Int[Array, "N"]) -> Int[Array, "N"]:
    """Pages that a slot and all served before it take together: smaller needs first, then lower slots.

    A comparison of all pairs: for the few hundred slots of a batch it is one small reduction, where a sort and a
    cumulative sum would be several launches.
    """
    slot = jnp.arange(need.shape[0], dtype=jnp.int32)
    mine, theirs = need[:, None], need[None, :]
    served = (theirs < mine) | ((theirs == mine) & (slot[None, :] <= slot[:, None]))
    return jnp.sum(jnp.where(served, theirs, 0), axis=1, dtype=jnp.int32)
