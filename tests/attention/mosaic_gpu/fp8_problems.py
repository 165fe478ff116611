"""Decode problems over a cache in e4m3, whose unowned bytes are NaN, and the float64 answer over what it holds."""

import jax
import jax.numpy as jnp
import numpy as np
from problems import DIM, GOLDEN_FILE, PAGE, bf16

RELATIVE_RMS = 5e-3  # of out
# Of lse at the scale 576**-0.5: tensor cores add products of bytes with 13 bits after the point of the largest, so this
# is an error of the products, and grows with the scale.
LSE_ABSOLUTE = 5e-3


def fp8_arrays(problem, q_dtype, cache_scale=1.0):
    """q, cache, table, lens, mask; q and the cache are divided by their scales before they are rounded."""
    q, cache, table, lens, mask = problem.arrays()
    cache = (jnp.asarray(cache, jnp.float32) * cache_scale).astype(jnp.float8_e4m3fn)
    return q.astype(q_dtype), cache, jnp.asarray(table), jnp.asarray(lens), None if mask is None else jnp.asarray(mask)


def assert_fp8_close(out, lse, problem, arrays, kv_scale=1.0):
    """Relative RMS of out over all rows, and lse, against float64 over the dequantized cache."""
    q, cache, table, lens, mask = arrays
    wide = np.asarray(cache.astype(jnp.float32)) * kv_scale
    mask = None if mask is None else np.asarray(mask)
    want, want_lse, _ = problem.expected(np.asarray(q.astype(jnp.float32)), wide, np.asarray(table), lens, mask)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} values of out are not finite"
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(
        lse[seen], want_lse[seen], rtol=1e-4, atol=LSE_ABSOLUTE * max(1.0, abs(problem.scale) * 24)
    )
    error = np.sqrt(((out - want) ** 2).sum() / max((want**2).sum(), 1e-30))
    assert error <= RELATIVE_RMS, f"relative RMS {error:.2e}"
    empty = np.isneginf(want_lse).swapaxes(1, 2)
    assert (out[empty] == 0).all()


GOLDEN_RMS = 1e-2  # FlashMLA's kernel rounds probabilities to e4m3: it errs by 5.5e-3


def golden_fp8():
    """A call and what FlashMLA's kernel gave on an H200: (q, cache, table, lens), options of `mla_decode`, out, lse."""
    names = ("q", "kv", "bt", "lens", "scale", "descale_q", "descale_k", "out", "lse")
    q, kv, table, lens, *scales, out, lse = (GOLDEN_FILE[f"fp8_decode_h16/{name}"] for name in names)
    q, kv = (jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.float8_e4m3fn) for x in (q, kv))
    arrays = (q, kv.reshape(-1, PAGE, DIM), jnp.asarray(table), jnp.asarray(lens))
    options = dict(zip(("sm_scale", "q_scale", "kv_scale"), map(float, scales), strict=True))
    return arrays, options, np.asarray(bf16(out), np.float64), lse
