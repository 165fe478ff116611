"""README.md's table of support: every implementation is asked what it can run, on machines that are made up for it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from flash_mla_jax import provider
from mla_jax.attention.api import IMPLEMENTATIONS
from mla_jax.attention.mosaic_gpu import requirements
from mla_jax.cache.formats import FORMATS, PAGE_SIZE

DIM, LATENT = 576, 512
QUERY_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn)
TOKENS = (1, 2, 3, 4, 8, 16, 32, 33, 64, 256, 257)  # new tokens that are asked for
HEADS = (1, 3, 8, 16, 32, 64, 96, 128)
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "e4m3"}
NONE = "–"


def _gpu(name: str, capability: str) -> Any:
    return SimpleNamespace(platform="gpu", device_kind=name, compute_capability=capability, core_count=132)


MACHINES = {
    "Hopper GPU": _gpu("NVIDIA H200", "9.0"),
    "other GPU": _gpu("NVIDIA B200", "10.0"),
    "CPU, TPU": SimpleNamespace(platform="cpu", device_kind="cpu"),
}


@dataclass(frozen=True)
class Call:
    """One kind of call: the cache's format, the queries' dtype, new tokens, heads, whether there is a tree mask, and
    whether each query row has a scale of its own."""

    kv_format: str
    dtype: Any = jnp.bfloat16
    tokens: int = 1
    heads: int = 64
    tree: bool = False
    row_scales: bool = False

    @property
    def is_legal(self) -> bool:
        """Queries in e4m3 need an FP8 cache."""
        return self.dtype != jnp.float8_e4m3fn or self.kv_format.startswith("fp8")

    def reason_against(self, name: str) -> str | None:
        """What the implementation says against it on this machine."""
        mask = jax.ShapeDtypeStruct((2, self.tokens, self.tokens), jnp.bool_) if self.tree else None
        options = {"d_v": LATENT, "tree_mask": mask, "row_scales": self.row_scales}
        return IMPLEMENTATIONS[name].cannot_run(*self._arrays, **options)

    @property
    def _arrays(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        kv = FORMATS[self.kv_format]
        q = jax.ShapeDtypeStruct((2, self.tokens, self.heads, DIM), self.dtype)
        return q, jax.ShapeDtypeStruct((4, PAGE_SIZE, kv.row_width(DIM)), kv.dtype)


@contextlib.contextmanager
def pretend(device: Any) -> Iterator[None]:
    """As if JAX ran on this device, and FlashMLA's kernels were installed."""
    kernels = provider.Provider("FlashMLA", dense=print, dense_fp8=print, sparse=print)
    with (
        mock.patch.object(requirements, "_device", lambda _: device),
        mock.patch.object(provider, "default_device", lambda: device),
        mock.patch.object(provider, "_find_on_gpu", lambda: kernels),
    ):
        yield


def support() -> str:
    """Markdown: a line per implementation and cache format, formats that are alike in one line."""
    head = ("implementation", "cache", "queries", "a `q_scale` per row", "new tokens", "tree mask", "heads", *MACHINES)
    lines = [head, ("---",) * len(head)]
    for name in IMPLEMENTATIONS:
        rows: dict[tuple[str, ...], list[str]] = {}
        for kv_format in FORMATS:
            rows.setdefault(_row(name, kv_format), []).append(kv_format)
        for row, formats in rows.items():
            if any(cell != NONE for cell in row):
                lines.append((f"`{name}`", ", ".join(formats), *row))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(name: str, kv_format: str) -> tuple[str, ...]:
    """queries, their scales, new tokens, tree mask, heads, and a cell per machine."""
    found = {}
    for machine, device in MACHINES.items():
        with pretend(device):
            found[machine] = _limits(name, kv_format)
    known = {limits for limits in found.values() if limits is not None} or {(NONE,) * 5}
    assert len(known) == 1, f"{name}'s limits for {kv_format} differ between machines, which a line cannot say"
    machines = (_machine_cell(name, kv_format, device, found[m] is not None) for m, device in MACHINES.items())
    return (*known.pop(), *machines)


def _limits(name: str, kv_format: str) -> tuple[str, ...] | None:
    """Queries, scales for their rows, new tokens, tree masks and heads in reach on this machine; None if the format is
    not."""
    # 64 heads are in reach of every kernel; the dtype is the first that is admitted.
    dtypes = [d for d in QUERY_DTYPES if (c := Call(kv_format, d)).is_legal and c.reason_against(name) is None]
    if not dtypes:
        return None
    dtype = dtypes[0]
    tokens = _range(TOKENS, lambda n: Call(kv_format, dtype, tokens=n).reason_against(name) is None)
    trees = _range(TOKENS, lambda n: Call(kv_format, dtype, tokens=n, tree=True).reason_against(name) is None)
    heads = _range(HEADS, lambda n: Call(kv_format, dtype, heads=n).reason_against(name) is None)
    queries = ", ".join(NAMES[jnp.dtype(d).name] for d in dtypes)
    scaled = {Call(kv_format, d, row_scales=True).reason_against(name) is None for d in dtypes}
    assert len(scaled) == 1, f"{name} takes scales for rows of some queries only, which a line cannot say"
    return queries, "yes" if scaled.pop() else NONE, tokens, trees, heads


def _range(values: tuple[int, ...], admitted: Callable[[int], bool]) -> str:
    """Which of some numbers are admitted, in words."""
    found = [n for n in values if admitted(n)]
    if not found:
        return NONE
    if len(found) == len(values):
        return "any"
    return f"up to {found[-1]}" if found == list(values[: len(found)]) else " or ".join(map(str, found))


def _machine_cell(name: str, kv_format: str, device: Any, runs: bool) -> str:
    """Whether it runs there, and whether None chooses it there for queries in the cache's dtype (bf16 for FP8)."""
    if not runs:
        return NONE
    dtype = jnp.bfloat16 if kv_format.startswith("fp8") else FORMATS[kv_format].dtype
    call = Call(kv_format, dtype)
    with pretend(device):
        chosen = next(n for n in IMPLEMENTATIONS if call.reason_against(n) is None)
    return "default" if name == chosen else "by name"
