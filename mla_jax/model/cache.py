"""The latent cache that a model needs."""

from mla_jax.cache import formats
from mla_jax.cache.formats import PAGE_SIZE
from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.model.params import ModelParams


def create_cache(
    params: ModelParams, config: MLAConfig, num_pages: int, kv_format: str, *, mtp: bool = False
) -> PagedKVCache:
    """An empty cache for a model, with the model's own scales where the format has scales.

    Takes num_pages · `page_bytes`.

    Args:
        num_pages: of 64 tokens, the reserved page 0 included.
        kv_format: name or alias of the format.
        mtp: with layers for the multi-token-prediction modules too, behind those of the decoder.

    Raises:
        ValueError: an unknown format, one that cannot hold the model's rows, no page, or fewer scales than layers.
    """
    num_layers = config.num_cache_layers if mtp else config.num_layers
    scales = params.kv_scales if formats.kv_format(kv_format).has_scale else None
    if scales is not None:
        if scales.ndim != 1 or scales.shape[0] < num_layers:
            raise InputError(f"params.kv_scales must hold {num_layers} scales, one per layer, got {scales.shape}.")
        scales = scales[:num_layers]
    return PagedKVCache.create(num_layers, num_pages, config.latent_dim, kv_format, scales=scales)


def page_bytes(config: MLAConfig, kv_format: str, *, mtp: bool = False) -> int:
    """Bytes of a page of 64 tokens in all layers, the MTP modules' too where wanted: what a pool is sized by.

    A cache of N bytes has N // page_bytes pages, of which page 0 is reserved. Raises ValueError for an unknown
    format and one that cannot hold the model's rows.
    """
    num_layers = config.num_cache_layers if mtp else config.num_layers
    return PAGE_SIZE * num_layers * formats.kv_format(kv_format).bytes_per_token(config.latent_dim)
