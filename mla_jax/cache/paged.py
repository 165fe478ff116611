"""The paged cache of latents: one array of pages per layer, addressed by (page, row), never by a flat index."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_jax.cache import formats
from mla_jax.cache.codec import dequantize_kv, quantize_kv
from mla_jax.cache.formats import DS_LATENT, DS_ROPE, PAGE_SIZE, KVFormat
from mla_jax.cache.pages import PagePool, as_index, check_size
from mla_jax.errors import InputError

Layer = Float[Array, "P T D"]


@partial(jax.tree_util.register_dataclass, data_fields=("layers", "scales"), meta_fields=("format",))
@dataclass(frozen=True)
class PagedKVCache:
    """Latents of all layers in pages of 64 tokens; a page id means the same place in every layer.

    Immutable: methods return the cache that follows. Donate it to the jitted step that changes it, and XLA writes
    in place. Apart from the pool, so that the pool may be kept while the cache is donated.

    Attributes:
        layers: for each layer `[P, 64, D]` in the format's dtype (`[P, 64, 656]` for `fp8_ds_mla`): what `mla_decode`
            takes.
        format: how a row lies in memory.
        scales: float32 `[layers]`, of a format with a scale per tensor; None means 1.
    """

    layers: tuple[Layer, ...]
    format: KVFormat = field(metadata={"static": True})
    scales: Float[Array, "layers"] | None = None

    @classmethod
    def create(
        cls,
        num_layers: int,
        num_pages: int,
        latent_dim: int,
        kv_format: str = "bf16",
        page_size: int = PAGE_SIZE,
        scales: Float[Array, "layers"] | None = None,
    ) -> "PagedKVCache":
        """An empty cache. Takes num_layers · num_pages · page_size · bytes_per_token bytes.

        Raises ValueError for an unknown format, a size below 1, a row that the format cannot hold, and scales that are
        not one per layer or that the format does not have.
        """
        chosen = formats.kv_format(kv_format)
        sizes = {"num_layers": num_layers, "num_pages": num_pages, "latent_dim": latent_dim}
        sizes["page_size"] = page_size
        for name, size in sizes.items():
            check_size(f"PagedKVCache.create: {name}", size)
        # A copy: who donates the cache must not lose the scales of the model.
        scales = None if scales is None else jnp.array(scales, jnp.float32, copy=True)
        if scales is not None and not (chosen.has_scale and scales.shape == (num_layers,)):
            raise InputError(
                f"scales must be [{num_layers}], one per layer, and only for a format that has them; got "
                f"{scales.shape} for {chosen.name}."
            )
        if scales is not None and not isinstance(scales, jax.core.Tracer) and not np.all(np.asarray(scales) > 0):
            raise InputError(f"scales must be positive numbers, got {np.asarray(scales).tolist()}.")
        shape = (num_pages, page_size, chosen.row_width(latent_dim))
        return cls(tuple(jnp.zeros(shape, chosen.dtype) for _ in range(num_layers)), chosen, scales)

    @property
    def latent_dim(self) -> int:
        """D, numbers of a latent row."""
        return DS_LATENT + DS_ROPE if self.format.name == "fp8_ds_mla" else self.layers[0].shape[2]

    def scale(self, layer: int) -> Float[Array, ""] | None:
        """The kv_scale of `mla_decode` for a layer; None where the format has none or it is 1."""
        return None if self.scales is None else self.scales[layer]

    def write(
        self,
        layer: int,
        block_table: Int[Array, "B M"],
        positions: Int[Array, "B S"],
        latents: Float[Array, "B S D"],
        valid: Bool[Array, "B S"] | None = None,
    ) -> "PagedKVCache":
        """Stores latents at logical positions of their sequences in one layer, converted to the format.

        Rows that are not valid, positions outside the table and table entries that are no page go to the
        reserved page 0. A sequence must own the pages it writes to (`PagePool.extend`) alone.

        Raises ValueError for a layer that is not there and for shapes that do not belong together.

        Cost: B·S rows are written, in place if the cache is donated; otherwise the layer is copied.
        """
        self._check_layer(layer)
        expected = (*positions.shape, self.latent_dim)
        if latents.shape != expected:
            raise InputError(f"latents must be [B, S, D] = {expected}, got {latents.shape}.")
        pages, rows = _locate(block_table, positions, self.layers[layer].shape, valid)
        stored = quantize_kv(latents, self.format.name, self.scale(layer))
        written = self.layers[layer].at[pages, rows].set(stored, mode="drop")
        return self._with_layer(layer, written)

    def gather(
        self, layer: int, block_table: Int[Array, "B M"], positions: Int[Array, "B S"], dtype: Any = jnp.float32
    ) -> Float[Array, "B S D"]:
        """Latents `[B, S, D]` of one layer at logical positions, in dtype. What `write` sends to page 0 reads page 0.

        Raises ValueError for a layer that is not there and for shapes that do not belong together. Cost: B·S rows are
        read.
        """
        self._check_layer(layer)
        pages, rows = _locate(block_table, positions, self.layers[layer].shape, None)
        return dequantize_kv(self.layers[layer][pages, rows], self.format.name, self.scale(layer), dtype)

    @jax.jit
    def move_rows(
        self,
        block_table: Int[Array, "B M"],
        source: Int[Array, "B S"],
        destination: Int[Array, "B S"],
        valid: Bool[Array, "B S"] | None = None,
    ) -> "PagedKVCache":
        """Copies rows within each sequence, in all layers, from source to destination positions.

        All rows are read before one is written, so ranges may overlap. Makes the rows of an accepted path of a
        draft tree contiguous.

        Raises ValueError for shapes that do not belong together. Cost: B·S rows per layer are read and written.
        """
        if source.shape != destination.shape:
            raise InputError(f"source and destination must have one shape, got {source.shape} and {destination.shape}.")
        read, write = (_locate(block_table, p, self.layers[0].shape, valid) for p in (source, destination))
        return self._map(lambda layer: layer.at[write].set(layer[read], mode="drop"))

    @jax.jit
    def fork(
        self,
        pool: PagePool,
        src: int | Int[Array, ""],
        dst: int | Int[Array, ""],
        length: int | Int[Array, ""],
        ok: bool | Bool[Array, ""] = True,
    ) -> "PagedKVCache":
        """Copies the partial last page after `pool, ok = pool.fork(src, dst, length)`, with what it returned.

        Without ok, a refused fork onto a slot that already holds length tokens would overwrite its last page.

        Raises ValueError unless src, dst and length are whole numbers. Cost: one page per layer is copied.
        """
        src, dst, length = (
            as_index(f"PagedKVCache.fork: {name}", x) for name, x in (("src", src), ("dst", dst), ("length", length))
        )
        last, partial_page = length // pool.page_size, length % pool.page_size > 0
        pages = pool.block_table.at[jnp.stack([src, dst]), last].get(mode="clip")
        ours = jnp.where(ok & partial_page & (pool.kv_lens[dst] == length), pages, 0)
        return self._copy_pages(ours[:1], ours[1:])

    @jax.jit
    def copy_on_write(self, before: PagePool, after: PagePool) -> "PagedKVCache":
        """Copies the pages that `extend` replaced because they were shared; before and after are the two pools.

        Copies up to N pages per layer, so call it only where sequences are cut below a fork (see `extend`).
        """
        last = jnp.maximum(before.kv_lens - 1, 0)[:, None] // before.page_size
        old, new = (jnp.take_along_axis(p.block_table, last, axis=1)[:, 0] for p in (before, after))
        replaced = (old != new) & (before.kv_lens > 0) & (after.kv_lens >= before.kv_lens)
        return self._copy_pages(jnp.where(replaced, old, 0), jnp.where(replaced, new, 0))

    def _copy_pages(self, source: Int[Array, "K"], destination: Int[Array, "K"]) -> "PagedKVCache":
        return self._map(lambda layer: layer.at[destination].set(layer[source]))

    def _map(self, change: Any) -> "PagedKVCache":
        return replace(self, layers=tuple(change(layer) for layer in self.layers))

    def _check_layer(self, layer: int) -> None:
        if layer not in range(len(self.layers)):
            raise InputError(f"layer must be one of 0 … {len(self.layers) - 1}, got {layer}.")

    def _with_layer(self, index: int, layer: Layer) -> "PagedKVCache":
        return replace(self, layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))


def _locate(
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B S"],
    layer_shape: tuple[int, ...],
    valid: Bool[Array, "B S"] | None,
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """(page, row within it) of logical positions; page 0 where not valid, outside the table or not a page."""
    num_pages, page_size, _ = layer_shape
    for name, array, kind in (("positions", positions, jnp.integer), ("valid", valid, jnp.bool_)):
        if array is not None and not jnp.issubdtype(array.dtype, kind):
            raise InputError(f"{name} must be of {'bool' if name == 'valid' else 'int32'}, got {array.dtype.name}.")
        if array is not None and array.shape != (block_table.shape[0], *positions.shape[1:2]):
            raise InputError(f"{name} must be [B, S] with the B of block_table {block_table.shape}, got {array.shape}.")
    if positions.ndim != 2:
        raise InputError(
            f"positions must be [B, S], got {positions.shape}; for one token each pass positions[:, None]."
        )
    inside = (positions >= 0) & (positions < block_table.shape[1] * page_size)
    if valid is not None:
        inside &= valid
    entries = jnp.clip(positions // page_size, 0, block_table.shape[1] - 1)
    pages = jnp.take_along_axis(block_table, entries, axis=1)
    pages = jnp.where(inside & (pages >= 0) & (pages < num_pages), pages, 0)
    return pages, positions % page_size
