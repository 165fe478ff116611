"""Decode problems with hostile surroundings, their answer in float64 NumPy, and what may differ."""

import re
import zlib
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

import mla_jax

PAGE = 64
TAIL = 2147480000  # FlashMLA's filler of a table past a request's length
IMPLEMENTATIONS = ("reference", "xla")

# float32: products and sums in float32 over at most a few thousand keys.
FLOAT32_OUT, FLOAT32_LSE = 2e-5, 1e-5
# 16 bits: the output is rounded (2⁻⁸ in bf16), and the issue grants as much again and 1e-3 for cancellation.
OUT_ABSOLUTE, OUT_RELATIVE, OUT_RMS = 1e-3, 2.0**-7, 3e-3
# A softmax weight rounded to bf16 errs by 2⁻⁹ at most; independent errors add up as √Σ(w v)², and this is 4 sigma.
WEIGHT_ROUNDING = 2.0**-8


@dataclass(frozen=True)
class Problem:
    """One call of `mla_decode`. The cache is 0xFF (NaN) but for rows that a request owns; pages are shuffled;
    tables end in −1 and 2147480000."""

    lens: tuple[int, ...]
    queries: int = 1
    heads: int = 3
    d: int = 576
    d_v: int = 512
    causal: bool = True
    tree: bool = False
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    width: int = 0  # table entries; 0 is one more than the longest request holds
    sm_scale: float | None = None
    q_scale: float | None = None
    again: int = 0  # another draw of the same problem

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(repr(self).encode()))

    def arrays(self) -> dict[str, Any]:
        """Positional and array arguments of `mla_decode`."""
        rng = self.rng
        lens = np.array(self.lens, np.int32)
        held = -(-np.maximum(lens, 0) // PAGE)
        width = self.width or int(held.max(initial=0)) + 1
        total = len(lens) * width + 3  # page 0, and two more at least that nobody owns; no value sets a shape
        kv_dtype = jnp.dtype(self.kv_dtype)
        cache = np.full(total * PAGE * self.d * kv_dtype.itemsize, 0xFF, np.uint8).view(kv_dtype)
        cache = cache.reshape(total, PAGE, self.d)
        owned = rng.permutation(total - 1)[: held.sum()] + 1
        table = np.where(rng.random((len(lens), width)) < 0.5, TAIL, -1).astype(np.int32)
        for b in range(len(lens)):
            pages = owned[held[:b].sum() :][: held[b]]
            table[b, : held[b]] = pages
            keys = rng.standard_normal((max(lens[b], 0), self.d), np.float32).astype(kv_dtype)
            for i, page in enumerate(pages):
                part = keys[i * PAGE : (i + 1) * PAGE]
                cache[page, : len(part)] = part
        q = rng.standard_normal((len(lens), self.queries, self.heads, self.d), np.float32)
        mask = rng.random((len(lens), self.queries, self.queries)) < 0.5 if self.tree else None
        return {
            "q": jnp.asarray(q, self.q_dtype),
            "kv_cache": jnp.asarray(cache),
            "block_table": jnp.asarray(table),
            "kv_lens": jnp.asarray(lens),
            "tree_mask": None if mask is None else jnp.asarray(mask),
        }

    @property
    def options(self) -> dict[str, Any]:
        return {"d_v": self.d_v, "causal": self.causal, "sm_scale": self.sm_scale, "q_scale": self.q_scale}

    def run(self, implementation: str, arrays: dict[str, Any] | None = None):
        arrays = self.arrays() if arrays is None else arrays
        return mla_jax.mla_decode(**arrays, **self.options, implementation=implementation)

    def check(self, implementation: str) -> None:
        arrays = self.arrays()
        out, lse = self.run(implementation, arrays)
        assert out.dtype == jnp.dtype(self.q_dtype) and lse.dtype == jnp.float32
        wide = "float32" in (self.q_dtype, self.kv_dtype) or self.q_dtype != self.kv_dtype
        assert_close(out, lse, *oracle(**arrays, **self.options), rounded_weights=not wide)

    def but(self, **changes) -> "Problem":
        return replace(self, **changes)


def small(*lens: int, **changes) -> Problem:
    """A problem where the latent width does not matter. All are of one shape, so that few programs are compiled:
    five requests, those not given 70, 0, 5, 64 or 600 tokens long, and three queries."""
    lens += (70, 0, 5, 64, 600)[len(lens) :]
    return Problem(lens, **({"queries": 3, "d": 24, "d_v": 16, "width": 10} | changes))


def sees(length: int, queries: int, causal: bool, mask: np.ndarray | None) -> np.ndarray:
    """[S, length]: which query sees which key, from the definition, one pair at a time."""
    seen = np.zeros((queries, max(length, 0)), bool)
    for j in range(queries):
        for t in range(length):
            i = t - (length - queries)
            seen[j, t] = (i < 0 or mask[j, i]) if mask is not None else (not causal or i <= j)
    return seen


def oracle(q, kv_cache, block_table, kv_lens, tree_mask, *, d_v, causal, sm_scale=None, q_scale=None):
    """out [B, S, H, d_v], lse [B, H, S] and √Σ(w v)² like out, in float64, one request and query at a time."""
    q, kv_cache, block_table = np.asarray(q, np.float64), np.asarray(kv_cache), np.asarray(block_table)
    kv_cache = kv_cache.astype(np.float64)
    batch, queries, heads, d = q.shape
    out, lse = np.zeros((batch, queries, heads, d_v)), np.full((batch, heads, queries), -np.inf)
    spread = np.zeros_like(out)
    scale = d**-0.5 if sm_scale is None else float(sm_scale)
    q = q * np.asarray(1.0 if q_scale is None else q_scale, np.float64)[..., None]  # one number, or one for each row
    for b, length in enumerate(np.asarray(kv_lens).tolist()):
        keys = np.array([kv_cache[block_table[b, t // PAGE], t % PAGE] for t in range(length)])
        seen = sees(length, queries, causal, None if tree_mask is None else np.asarray(tree_mask[b]))
        for j in range(queries):
            if not seen[j].any():
                continue
            visible = keys[seen[j]]
            logits = scale * q[b, j] @ visible.T  # [H, keys]
            top = logits.max(axis=-1, keepdims=True)
            lse[b, :, j] = (top + np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))[:, 0]
            weights = np.exp(logits - lse[b, :, j, None])
            out[b, j] = weights @ visible[:, :d_v]
            spread[b, j] = np.sqrt(weights**2 @ visible[:, :d_v] ** 2)
    return out, lse, spread


def errors(got, want) -> str:
    difference = np.asarray(got, np.float64) - want
    rms = np.sqrt((difference**2).sum() / max((want**2).sum(), 1e-30))
    return f"max abs {np.abs(difference).max(initial=0):.2e}, relative RMS {rms:.2e}"


def assert_close(out, lse, want, want_lse, spread, *, rounded_weights: bool) -> None:
    """Within the tolerances above, and exactly 0 and −inf in rows that see no key."""
    dtype = out.dtype
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    assert out.shape == want.shape and lse.shape == want_lse.shape
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} numbers of out are not finite"
    empty = np.isneginf(want_lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert not out[empty.transpose(0, 2, 1)].any(), "a row that sees no key is not 0"
    off = np.abs(lse[~empty] - want_lse[~empty])
    limit = FLOAT32_LSE * np.maximum(1, np.abs(want_lse[~empty]))
    assert (off <= limit).all(), f"lse: {errors(lse[~empty], want_lse[~empty])}"
    limit = OUT_ABSOLUTE + OUT_RELATIVE * np.abs(want)
    if dtype == jnp.float32:
        limit = np.full_like(want, FLOAT32_OUT)
    if rounded_weights:
        limit = limit + WEIGHT_ROUNDING * spread
    assert (np.abs(out - want) <= limit).all(), f"out: {errors(out, want)}"
    rms = np.sqrt(((out - want) ** 2).sum() / max((want**2).sum(), 1e-30))
    assert rms <= OUT_RMS, f"out: {errors(out, want)}"


def assert_one_sentence(message: str) -> None:
    assert message.endswith((".", "?")) and "\n" not in message, message
    assert not re.search(r"[.?] +[A-Z]", message), f"more than one sentence: {message}"
