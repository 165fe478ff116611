"""The README's block on `flash_mla_jax` runs as printed, with a stand-in for the kernels."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flash_mla_jax
from mla_jax import num_sm_parts, tile_schedule

README = Path(__file__).parents[2] / "README.md"


def schedule(lens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """What FlashMLA's scheduler gives, which has no stand-in."""
    made = tile_schedule(lens, num_sm_parts(132, 1, rows))
    return made.metadata, made.num_splits


def test_the_block_runs(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla_jax, "get_mla_metadata", schedule)
    (block,) = re.findall(r"```py\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {
        "s_q": 1,
        "h_q": 4,
        "q": jax.random.normal(jax.random.key(0), (2, 1, 4, 576), jnp.bfloat16),
        "k_cache": jax.random.normal(jax.random.key(1), (4, 64, 1, 576), jnp.bfloat16),
        "block_table": jnp.array([[2, 1], [3, 0]], jnp.int32),
        "cache_seqlens": jnp.array([70, 5], jnp.int32),
    }
    exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 1, 4, 512) and names["lse"].shape == (2, 4, 1)
    assert bool(jnp.isfinite(names["out"]).all())
