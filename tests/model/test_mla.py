"""The public helpers of the absorbed form, against attention written out per head in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import PagePool, absorb_query, expand_output, mla_decode, split_kv_b_proj

H, K, W, V, R = 3, 6, 5, 16, 4  # heads; widths of a head's key, value; latent; rope
LENGTHS, S = (70, 2, 129), 2  # cached tokens; new ones among them


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    kv_b = rng.normal(0, V**-0.5, (H * (K + W), V)).astype(np.float32)
    latents = [rng.normal(size=(n, V + R)).astype(np.float32) for n in LENGTHS]
    query = rng.normal(size=(len(LENGTHS), S, H, K + R)).astype(np.float32)
    return kv_b, latents, query


def written_out(kv_b: np.ndarray, latents: np.ndarray, query: np.ndarray, scale: float) -> np.ndarray:
    """[S, H, W] for one request: keys and values of each head from the latents, causal softmax, in float64."""
    per_head = kv_b.astype(np.float64).reshape(H, K + W, V)
    out = np.zeros((S, H, W))
    for h in range(H):
        keys = np.concatenate([latents[:, :V] @ per_head[h, :K].T, latents[:, V:]], axis=1)
        values = latents[:, :V] @ per_head[h, K:].T
        for j in range(S):
            seen = len(latents) - S + j + 1
            scores = scale * keys[:seen] @ query[j, h]
            weights = np.exp(scores - scores.max())
            out[j, h] = weights / weights.sum() @ values[:seen]
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_absorbed_form_equals_attention_written_out(layer, implementation):
    kv_b, latents, query = layer
    pool, ok = PagePool.create(8, 3, 3).extend(jnp.asarray(LENGTHS, jnp.int32))
    assert bool(ok.all())
    pages = np.full((8, 64, V + R), np.nan, np.float32)
    for request, rows in enumerate(latents):
        for t, row in enumerate(rows):
            pages[int(pool.block_table[request, t // 64]), t % 64] = row
    w_uk, w_uv = split_kv_b_proj(jnp.asarray(kv_b), H, K)
    q = absorb_query(jnp.asarray(query[..., :K]), jnp.asarray(query[..., K:]), w_uk)
    out, _ = mla_decode(
        q, jnp.asarray(pages), pool.block_table, pool.kv_lens, d_v=V, sm_scale=0.3, implementation=implementation
    )
    ours = np.asarray(expand_output(out, w_uv))
    for request, rows in enumerate(latents):
        expected = written_out(kv_b, rows.astype(np.float64), query[request].astype(np.float64), 0.3)
        np.testing.assert_allclose(ours[request], expected, atol=2e-6)


def test_split_takes_keys_before_values_of_each_head():
    kv_b = np.arange(H * (K + W), dtype=np.float32)[:, None] * np.ones((1, V), np.float32)
    w_uk, w_uv = split_kv_b_proj(jnp.asarray(kv_b), H, K)
    assert w_uk.shape == (H, K, V) and w_uv.shape == (H, W, V)
    assert np.asarray(w_uk[1, :, 0]).tolist() == list(range(11, 17))
    assert np.asarray(w_uv[1, :, 0]).tolist() == list(range(17, 22))
