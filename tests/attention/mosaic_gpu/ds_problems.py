"""Decode problems over a cache in fp8_ds_mla, unowned bytes all 0xFF, and the float64 answer over what it holds."""

import jax.numpy as jnp
import numpy as np
from problems import DIM, GOLDEN_FILE, LATENT, PAGE, bf16

from mla_jax.cache.codec import dequantize_kv, quantize_kv

TILES, TILE, ROW = 4, 128, 656
UNOWNED = 0xFF  # a NaN as e4m3, as a float32 scale and as bf16
RELATIVE_RMS = 5e-3  # of out
# Of lse, relative to the root of the sum of squares of a logit's products, of the key where that is largest. A key's
# numbers are rounded to 11 bits twice, the first time 128 of them with one error, which makes 2**-11 of what its four
# tiles give to a logit: over a million rows of every kind below a simulation found up to 2**-9.45.
LSE_RELATIVE, LSE_ABSOLUTE = 2.0**-9, 1e-5


def _of_rows(rng, shape):
    return np.exp(0.7 * rng.standard_normal((*shape, 1)))


def _wild_rows(rng, shape):
    return 448 / 3 * 10 ** rng.uniform(-6, 3, (*shape, 1))


def _wild_tiles(rng, shape):
    return 448 / 3 * 10 ** rng.uniform(-6, 3, (*shape, TILES))


def _zeros(rng, shape):
    """Half of the tiles, and a quarter of the rows."""
    return (rng.random((*shape, TILES)) < 0.5) * (rng.random((*shape, 1)) < 0.75)


SIZES = {"rows": _of_rows, "wild rows": _wild_rows, "wild tiles": _wild_tiles, "zeros": _zeros}
WILD_SCALE = 1e-5  # a softmax scale at which keys of the wild ones, scaled by up to 1e3, have logits of about 10


def ds_arrays(problem, sizes="rows", *, power_of_two=False):
    """q, cache, table, lens, mask; sizes are what latents of standard deviation 1 are multiplied with."""
    q, cache, table, lens, mask = problem.arrays()
    latents = np.array(cache.astype(jnp.float32))
    owned = ~np.isnan(latents).any(axis=-1, keepdims=True)
    tiles = latents[..., :LATENT].reshape(*latents.shape[:2], TILES, TILE)
    tiles *= SIZES[sizes](np.random.default_rng(problem.seed), latents.shape[:2])[..., None]
    latents = jnp.asarray(np.where(owned, latents, 0))
    rows = quantize_kv(latents, "fp8_ds_mla", power_of_two=power_of_two)
    rows = jnp.where(jnp.asarray(owned), rows, jnp.uint8(UNOWNED))
    return q, rows, jnp.asarray(table), jnp.asarray(lens), None if mask is None else jnp.asarray(mask)


SCALES_OF_ZEROS = (0.0, float(np.finfo(np.float32).tiny))  # by other writers; ours is 1


def rope_only(arrays, scale, *, zero_queries):
    """Those arrays with latents of zero under such a scale; the queries' too, if wanted."""
    q, cache, *others = arrays
    nothing = np.zeros(LATENT + 4 * TILES, np.uint8)
    nothing[LATENT:] = np.full(TILES, scale, np.float32).view(np.uint8)
    owned = (cache != UNOWNED).any(axis=-1, keepdims=True)
    cache = jnp.where(owned, cache.at[..., : len(nothing)].set(nothing), cache)
    return q.at[..., :LATENT].set(0) if zero_queries else q, cache, *others


def assert_ds_close(out, lse, problem, arrays):
    """Relative RMS of out over all rows, and lse, against float64 over the dequantized cache."""
    q, cache, table, lens, mask = (None if x is None else np.asarray(x) for x in arrays)
    q, wide = q.astype(np.float32), np.asarray(dequantize_kv(cache, "fp8_ds_mla"))
    want, want_lse, _ = problem.expected(q, wide, table, lens, mask)
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} values of out are not finite"
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    error = np.abs(lse[seen] - want_lse[seen])
    excess = error - LSE_ABSOLUTE - LSE_RELATIVE * abs(problem.scale) * _sizes_of_logits(q, wide, table, lens)[seen]
    assert excess.max(initial=0) <= 0, f"lse errs by up to {error.max():.2e}, {excess.max():.2e} too much"
    error = np.sqrt(((out - want) ** 2).sum() / max((want**2).sum(), 1e-30))
    assert error <= RELATIVE_RMS, f"relative RMS {error:.2e}"
    assert (out[np.isneginf(want_lse).swapaxes(1, 2)] == 0).all()


def _sizes_of_logits(q, wide, table, lens):
    """[B, H, S]: of all keys, the largest root of the sum of squares of the products with it."""
    found = np.zeros((q.shape[0], q.shape[2], q.shape[1]))
    for b, n in enumerate(lens):
        keys = wide[table[b, : -(-n // PAGE)]].reshape(-1, DIM)[:n].astype(np.float64)
        squares = np.square(q[b].astype(np.float64)) @ np.square(keys).T  # [S, H, n]
        found[b] = np.sqrt(squares.max(axis=-1, initial=0)).T
    return found


def golden_ds():
    """What FlashMLA's sparse kernel gave on an H200: (q, cache, table, lens), scale, out, lse; a request per query.

    It takes keys by index. Here they lie in pages in that order, and what no query asked for is unowned.
    """
    row = {name: GOLDEN_FILE[f"sparse_v32_h64/{name}"] for name in ("q", "kv", "indices", "scale", "out", "lse")}
    q, want = bf16(row["q"]).reshape(-1, 1, 64, DIM), np.asarray(bf16(row["out"]), np.float64)
    rows, indices = row["kv"].reshape(-1, ROW), row["indices"].reshape(len(q), -1)
    width = -(-indices.shape[1] // PAGE)
    cache = np.full((len(q), width * PAGE, ROW), UNOWNED, np.uint8)
    lens = np.zeros(len(q), np.int32)
    for b, chosen in enumerate(indices):
        chosen = chosen[chosen >= 0]
        lens[b] = len(chosen)
        cache[b, : lens[b]] = rows[chosen]
    table = np.arange(len(q) * width, dtype=np.int32).reshape(len(q), width)
    arrays = (q, *(jnp.asarray(x) for x in (cache.reshape(-1, PAGE, ROW), table, lens)))
    lse = np.where(np.isposinf(row["lse"]), -np.inf, row["lse"]).swapaxes(1, 2).reshape(len(q), 64, 1)
    return arrays, float(row["scale"]), want.reshape(len(q), 1, 64, LATENT), lse


GOLDEN_LSE = 4e-3  # FlashMLA rounds scales to bf16, which alone makes 1.3e-3


def assert_golden_ds_close(out, lse, want_out, want_lse):
    """FlashMLA's rounding and ours together."""
    out = np.asarray(out, np.float64)
    assert np.linalg.norm(out - want_out) <= RELATIVE_RMS * np.linalg.norm(want_out)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=GOLDEN_LSE)
