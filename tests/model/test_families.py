"""V2 and V3, with and without YaRN, query compression and experts: every way through equals transformers."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from agreement import compare
from tiny import Tiny

from mla_jax import load_checkpoint

DENSE_TOLERANCE, MOE_TOLERANCE = 1e-5, 2e-5  # float32 rounding, at logits up to 2
RAGGED = (10, 12, 75, 31, 139)  # tokens; with 9 decoded: prompts of 1, 3, 66, 22 and 130, in chunks of 48

FAMILIES = [
    Tiny(version, yarn, q_lora, moe, tied=yarn and q_lora)
    for version in (2, 3)
    for yarn in (False, True)
    for q_lora in (False, True)
    for moe in (False, True)
]


def prompts(lengths: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, 256, length).astype(np.int32) for length in lengths]


def check(tiny: Tiny, lengths: tuple[int, ...], folder) -> None:
    model = tiny.make(folder)
    config, params = load_checkpoint(folder, jnp.float32)
    worst = compare(model, config, params, prompts(lengths), 48, MOE_TOLERANCE if tiny.moe else DENSE_TOLERANCE)
    print(f"{tiny}, {len(lengths)} requests: max |Δ| {worst:.1e}")


def some(chosen: Callable[[Tiny], bool]) -> list:
    """All families, those not chosen in the long version only."""
    return [pytest.param(tiny, marks=() if chosen(tiny) else pytest.mark.full) for tiny in FAMILIES]


def in_half_fraction(tiny: Tiny) -> bool:
    """Half of the families, in which any three of the four settings still come in all combinations."""
    return (tiny.version + tiny.yarn + tiny.q_lora + tiny.moe) % 2 == 0


@pytest.mark.parametrize("tiny", some(in_half_fraction), ids=str)
def test_ragged_batch_equals_transformers(tiny, tmp_path):
    check(tiny, RAGGED, tmp_path)


@pytest.mark.parametrize("tiny", some(lambda tiny: tiny == FAMILIES[-1]), ids=str)
def test_one_request_equals_transformers(tiny, tmp_path):
    check(tiny, (61,), tmp_path)


@pytest.mark.parametrize(
    "tiny", [Tiny(3, interleaved=False), Tiny(3, moe=True, shared_experts=2)], ids=["halves", "two shared experts"]
)
def test_rarer_settings_equal_transformers(tiny, tmp_path):
    check(tiny, (31,), tmp_path)
