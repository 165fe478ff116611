"""`create_cache`: as many layers as asked for, with the model's scales where the format has scales."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.model.cache import create_cache
from tests.tiny import TINY, tiny_params

PARAMS = tiny_params()
SCALED = replace(PARAMS, kv_scales=jnp.array([0.5, 2.0, 3.0], jnp.float32))


@pytest.mark.parametrize(("mtp", "layers"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "bf16", "fp32"])
def test_layers_and_scales(name: str, mtp: bool, layers: int) -> None:
    cache = create_cache(SCALED, TINY, 5, name, mtp=mtp)
    assert len(cache.layers) == layers and cache.layers[0].shape == (5, 64, TINY.latent_dim)
    if name.startswith("fp8"):
        np.testing.assert_array_equal(cache.scales, SCALED.kv_scales[:layers])
    else:
        assert cache.scales is None
    assert create_cache(PARAMS, TINY, 5, name, mtp=mtp).scales is None


@pytest.mark.parametrize("mtp", [False, True])
def test_a_donated_cache_takes_no_scales_along(mtp: bool) -> None:
    """The model keeps its scales for the next cache, also where the cache has one for each of them."""
    params = replace(PARAMS, kv_scales=jnp.array([0.5, 2.0, 3.0][: 3 if mtp else 2], jnp.float32))
    for _ in range(2):
        cache = create_cache(params, TINY, 2, "fp8", mtp=mtp)
        for leaf in jax.tree.leaves(cache):
            leaf.delete()  # as donation does
    assert not params.kv_scales.is_deleted()


def test_too_few_scales_are_refused() -> None:
    two = replace(PARAMS, kv_scales=jnp.ones(2))
    assert create_cache(two, TINY, 5, "fp8").scales.shape == (2,)
    assert create_cache(two, TINY, 5, "bf16", mtp=True).scales is None
    with pytest.raises(ValueError, match="must hold 3 scales"):
        create_cache(two, TINY, 5, "fp8", mtp=True)
    with pytest.raises(ValueError, match="must hold 2 scales"):
        create_cache(replace(PARAMS, kv_scales=jnp.float32(1)), TINY, 5, "fp8")
