"""FP8 rows: against NumPy and ml_dtypes, and against rows that FlashMLA's CUDA kernel read."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax import dequantize_kv, quantize_kv

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_kernels.npz")
E4M3 = ml_dtypes.float8_e4m3fn
ALL_E4M3 = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
POSITIVE = np.sort(ALL_E4M3[np.isfinite(ALL_E4M3) & (ALL_E4M3 >= 0)])


def every_bf16() -> np.ndarray:
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return values.astype(np.float32)


def half_step(x: np.ndarray) -> np.ndarray:
    """Half the distance between the e4m3 neighbours around |x|, for |x| ≤ 448."""
    above = np.searchsorted(POSITIVE, np.abs(x)).clip(1, len(POSITIVE) - 1)
    return (POSITIVE[above] - POSITIVE[above - 1]) / 2


@pytest.mark.parametrize("scale", [None, 1.0, 3.0, 0.25, 1e-6, 1e3])
def test_every_bf16_number_rounds_to_a_neighbour_or_saturates(scale: float | None) -> None:
    x = every_bf16()
    s = np.float32(1 if scale is None else scale)
    back = np.asarray(dequantize_kv(quantize_kv(jnp.asarray(x), "fp8_e4m3", scale), "fp8_e4m3", scale))
    assert np.array_equal(np.isnan(back), np.isnan(x))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x / s
    inside = np.abs(scaled) <= 448
    assert np.all(np.abs(back[inside] / s - scaled[inside]) <= half_step(scaled[inside]) * (1 + 1e-6))
    beyond = np.abs(scaled) > 448
    assert np.array_equal(back[beyond], np.sign(x[beyond]) * 448 * s)
    assert np.array_equal(np.signbit(back[x == 0]), np.signbit(x[x == 0]))  # −0 stays −0


def test_names_and_default_scale() -> None:
    x = jax.random.normal(jax.random.key(0), (3, 576))
    rows = quantize_kv(x, "fp8_e4m3")
    for other in (quantize_kv(x, "fp8"), quantize_kv(x, "fp8_e4m3", 1.0), quantize_kv(x, "fp8_e4m3", jnp.float32(0))):
        assert np.array_equal(np.asarray(rows).view(np.uint8), np.asarray(other).view(np.uint8))
    for name, dtype in (("bf16", jnp.bfloat16), ("fp16", jnp.float16), ("fp32", jnp.float32)):
        assert np.array_equal(quantize_kv(x, name), x.astype(dtype))
        assert dequantize_kv(quantize_kv(x, name), name, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def scale_by_hand(tile: np.ndarray, power_of_two: bool) -> np.float32:
    scale = float(np.abs(tile).max()) / 448
    return np.float32(2.0 ** np.ceil(np.log2(scale)) if power_of_two and scale else scale or 1)


def by_hand(row: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 656 bytes of one finite row with these scales, and what they mean."""
    tiles = row[:512].reshape(4, 128)
    values = [np.clip(tile / scale, -448, 448).astype(E4M3) for tile, scale in zip(tiles, scales, strict=True)]
    rope = row[512:].astype(ml_dtypes.bfloat16)
    parts = [np.concatenate(values).view(np.uint8), scales.view(np.uint8), rope.view(np.uint8)]
    meaning = np.concatenate([v.astype(np.float32) * s for v, s in zip(values, scales, strict=True)])
    return np.concatenate(parts), np.concatenate([meaning, rope.astype(np.float32)])


@pytest.mark.parametrize("power_of_two", [False, True])
def test_656_byte_rows_equal_those_made_by_hand(power_of_two: bool) -> None:
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(6, 576)) * 10.0 ** rng.integers(-6, 6, (6, 1))).astype(np.float32)
    x[1, 128:256] = 0
    x[2] = 0
    x[3, :128] = 448 * 2.0**-3  # a scale that is a power of two already
    rows = quantize_kv(jnp.asarray(x), "fp8_ds_mla", power_of_two=power_of_two)
    back = np.asarray(dequantize_kv(rows, "fp8_ds_mla"))
    for got, meaning, row in zip(np.asarray(rows), back, x, strict=True):
        scales = got[512:528].view(np.float32)
        wanted = np.array([scale_by_hand(tile, power_of_two) for tile in row[:512].reshape(4, 128)])
        # XLA divides by a constant through its reciprocal, which may be one unit in the last place off.
        np.testing.assert_allclose(scales, wanted, rtol=0 if power_of_two else 1.2e-7)
        expected, expected_meaning = by_hand(row, scales)
        assert np.array_equal(got, expected)
        assert np.array_equal(meaning, expected_meaning)


def test_a_bad_value_touches_no_other() -> None:
    x = np.random.default_rng(2).normal(size=(3, 576)).astype(np.float32)
    clean = np.asarray(dequantize_kv(quantize_kv(jnp.asarray(x), "fp8_ds_mla"), "fp8_ds_mla"))
    bad = x.copy()
    largest = np.abs(x[1, 128:256]).argmax() + 128
    spot = 130 if largest != 130 else 131
    for value in (np.nan, np.inf, -np.inf):
        bad[1, spot] = value
        got = np.asarray(dequantize_kv(quantize_kv(jnp.asarray(bad), "fp8_ds_mla"), "fp8_ds_mla"))
        others = np.ones_like(x, bool)
        others[1, spot] = False
        assert np.array_equal(got[others], clean[others])
        assert np.isnan(got[1, spot]) if np.isnan(value) else np.sign(got[1, spot]) == np.sign(value)
        assert np.isnan(value) or np.isfinite(got[1, spot])


