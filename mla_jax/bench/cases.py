"""What is timed: named shapes, with the lengths that FlashMLA's own benchmark draws."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.attention.api import implementation_for
from mla_jax.cache.codec import quantize_kv
from mla_jax.cache.formats import PAGE_SIZE, kv_format
from mla_jax.errors import InputError

DIM, LATENT = 576, 512  # DeepSeek's
LONGEST_NAME = 80  # characters, so that its numbers can be read
H200_FLOPS, H200_BYTES = 800e12, 4.5e12  # per second, about
IMBALANCED = (4641, 45118, 1730, 1696)  # one long request among short ones

GPU_CASES = (
    *(f"bf16_b128_h128_s1_{k}k~" for k in (4, 8, 16, 32)),
    *(f"bf16_b128_h128_s2_{k}k~" for k in (4, 16)),
    "bf16_b128_h128_s4_4k~",
    *(f"bf16_b{b}_h128_s1_8k" for b in (1, 4, 16, 64)),
    *(f"bf16_b128_h{h}_s1_4k~" for h in (64, 32, 16)),
    "bf16_b1_h16_s1_131k",
    "bf16_imbalanced_h16_s4",
    "fp16_b128_h128_s1_4k~",
    *(f"fp8_b128_h{h}_s1_4k~" for h in (16, 32, 64, 128)),
    "fp8_b128_h128_s1_16k~",
    *(f"fp8_b128_h128_s2_{k}k~" for k in (4, 16)),
    *(f"fp8_b{b}_h128_s1_8k" for b in (1, 16)),
    *(f"fp8_ds_mla_b128_h{h}_s1_4k~" for h in (16, 128)),
)
CPU_CASES = ("fp32_b1_h16_s1_4k", "fp32_b8_h16_s1_1k~", "fp32_b8_h16_s4_1k~", "bf16_b8_h16_s1_1k~")

_NAME = re.compile(
    r"(?P<format>[a-z0-9_]+?)_(?:b(?P<b>\d+)|imbalanced)_h(?P<h>\d+)_s(?P<s>\d+)(?:_(?P<k>\d+)k(?P<ragged>~?))?"
)


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: `{format}_b{B}_h{H}_s{S}_{K}k`: cache format, requests, heads, new tokens, K · 1024 tokens in the cache of
            each (131k is 2¹⁷). With `~` lengths are drawn from a normal distribution, σ = mean / 2. `imbalanced` in
            place of `b{B}`: one request of 45118 tokens among three of a few thousand.
        format: of the cache, `fp8` short for fp8_e4m3; queries are in it too, or in bf16 for fp8_ds_mla.
    """

    name: str
    format: str
    heads: int
    tokens: int
    lens: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Case":
        """Raises ValueError for a name that is no case."""
        found = _NAME.fullmatch(name) if len(name) < LONGEST_NAME else None
        if (
            not found
            or (found["b"] is None) != (found["k"] is None)
            or not (int(found["b"] or 1) and int(found["k"] or 1))
        ):
            raise InputError(f"{name!r} is no case; write bf16_b128_h64_s1_4k, with ~ behind it for ragged lengths.")
        heads, tokens = int(found["h"]), int(found["s"])
        if heads < 1 or tokens < 1:
            raise InputError(f"{name!r} has no heads or no tokens.")
        if int(found["b"] or 1) * int(found["k"] or 1) > 2**21 or heads * tokens > 2**20:
            raise InputError(f"{name!r} is larger than any GPU: at most 2³¹ cached tokens and 2²⁰ query rows.")
        lens: tuple[int, ...] = IMBALANCED
        if found["b"] is not None:
            mean = int(found["k"]) * 1024 if found["k"] != "131" else 2**17
            drawn = np.full(int(found["b"]), mean)
            if found["ragged"]:
                drawn = np.maximum(np.random.default_rng(0).normal(mean, mean / 2, int(found["b"])), tokens)
            lens = tuple(int(n) for n in drawn)
        return cls(name, kv_format(found["format"]).name, heads, tokens, lens)

    def implementation(self, wanted: str | Sequence[str] | None) -> str:
        """The implementation of `mla_decode` that its calls take. Raises NotImplementedError if none can run."""
        row = kv_format(self.format)
        query = jax.ShapeDtypeStruct((len(self.lens), self.tokens, self.heads, DIM), self.query_dtype)
        cache = jax.ShapeDtypeStruct((1, PAGE_SIZE, row.row_width(DIM)), row.dtype)
        return implementation_for(wanted, query, cache)

    @property
    def flops(self) -> float:
        """Multiplications and additions of one call, both counted."""
        return 2.0 * self.heads * self.tokens * sum(self.lens) * (DIM + LATENT)

    @property
    def read_bytes(self) -> float:
        """Of the cache, each row once."""
        return float(sum(self.lens) * kv_format(self.format).bytes_per_token(DIM))

    @property
    def calls(self) -> int:
        """That a timed program makes: about a millisecond's on an H200, so that starting it weighs little, 64 at most.

        Not by what this run measures: the next run should time the same program.
        """
        if jax.default_backend() == "cpu":
            return 1
        return max(1, min(64, int(1e-3 / max(self.flops / H200_FLOPS, self.read_bytes / H200_BYTES))))

    @property
    def held_bytes(self) -> float:
        """Of memory while it is timed, about: the cache, and queries and outputs of all calls."""
        pages = sum(-(-n // PAGE_SIZE) for n in self.lens)
        cache = pages * PAGE_SIZE * kv_format(self.format).bytes_per_token(DIM)
        rows = self.calls * len(self.lens) * self.tokens * self.heads
        return float(cache + rows * (DIM + LATENT) * max(self.query_dtype.itemsize, 2))

    @property
    def query_dtype(self) -> jnp.dtype:
        """Of q."""
        dtype = kv_format(self.format).dtype
        return jnp.dtype(jnp.bfloat16) if dtype == jnp.uint8 else jnp.dtype(dtype)


@dataclass(frozen=True)
class Arrays:
    """Arguments of a case's calls: a query for each, the rest shared; pages lie in random order."""

    queries: list[jax.Array]
    cache: jax.Array
    block_table: jax.Array
    kv_lens: jax.Array


def in_groups(cases: Mapping[int, Case], budget: float) -> list[dict[int, Case]]:
    """The cases in order, in groups that hold so many bytes at most; one that takes more is a group of its own."""
    groups: list[dict[int, Case]] = []
    left = 0.0
    for at, case in cases.items():
        if not groups or case.held_bytes > left:
            groups.append({})
            left = budget
        groups[-1][at] = case
        left -= case.held_bytes
    return groups


def make_arrays(case: Case, calls: int) -> Arrays:
    """Random ones, the same every time."""
    lens = np.array(case.lens, np.int32)
    pages = -(-lens // PAGE_SIZE)
    order = np.random.default_rng(1).permutation(int(pages.sum())).astype(np.int32)
    table = np.zeros((len(lens), int(pages.max())), np.int32)
    for row, count, end in zip(table, pages, np.cumsum(pages), strict=True):
        row[:count] = order[end - count : end]
    keys = jax.random.split(jax.random.key(0), calls + 1)
    shape = (len(lens), case.tokens, case.heads, DIM)
    queries = [draw(key, shape, case.query_dtype) for key in keys[1:]]
    drawn_as = jnp.dtype(jnp.bfloat16) if case.query_dtype.itemsize == 1 else case.query_dtype
    latents = draw(keys[0], (int(pages.sum()), PAGE_SIZE, DIM), drawn_as)
    cache = jax.jit(quantize_kv, static_argnums=1)(latents, case.format)
    return Arrays(queries, cache, jnp.asarray(table), jnp.asarray(lens))


@jax.jit(static_argnums=(1, 2))
def draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """From a normal distribution."""
    return jax.random.normal(key, shape, jnp.bfloat16 if dtype.itemsize == 1 else dtype).astype(dtype)
