"""FP8 caches: against the CUDA kernel, and against attention over the dequantized cache."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from decode_problems import IMPLEMENTATIONS, Problem, errors

from mla_jax import dequantize_kv, mla_decode, quantize_kv

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "golden_kernels.npz")
CUDA_RMS, RMS, LSE = 2e-2, 5e-3, 1e-3  # e4m3 weights in the CUDA kernel; bf16 weights in ours
RAGGED = Problem((70, 0, 1, 64, 129, 600), queries=2, heads=5)


def rms(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_cuda_kernel(implementation):
    row = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN.files if key.startswith("fp8_decode_h16/")}
    q, kv = (row[name].view(ml_dtypes.float8_e4m3fn) for name in ("q", "kv"))
    q_scale, kv_scale = float(row["descale_q"]), float(row["descale_k"])
    options = {"sm_scale": float(row["scale"]), "causal": bool(row["causal"]), "implementation": implementation}
    arrays = (row["bt"], row["lens"])
    out, lse = mla_decode(
        jnp.asarray(q), jnp.asarray(kv[:, :, 0]), *arrays, q_scale=q_scale, kv_scale=kv_scale, **options
    )
    wide = (jnp.asarray(x.astype(np.float32) * scale) for x, scale in ((q, q_scale), (kv[:, :, 0], kv_scale)))
    exact, exact_lse = mla_decode(*wide, *arrays, **options)
    want = row["out"].view(ml_dtypes.bfloat16)
    assert out.dtype == jnp.bfloat16
    assert rms(out, want) <= CUDA_RMS, errors(np.asarray(out, np.float64), want.astype(np.float64))
    assert rms(out, exact) <= RMS
    np.testing.assert_allclose(lse, row["lse"], atol=LSE)
    np.testing.assert_allclose(lse, exact_lse, atol=LSE)


def quantized(problem: Problem, kv_format: str, scale: float | None):
    """The problem's arrays with its cache in an FP8 format, 0xFF where nobody owns a byte, and with what it means."""
    arrays = problem.arrays()
    owned = ~np.isnan(np.asarray(arrays["kv_cache"])).all(axis=-1)
    rows = np.array(quantize_kv(arrays["kv_cache"], kv_format, scale))
    rows.view(np.uint8)[~owned] = 0xFF
    meant = dequantize_kv(jnp.asarray(rows), kv_format, scale)
    return arrays | {"kv_cache": jnp.asarray(rows)}, arrays | {"kv_cache": meant}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("q_dtype", ("float32", "bfloat16", "float8_e4m3fn"))
@pytest.mark.parametrize(("kv_format", "scale"), (("fp8_e4m3", 0.03125), ("fp8_e4m3", 3.0), ("fp8_ds_mla", None)))
def test_equals_attention_over_the_dequantized_cache(kv_format, scale, q_dtype, implementation):
    arrays, meant = quantized(RAGGED, kv_format, scale)
    q = arrays["q"].astype(q_dtype)
    q_scale = 0.5 if q_dtype == "float8_e4m3fn" else None
    options = {"sm_scale": 0.1, "q_scale": q_scale, "implementation": implementation}
    out, lse = mla_decode(**arrays | {"q": q}, kv_scale=scale, **options)
    exact, exact_lse = mla_decode(**meant | {"q": q.astype(jnp.float32)}, **options | {"implementation": "reference"})
    empty = np.isneginf(exact_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert empty.any() and not np.asarray(out, np.float32)[empty.transpose(0, 2, 1)].any()
    assert out.dtype == (jnp.bfloat16 if q_dtype == "float8_e4m3fn" else jnp.dtype(q_dtype))
    # fp8_ds_mla in bf16 rounds each value and scale, as FlashMLA's kernel does.
    limit = 2e-6 if q_dtype == "float32" else RMS
    assert rms(out, exact) <= limit
    lse_limit = 1e-5 if q_dtype == "float32" or kv_format == "fp8_e4m3" else 2e-2
    assert np.abs(np.asarray(lse)[~empty] - np.asarray(exact_lse)[~empty]).max() <= lse_limit


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("q_amax", (3.0, 40_000.0))
def test_a_quantized_query_means_itself_times_its_scale(q_amax, implementation):
    """Exactly what it was rounded to, and so within e4m3's rounding of the query before; q_scale may be traced."""
    arrays, meant = quantized(RAGGED, "fp8_e4m3", 0.03125)
    q = arrays["q"] * (q_amax / jnp.max(jnp.abs(arrays["q"])))
    scale = jnp.max(jnp.abs(q)) / 448
    options = {"sm_scale": 0.1 / q_amax, "implementation": implementation}
    run = jax.jit(lambda q, scale: mla_decode(**arrays | {"q": q}, q_scale=scale, kv_scale=0.03125, **options))
    out, lse = run(quantize_kv(q, "fp8_e4m3", scale), scale)
    rounded = dequantize_kv(quantize_kv(q, "fp8_e4m3", scale), "fp8_e4m3", scale)
    exact, exact_lse = mla_decode(**meant | {"q": rounded}, **options | {"implementation": "reference"})
    before, _ = mla_decode(**meant | {"q": q}, **options | {"implementation": "reference"})
    seen = ~np.isneginf(exact_lse)
    np.testing.assert_allclose(np.asarray(lse)[seen], np.asarray(exact_lse)[seen], atol=1e-5)
    assert rms(out, exact) <= RMS and 1e-4 < rms(exact, before) < 5e-2
    unscaled, _ = mla_decode(**arrays | {"q": quantize_kv(q, "fp8_e4m3", scale)}, kv_scale=0.03125, **options)
    assert rms(unscaled, exact) > 10 * RMS


def test_q_scale_none_is_one():
    arrays, _ = quantized(RAGGED, "fp8_e4m3", None)
    arrays["q"] = quantize_kv(arrays["q"], "fp8_e4m3")
    plain, _ = mla_decode(**arrays)
    np.testing.assert_array_equal(plain, mla_decode(**arrays, q_scale=1.0)[0])
    twice, _ = mla_decode(**arrays, q_scale=2.0, sm_scale=0.5 * 576**-0.5)
    np.testing.assert_array_equal(plain, twice)


def test_scale_none_is_one_and_may_be_traced():
    arrays, _ = quantized(RAGGED, "fp8_e4m3", None)
    plain, _ = mla_decode(**arrays)
    traced, _ = jax.jit(lambda s: mla_decode(**arrays, kv_scale=s))(jnp.float32(1))
    np.testing.assert_array_equal(plain, traced)
    twice, _ = mla_decode(**arrays, kv_scale=2.0, sm_scale=0.5 * 576**-0.5)
    np.testing.assert_allclose(twice, 2 * plain, rtol=1e-6)


def test_a_scale_where_there_is_none_is_refused():
    arrays, _ = quantized(RAGGED, "fp8_ds_mla", None)
    with pytest.raises(ValueError, match="kv_scale must be None for a cache of uint8"):
        mla_decode(**arrays, kv_scale=1.0)
    with pytest.raises(ValueError, match="rows hold 576 numbers"):
        mla_decode(**arrays | {"q": arrays["q"][..., :500]})
