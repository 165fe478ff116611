"""Decode problems, in the shapes of FlashMLA's own tests, and their answer in float64 NumPy.

A problem's cache is NaN wherever no request has a token, its pages are shuffled, and its table ends in garbage: neither
may reach an output.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mla_jax.cache.formats import DS_LATENT, DS_ROW, DS_TILE, PAGE_SIZE

DIM, LATENT = 576, 512
TAIL = 2147480000  # FlashMLA's filler of a table past a request's length
Q_SCALE, KV_SCALE = 0.25, 0.03125  # of fp8_e4m3: values of a few units in e4m3's range
STORED = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp8_e4m3": ml_dtypes.float8_e4m3fn}


@dataclass(frozen=True)
class Problem:
    """One call of `mla_decode`: lengths of the requests, S, H, the mask and the cache format."""

    lens: tuple[int, ...]
    queries: int = 1
    heads: int = 16
    causal: bool = True
    kv_format: str = "bf16"

    @property
    def name(self) -> str:
        """Such as `bf16 b4 s2 h128 ≤700 causal`."""
        shape = f"b{len(self.lens)} s{self.queries} h{self.heads} ≤{max(self.lens)}"
        return f"{self.kv_format} {shape} {'causal' if self.causal else 'full'}"

    @cached_property
    def numbers(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """q `[B, S, H, 576]` and the keys `[length, 576]` of each request, as float32 that the formats hold exactly."""
        rng = np.random.default_rng(zlib.crc32(repr(self).encode()))
        q = rng.standard_normal((len(self.lens), self.queries, self.heads, DIM), np.float32)
        keys = [rng.standard_normal((n, DIM), np.float32) for n in self.lens]
        if self.kv_format == "fp8_ds_mla":
            return q.astype(ml_dtypes.bfloat16).astype(np.float32), [_in_ds_mla(k) for k in keys]
        stored = STORED[self.kv_format]
        q_scale, kv_scale = (Q_SCALE, KV_SCALE) if self.kv_format == "fp8_e4m3" else (1, 1)
        return (q / q_scale).astype(stored).astype(np.float32) * np.float32(q_scale), [
            (k / kv_scale).astype(stored).astype(np.float32) * np.float32(kv_scale) for k in keys
        ]

    def call(self) -> dict[str, Any]:
        """Arguments of `mla_decode`."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        lens = np.array(self.lens, np.int32)
        pages = -(-lens // PAGE_SIZE)
        q, keys = self.numbers
        total = int(pages.sum()) + 2  # page 0, and one more that nobody owns
        order = rng.permutation(total - 1)[: int(pages.sum())].astype(np.int32) + 1
        table = np.where(rng.random((len(lens), int(pages.max(initial=0)) + 1)) < 0.5, TAIL, -1).astype(np.int32)
        rows = [self._as_bytes(k) for k in keys]
        cache = np.full((total, PAGE_SIZE, rows[0].shape[-1]), 0xFF, np.uint8)  # NaN in every format
        at = 0
        for request, (count, row) in enumerate(zip(pages, rows, strict=True)):
            table[request, :count] = order[at : at + count]
            for i, page in enumerate(order[at : at + count]):
                part = row[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
                cache[page, : len(part)] = part
            at += count
        fp8 = self.kv_format == "fp8_e4m3"
        stored = STORED.get(self.kv_format, ml_dtypes.bfloat16)
        return {
            "q": jnp.asarray((q / np.float32(Q_SCALE if fp8 else 1)).astype(stored)),
            "kv_cache": jnp.asarray(cache if self.kv_format == "fp8_ds_mla" else cache.view(stored)),
            "block_table": jnp.asarray(table),
            "kv_lens": jnp.asarray(lens),
            "causal": self.causal,
            **({"q_scale": Q_SCALE, "kv_scale": KV_SCALE} if fp8 else {}),
        }

    def _as_bytes(self, keys: np.ndarray) -> np.ndarray:
        if self.kv_format == "fp8_ds_mla":
            return _ds_mla_bytes(keys)
        scale = np.float32(KV_SCALE if self.kv_format == "fp8_e4m3" else 1)
        return (keys / scale).astype(STORED[self.kv_format]).view(np.uint8)

    def sees(self, request: int) -> np.ndarray:
        """bool `[S, length]`: which query sees which key."""
        length = self.lens[request]
        last = length - self.queries + np.arange(self.queries) if self.causal else np.full(self.queries, length)
        return np.arange(length)[None] <= last[:, None]

    def answer(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """out `[B, S, H, 512]`, lse `[B, H, S]`, and √Σ(w v)², to which errors of weights add up, in float64."""
        q, keys = self.numbers
        out = np.zeros((len(self.lens), self.queries, self.heads, LATENT))
        lse = np.full((len(self.lens), self.heads, self.queries), -np.inf)
        spread = np.zeros_like(out)
        for b, key in enumerate(k.astype(np.float64) for k in keys):
            if not len(key):
                continue
            logits = np.einsum("shd,td->sht", q[b].astype(np.float64), key, optimize=True) * DIM**-0.5
            logits = np.where(self.sees(b)[:, None], logits, -np.inf)
            top = np.maximum(logits.max(axis=-1, keepdims=True), -1e300)  # no −inf − −inf
            weights = np.exp(logits - top)
            total = weights.sum(axis=-1, keepdims=True)
            with np.errstate(divide="ignore"):
                lse[b] = np.where(total > 0, top + np.log(total), -np.inf)[..., 0].T
            weights /= np.where(total > 0, total, 1)
            out[b] = weights @ key[:, :LATENT]
            spread[b] = np.sqrt(weights**2 @ key[:, :LATENT] ** 2)
        return out, lse, spread


def _in_ds_mla(keys: np.ndarray) -> np.ndarray:
    """Rounded to what a row of 656 bytes holds; scales are powers of two, so that bf16 holds the products exactly."""
    scales, values = _ds_mla_tiles(keys)
    latent = (values.astype(np.float32) * scales[..., None]).reshape(len(keys), DS_LATENT)
    return np.concatenate([latent, keys[:, DS_LATENT:].astype(ml_dtypes.bfloat16).astype(np.float32)], axis=1)


def _ds_mla_bytes(keys: np.ndarray) -> np.ndarray:
    scales, values = _ds_mla_tiles(keys)
    rope = keys[:, DS_LATENT:].astype(ml_dtypes.bfloat16)
    parts = [values.reshape(len(keys), DS_LATENT), scales, rope]
    return np.concatenate([np.ascontiguousarray(p).view(np.uint8) for p in parts], axis=1).reshape(len(keys), DS_ROW)


def _ds_mla_tiles(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tiles = keys[:, :DS_LATENT].reshape(len(keys), DS_LATENT // DS_TILE, DS_TILE)
    scales = np.full(tiles.shape[:2], 2.0**-6, np.float32)  # largest values of about 4 become 256
    return scales, (tiles / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)


def problems(*, quick: bool) -> list[Problem]:
    """The problems of the command."""
    ragged = (0, 1, 63, 64, 65, 127, 128, 129)
    some = [
        Problem((*ragged, 300)),
        Problem((70, 0, 129), 2, 128),
        Problem((2, 0, 200), 4, 16),
        Problem((65, 1, 300), 2, 3, causal=False),
        Problem((33, 100), 1, 9, kv_format="fp16"),
        Problem((65, 0, 300), 2, 63, kv_format="fp16"),
        Problem((*ragged, 300), kv_format="fp8_e4m3"),
        Problem((70, 0, 129), 2, 64, kv_format="fp8_e4m3"),
        Problem((70, 0, 129), 1, 64, kv_format="fp8_ds_mla"),
    ]
    if quick:
        return some
    rng = np.random.default_rng(0)
    many = tuple(int(n) for n in rng.integers(0, 200, 128))
    more = [
        Problem((700,), 1, heads, kv_format=kv_format)
        for kv_format in ("bf16", "fp16", "fp8_e4m3")
        for heads in (1, 3, 9, 63, 64, 126, 128)
    ]
    more += [
        Problem((1000, 3, 0, 129), queries, heads, causal, kv_format)
        for kv_format in ("bf16", "fp8_e4m3", "fp8_ds_mla")
        for queries in (1, 2, 4)
        for heads in (16, 64, 128)
        for causal in (True, False)
        if causal or queries > 1
    ]
    more += [Problem(many, 1, 16, kv_format=f) for f in ("bf16", "fp16", "fp8_e4m3")]
    more += [Problem(many[:64], 2, 16), Problem(many[:32], 1, 128, kv_format="fp8_ds_mla")]
    return some + more
