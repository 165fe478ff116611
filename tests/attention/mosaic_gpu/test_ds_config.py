"""Every shape of queries gets what fits a CTA, by the kernel for caches in fp8_ds_mla."""

import jax
import jax.numpy as jnp
import pytest

from mla_jax.attention.mosaic_gpu.config import REGISTERS, SHARED_MEMORY
from mla_jax.attention.mosaic_gpu.ds_config import shared_memory
from mla_jax.attention.mosaic_gpu.ds_launch import ds_config_for


@pytest.mark.parametrize("tokens, heads", [(1, 1), (1, 16), (2, 16), (33, 1), (3, 16), (1, 64), (1, 128), (4, 128)])
def test_every_shape_fits(tokens, heads):
    config = ds_config_for(jax.ShapeDtypeStruct((2, tokens, heads, 576), jnp.bfloat16))
    rows = min(64, -(-tokens * heads // 8) * 8)
    assert config.slots >= 2 and shared_memory(config.slots, rows) <= SHARED_MEMORY
    assert config.score_registers + 2 * config.value_registers <= REGISTERS
    assert config.score_registers % 8 == config.value_registers % 8 == 0


@pytest.mark.parametrize("rows, slots", [(8, 5), (16, 4), (40, 4), (64, 3)])
def test_slots(rows, slots):
    assert ds_config_for(jax.ShapeDtypeStruct((2, 1, rows, 576), jnp.bfloat16)).slots == slots
