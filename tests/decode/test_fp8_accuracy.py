"""What an FP8 cache may cost the demo model, and that a broken one is caught. The table: `make bench-cache`."""

from typing import Any

import jax.numpy as jnp
import pytest

from mla_jax import load_checkpoint
from mla_jax.decode.calibrate import calibrate
from mla_jax.demo import CHECKPOINT, HELDOUT
from tests.benchmarks.fp8_accuracy import CALIBRATION, ROWS, measure

BITS = 2e-3  # of bits per byte: what a format may cost
BITS_OF_A_FEW = 5e-3  # the same over 1024 bytes, where chance alone makes 1e-3 (one sigma)
AGREEMENT = 0.99  # most likely tokens that stay the same
ACCEPTED = 0.02  # tokens per step with one drafted
FEW_BYTES = 1280


def rows(max_bytes: int | None, names: tuple[str, ...], drafts: bool = False) -> dict[str, dict[str, Any]]:
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    scales = calibrate(params, config, list(CALIBRATION.read_bytes()[:2048])).scales
    tokens = list(HELDOUT.read_bytes()[:max_bytes])
    chosen = [row for row in ROWS if any(row.name.startswith(name) for name in names)]
    return {row["cache"]: row for row in measure(params, config, tokens, scales, chosen, tokens if drafts else [])}


def assert_visibly_broken(row: dict[str, Any]) -> None:
    assert row["is_control"] and row["excess"] > 5 * BITS and row["top1_agreement"] < 0.95, row


def test_a_sound_cache_costs_little_and_a_broken_one_much() -> None:
    found = rows(FEW_BYTES, ("bf16", "fp8_e4m3, calibrated", "fp8_ds_mla", "broken: scale"))
    sound, broken = ([row for row in found.values() if row["is_control"] == wanted] for wanted in (False, True))
    assert len(sound) == 4 and len(broken) == 1 and found["bf16"]["top1_agreement"] == 1
    for row in sound:
        assert abs(row["excess"]) < BITS_OF_A_FEW and row["top1_agreement"] > 0.97, row
    assert found["fp8_ds_mla"]["top1_agreement"] >= AGREEMENT
    for row in broken:
        assert_visibly_broken(row)


@pytest.mark.full
def test_the_whole_sample() -> None:
    found = rows(None, ("",), drafts=True)
    for name, row in found.items():
        print(f"{name:<37} {row['bits_per_byte']:.4f} {100 * row['excess']:+.3f} % {100 * row['top1_agreement']:.2f} %")
        if row["is_control"]:
            assert_visibly_broken(row)
        else:
            assert abs(row["excess"]) < BITS, row
            assert abs(row["accept_length"] - found["bf16"]["accept_length"]) < ACCEPTED, row
    assert found["fp8_ds_mla"]["top1_agreement"] >= AGREEMENT
    if found["fp8_e4m3, calibrated"]["top1_agreement"] < AGREEMENT:
        pytest.xfail("fp8_e4m3 keeps 98.4 % of the most likely tokens, not 99 %: 4 bits are few for rotated keys")
