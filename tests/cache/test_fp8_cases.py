"""FP8 faults that people met elsewhere, as small inputs: one test each, named after the fault.

Two more stand where what they need is: NaN padding in calibration (`tests/decode/test_calibrate.py`) and YaRN on both
paths (`tests/model/test_fp8_model.py`).
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mla_jax import PagedKVCache, dequantize_kv, kv_format, mla_decode, quantize_kv
from mla_jax.model.cache import create_cache
from tests.tiny import TINY, tiny_params

FP8 = ("fp8_e4m3", "fp8_ds_mla")
E4M3 = ml_dtypes.float8_e4m3fn
SCALES = [None, 1.0, 3.0, 0.25, 1e-6]
# In units of the scale: the largest, those above that saturate, both zeros, e4m3's subnormals and what lies between.
EDGES = np.float32(
    [0.0, 448, 447, 449, 463, 464, 465, 470, 500, 1e4, 3e38, np.inf, *(k * 2.0**-10 for k in range(20)), 1e-6, 1e-38]
)


def round_trip(x, name: str, scale=None) -> np.ndarray:
    return np.asarray(dequantize_kv(quantize_kv(jnp.asarray(x), name, scale), name, scale))


def rows(seed: int = 0, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 576)).astype(np.float32)


@pytest.mark.parametrize("scale", SCALES)
def test_scales_3_and_a_quarter_and_a_millionth_round_trip(scale: float | None) -> None:
    """Every e4m3 number times the scale comes back as it was, and what lies between goes to a neighbour, ties to even.

    sglang 34765: a scale on one side only would be off by that factor.
    """
    s = np.float32(1 if scale is None else scale)
    numbers = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    np.testing.assert_array_equal(round_trip(numbers * s, "fp8", scale), numbers * s)
    x = np.concatenate([rows().ravel() * 30, EDGES[EDGES < 465], -EDGES[EDGES < 465]]) * s
    by_hand = np.clip(x / s, -448, 448).astype(E4M3)
    stored = np.asarray(quantize_kv(jnp.asarray(x), "fp8", scale))
    np.testing.assert_array_equal(stored.view(np.uint8), by_hand.view(np.uint8))  # the sign of zeros too
    np.testing.assert_array_equal(round_trip(x, "fp8", scale), by_hand.astype(np.float32) * s)


@pytest.mark.parametrize("x", [np.zeros((2, 576), np.float32), rows()], ids=["zeros", "numbers"])
def test_scale_none_means_1_and_so_does_a_traced_0(x: np.ndarray) -> None:
    wanted = np.asarray(quantize_kv(jnp.asarray(x), "fp8")).view(np.uint8)
    for scale in (1, 1.0, np.float32(1), jnp.float32(1), jnp.float32(0)):
        assert np.array_equal(np.asarray(quantize_kv(jnp.asarray(x), "fp8", scale)).view(np.uint8), wanted)
    traced = jax.jit(lambda x, scale: quantize_kv(x, "fp8", scale))(x, jnp.max(jnp.abs(x * 0)))
    assert np.array_equal(np.asarray(traced).view(np.uint8), wanted)


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, np.float32(0), np.zeros(()), -1.0, float("nan"), float("inf")])
def test_a_scale_of_0_is_refused_where_it_is_known(scale: object) -> None:
    stored = quantize_kv(jnp.ones((1, 8)), "fp8")
    for call in (lambda: quantize_kv(jnp.ones((1, 8)), "fp8", scale), lambda: dequantize_kv(stored, "fp8", scale)):
        with pytest.raises(ValueError, match="scale must be a positive number, got"):
            call()


def test_a_scale_has_no_effect_on_a_bf16_cache() -> None:
    """sglang 18396: a model with calibrated scales and a bf16 cache gave logits scaled down."""
    params = tiny_params()
    scaled = type(params)(**{**vars(params), "kv_scales": jnp.array([0.06, 5.0, 2.0])})
    table, positions = jnp.array([[1]], jnp.int32), jnp.arange(8, dtype=jnp.int32)[None]
    x = jax.random.normal(jax.random.key(0), (1, 8, TINY.latent_dim))
    caches = [create_cache(p, TINY, 2, "bf16").write(1, table, positions, x) for p in (params, scaled)]
    assert caches[1].scale(1) is None
    np.testing.assert_array_equal(*(cache.gather(1, table, positions) for cache in caches))
    for call in (lambda: quantize_kv(x, "bf16", 2.0), lambda: PagedKVCache.create(1, 2, 8, "bf16", scales=jnp.ones(1))):
        with pytest.raises(ValueError, match="scale"):
            call()
    q = jnp.ones((1, 1, 2, TINY.latent_dim))
    with pytest.raises(ValueError, match="kv_scale must be None for a cache of bfloat16"):
        mla_decode(q, caches[0].layers[1], table, jnp.array([8], jnp.int32), d_v=24, kv_scale=2.0)


@pytest.mark.parametrize("scale", SCALES)
def test_values_beyond_448_saturate_and_are_never_nan(scale: float | None) -> None:
    """ml_dtypes 400: a cast alone gives NaN above 464."""
    s = np.float32(1 if scale is None else scale)
    beyond = np.float32([448, 449, *range(450, 471), 1e3, 1e4, 1e30, np.inf])
    for sign in (1, -1):
        with np.errstate(over="ignore"):
            x = sign * beyond * s
        np.testing.assert_array_equal(round_trip(x, "fp8", scale), np.full_like(x, sign * 448 * s))


@pytest.mark.parametrize("value", [449.0, 470.0, 1e4, 3e38, np.inf])
def test_large_values_in_656_byte_rows_are_never_nan(value: float) -> None:
    x = rows()
    x[1, 200], x[1, 300], x[1, 570] = value, -value, 1.0
    back = round_trip(x, "fp8_ds_mla")
    assert np.isfinite(back).all()
    if np.isfinite(value):
        np.testing.assert_allclose(back[1, [200, 300]], [value, -value], rtol=2e-7)  # the largest of a tile is exact
    x[1, :512] = np.float32(value)
    assert np.isfinite(round_trip(x, "fp8_ds_mla")).all()


@pytest.mark.parametrize("name", FP8)
def test_an_all_zero_token_is_zero_and_attention_over_it_is_a_number(name: str) -> None:
    """lmdeploy 3652: amax 0 gave scale 0, and 0 / 0 is NaN."""
    x = rows(count=64)
    x[0], x[5], x[9, 128:256] = 0, -0.0, 0
    back = round_trip(x, name)
    assert not back[0].any() and not back[5].any() and not back[9, 128:256].any() and back[9].any()
    assert np.signbit(back[5]).all()
    cache = quantize_kv(jnp.asarray(x)[None], name)
    for length in (1, 10):
        out, lse = mla_decode(
            jnp.ones((1, 1, 2, 576)), cache, jnp.array([[0]], jnp.int32), jnp.array([length], jnp.int32)
        )
        assert np.isfinite(out).all() and np.isfinite(lse).all() and bool(out.any()) == (length > 1)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_padded_nan_row_poisons_no_other(name: str, bad: float) -> None:
    """vllm 37442: one amax over the batch spread the NaN of a padded row."""
    x = rows(count=4)
    wanted = np.asarray(quantize_kv(jnp.asarray(x), name)).view(np.uint8)
    x[2] = bad
    got = np.asarray(quantize_kv(jnp.asarray(x), name)).view(np.uint8)
    assert np.array_equal(np.delete(got, 2, axis=0), np.delete(wanted, 2, axis=0))
    back = round_trip(x, name)[2]
    assert np.isnan(back).all() if np.isnan(bad) else not np.isnan(back).any()


def test_fp8_and_fp8_e4m3_spell_the_same_format() -> None:
    assert kv_format("fp8") is kv_format("fp8_e4m3")
    x, table = rows(), jnp.array([[1]], jnp.int32)
    one, two = (np.asarray(quantize_kv(jnp.asarray(x), name, 0.5)).view(np.uint8) for name in ("fp8", "fp8_e4m3"))
    assert np.array_equal(one, two)
    caches = [PagedKVCache.create(1, 2, 576, name, scales=jnp.ones(1)) for name in ("fp8", "fp8_e4m3")]
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    one, two = (c.write(0, table, positions, jnp.asarray(x)[None]) for c in caches)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    np.testing.assert_array_equal(*(np.asarray(c.layers[0]).view(np.uint8) for c in (one, two)))
