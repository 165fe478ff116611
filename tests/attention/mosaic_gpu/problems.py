"""Decode problems with hostile surroundings, and the float64 answer."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

DIM, LATENT, PAGE = 576, 512, 64


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call. Unowned cache bytes are NaN, table tails are garbage; pages are shuffled.

    `room` is tokens per request that table and cache have place for at least: problems of equal room have equal shapes.
    """

    lens: tuple[int, ...]
    tokens: int = 1
    heads: int = 16
    causal: bool = True
    tree: bool = False
    dtype: str = "bfloat16"
    scale: float = DIM**-0.5
    seed: int = 0
    room: int = 0

    def arrays(self):
        """q, cache, table, lens, tree_mask as numpy; 16-bit floats as jax arrays."""
        rng = np.random.default_rng(self.seed)
        batch, lens = len(self.lens), np.array(self.lens, np.int32)
        pages, room = -(-lens // PAGE), -(-self.room // PAGE)
        width = max(int(pages.max()), room, 1) + 1
        total = max(int(pages.sum()), batch * room) + 2  # page 0 and one more that nobody owns
        cache = np.full((total, PAGE, DIM), np.nan, jnp.dtype(self.dtype))
        order = rng.permutation(total - 1)[: int(pages.sum())] + 1
        table = np.where(rng.random((batch, width)) < 0.5, 2147480000, -1).astype(np.int32)
        at = 0
        for b in range(batch):
            own = order[at : at + pages[b]]
            table[b, : pages[b]] = own
            at += pages[b]
            keys = rng.standard_normal((lens[b], DIM), np.float32)
            for i, page in enumerate(own):
                part = keys[i * PAGE : (i + 1) * PAGE]
                cache[page, : len(part)] = part
        q = rng.standard_normal((batch, self.tokens, self.heads, DIM), np.float32)
        mask = None
        if self.tree:
            mask = rng.random((batch, self.tokens, self.tokens)) < 0.5
        return jnp.asarray(q, self.dtype), jnp.asarray(cache), table, lens, mask

    def expected(self, q, cache, table, lens, mask):
        """out [B, S, H, 512], lse [B, H, S] and what rounding P may cost out, in float64."""
        q, cache = np.asarray(q, np.float64), np.asarray(cache)
        batch, rows = len(lens), self.tokens * self.heads
        out, rounding = np.zeros((2, batch, rows, LATENT))
        lse = np.full((batch, rows), -np.inf)
        for b, n in enumerate(int(n) for n in lens):
            if n == 0:
                continue
            keys = cache[table[b, : -(-n // PAGE)]].reshape(-1, DIM)[:n].astype(np.float64)
            logits = q[b].reshape(rows, DIM) @ keys.T * self.scale
            visible = np.repeat(self._visible(n, None if mask is None else mask[b]), self.heads, axis=0)
            logits = np.where(visible, logits, -np.inf)
            top = logits.max(axis=-1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0.0)
            weight = np.exp(logits - top)
            total = weight.sum(axis=-1, keepdims=True)
            seen = total > 0
            weight = weight / np.where(seen, total, 1.0)
            out[b] = weight @ keys[:, :LATENT]
            rounding[b] = P_ROUNDING * np.sqrt(weight**2 @ keys[:, :LATENT] ** 2)
            lse[b] = np.where(seen, top + np.log(np.where(seen, total, 1.0)), -np.inf)[:, 0]
        shape = (batch, self.tokens, self.heads)
        lse = lse.reshape(shape).swapaxes(1, 2)
        return out.reshape(*shape, LATENT), lse, rounding.reshape(*shape, LATENT)

    def _visible(self, n, mask):
        """[S, n]"""
        key, query = np.arange(n)[None, :], np.arange(self.tokens)[:, None]
        if mask is not None:
            position = key - (n - self.tokens)
            inside = position >= 0
            return ~inside | mask[query, np.where(inside, position, 0)]
        return key <= n - self.tokens + query if self.causal else np.ones((self.tokens, n), bool)


# What rounding P and the output to 16 bits costs: upstream's limits.
ABSOLUTE, RELATIVE, COSINE = 8e-4, 2.01 / 128, 5e-6
# Rounding a probability to bf16 errs by 2**-9 at most, 0.4 * 2**-9 RMS; this is 5 sigma of their sum.
P_ROUNDING = 2.0**-8
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 8.01 / 65536


def assert_close(out, lse, want_out, want_lse, rounding=0.0):
    """Upstream's tolerances: elementwise, and the angle between the two."""
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} values of out are not finite"
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=LSE_RELATIVE, atol=LSE_ABSOLUTE)
    error = np.abs(out - want_out)
    excess = error - (ABSOLUTE + RELATIVE * np.abs(want_out) + rounding)
    relative_rms = np.sqrt((error**2).sum() / max((want_out**2).sum(), 1e-30))
    assert excess.max() <= 0, f"max abs error {error.max():.2e}, relative RMS {relative_rms:.2e}"
    norm = (out**2).sum() + (want_out**2).sum()
    if norm > 0:
        cosine = 1 - 2 * (out * want_out).sum() / norm
        assert cosine < COSINE, f"{cosine=:.2e}, relative RMS {relative_rms:.2e}"


GOLDEN_FILE = np.load(pathlib.Path(__file__).parents[2] / "data" / "golden_kernels.npz")
GOLDEN = ("dense_decode_h16", "dense_verify_sq2_h16", "dense_noncausal_sq2_h3", "dense_fp16_h9")


def bf16(bits):
    """Numbers whose bits came as int16."""
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)


def golden(tag):
    """A call and what FlashMLA's kernel gave on an H200: (q, cache, table, lens), scale, causal, out, lse."""
    file = GOLDEN_FILE
    dtype = jnp.float16 if "fp16" in tag else jnp.bfloat16

    def bits(name):
        return jax.lax.bitcast_convert_type(jnp.asarray(file[f"{tag}/{name}"]), dtype)

    lens, table = jnp.asarray(file[f"{tag}/lens"]), jnp.asarray(file[f"{tag}/bt"])
    lse = file[f"{tag}/lse"]
    arrays = (bits("q"), bits("kv").reshape(-1, PAGE, DIM), table, lens)
    want = (np.asarray(bits("out"), np.float64), np.where(np.isposinf(lse), -np.inf, lse))
    return arrays, float(file[f"{tag}/scale"]), "noncausal" not in tag, *want