def test_tiny_tiles_are_zeros_and_not_nan() -> None:
    x = jnp.full((1, 576), 1e-42, jnp.float32)
    assert not np.isnan(np.asarray(dequantize_kv(quantize_kv(x, "fp8_ds_mla"), "fp8_ds_mla"))).any()


def test_rows_of_the_cuda_kernels_mean_what_attention_over_them_says() -> None:
    """`sparse_v32_h64`: FlashMLA's own output over 656-byte rows, from our reading of them and float64 attention."""
    get = lambda name: GOLDEN[f"sparse_v32_h64/{name}"]  # noqa: E731
    q = get("q").view(ml_dtypes.bfloat16).astype(np.float64)
    # In bf16, as that kernel makes them; read in float32 the lse differs by 1.3e-3.
    keys = np.asarray(dequantize_kv(jnp.asarray(get("kv")), "fp8_ds_mla", dtype=jnp.bfloat16), np.float64)
    keys = keys.reshape(-1, 576)
    out = get("out").view(ml_dtypes.bfloat16).astype(np.float64)
    for b, s in np.ndindex(*get("indices").shape[:2]):
        chosen = get("indices")[b, s]
        chosen = chosen[chosen >= 0]
        if chosen.size == 0:
            assert not out[b, s].any()
            continue
        scores = q[b, s] @ keys[chosen].T * float(get("scale"))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        lse = np.log(weights.sum(-1)) + scores.max(-1)
        expected = weights @ keys[chosen, :512] / weights.sum(-1, keepdims=True)
        assert np.abs(lse - get("lse")[b, :, s]).max() < 1e-5
        assert np.linalg.norm(out[b, s] - expected) / np.linalg.norm(expected) < 5e-3


def test_bytes_survive_a_round_trip() -> None:
    """Rows that FlashMLA reads, dequantized and quantized with their own kind of scale, give the same numbers."""
    rows = jnp.asarray(GOLDEN["sparse_v32_h64/kv"].reshape(-1, 656))
    once = dequantize_kv(rows, "fp8_ds_mla")
    again = dequantize_kv(quantize_kv(once, "fp8_ds_mla"), "fp8_ds_mla")
    assert np.abs(np.asarray(again) - np.asarray(once)).max() <= 2**-4 * np.abs(np.asarray(once)).max()


def test_no_rows_are_no_rows() -> None:
    for name, row in (("fp8_e4m3", 576), ("fp8_ds_mla", 656)):
        rows = quantize_kv(jnp.zeros((0, 576)), name)
        assert rows.shape == (0, row) and dequantize_kv(rows, name).shape == (0, 576)


def test_jit_vmap_and_traced_scale() -> None:
    x = jax.random.normal(jax.random.key(1), (4, 576)) * 100
    for name, scale in (("fp8_e4m3", jnp.float32(0.5)), ("fp8_ds_mla", None)):
        plain = np.asarray(quantize_kv(x, name, scale)).view(np.uint8)
        jitted = jax.jit(lambda x, s, name=name: quantize_kv(x, name, s))(x, scale)
        mapped = jax.vmap(lambda row, name=name, scale=scale: quantize_kv(row, name, scale))(x)
        assert np.array_equal(plain, np.asarray(jitted).view(np.uint8))
        assert np.array_equal(plain, np.asarray(mapped).view(np.uint8))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: quantize_kv(x, "int4"), "'int4' is not known"),
        (lambda x: quantize_kv(x, "bf16", 2.0), "scale must be None for bf16"),
        (lambda x: quantize_kv(x, "fp8_ds_mla", 2.0), "scale must be None for fp8_ds_mla"),
        (lambda x: quantize_kv(x, "fp8_e4m3", 0.0), "positive"),
        (lambda x: quantize_kv(x, "fp8_e4m3", float("nan")), "positive"),
        (lambda x: quantize_kv(x, "fp8_e4m3", np.array(-1.0)), "positive"),
        (lambda x: quantize_kv(x, "fp8_e4m3", jnp.ones(2)), "one number"),
        (lambda x: quantize_kv(x, "fp8_e4m3", "1"), "one number"),
        (lambda x: quantize_kv(x[0, 0], "fp8_e4m3"), "got one number"),
        (lambda x: quantize_kv(x[..., :64], "fp8_ds_mla"), "512 \\+ 64"),
        (lambda x: dequantize_kv(x, "fp8_e4m3"), "float8_e4m3fn, got float32"),
        (lambda x: dequantize_kv(x.astype(jnp.uint8), "fp8_ds_mla"), "656 bytes wide"),
    ],
)
def test_bad_input_is_one_sentence(call: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        call(jnp.ones((2, 576)))
    assert "\n" not in str(error.value)
