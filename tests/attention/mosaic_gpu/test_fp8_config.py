"""Budgets of the kernel for e4m3 caches say what to lower; every shape gets what fits; bf16 queries lose nothing that
counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.attention.mosaic_gpu.config import SHARED_MEMORY
from mla_jax.attention.mosaic_gpu.fp8_config import Fp8Config, shared_memory
from mla_jax.attention.mosaic_gpu.fp8_launch import fp8_config_for, split_queries


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"query_parts": 3}, "1 or 2"),
        ({"slots": 1}, "at least 2"),
        ({"slots": 6}, "lower slots"),
        ({"score_registers": 122}, "multiple of 8"),
        ({"score_registers": 128}, r"512 registers .* has 504 .* lower value_registers"),
    ],
)
def test_budgets(fields, reason):
    with pytest.raises(ValueError, match=reason):
        Fp8Config(**fields)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("tokens, heads", [(1, 1), (1, 16), (2, 16), (1, 64), (1, 128), (4, 128)])
def test_every_shape_fits(tokens, heads, dtype):
    config = fp8_config_for(jax.ShapeDtypeStruct((2, tokens, heads, 576), dtype))
    rows = min(64, -(-tokens * heads // 8) * 8)
    assert config.slots >= 3 and shared_memory(config.slots, config.query_parts, rows) <= SHARED_MEMORY
    assert config.query_parts == (1 if dtype == jnp.float8_e4m3fn else 2)


@pytest.mark.parametrize("size", [1e-38, 3e-6, 1.0, 1e4, 1e37])
def test_a_bf16_query_is_the_sum_of_two_bytes(size):
    q = (jax.random.normal(jax.random.key(0), (3, 8, 576)) * size).astype(jnp.bfloat16)
    q = q.at[0, 0].set(0)
    parts, factor = jax.jit(split_queries)(q)
    assert parts.dtype == jnp.float8_e4m3fn and parts.shape == (3, 2, 8, 576)
    with np.errstate(under="ignore"):
        found = np.asarray(parts, np.float64).sum(axis=1) * np.asarray(factor, np.float64)[..., None]
    wanted = np.asarray(q, np.float64)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    error = np.abs(found - wanted)
    assert (error <= 2.0**-16 * largest).all()
    assert (error[np.abs(wanted) > largest / 256] == 0).all()
