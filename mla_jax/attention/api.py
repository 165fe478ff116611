"""`mla_decode`: checks a call once, then hands it to an implementation."""

import functools
import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mla_jax.attention import flash_mla, reference, xla
from mla_jax.attention.mosaic_gpu import requirements
from mla_jax.attention.operands import FP8_DTYPES, out_dtype
from mla_jax.attention.queries import DTYPES
from mla_jax.attention.tree import without_mask
from mla_jax.cache.formats import DS_LATENT, DS_ROPE, DS_ROW, PAGE_SIZE
from mla_jax.errors import InputError, described
from mla_jax.schedule import TileSchedule


@dataclass(frozen=True)
class Implementation:
    """One way to compute `mla_decode`.

    `cannot_run(q, kv_cache, d_v=…, tree_mask=…, row_scales=…)` says in one sentence why this machine, or such a call,
    is out of reach; None means it can run. Called with no arrays it speaks of the machine alone. `schedule(q, kv_lens)`
    makes what `decode` takes as `schedule`; None for an implementation that takes none. `decode` gets `logit_scale` as
    an array, `[]` or, where `row_scales` may be, `[B, S, H]`; with `host_scale` as a number where it is known on the
    host.
    """

    name: str
    cannot_run: Callable[..., str | None]
    decode: Callable[..., tuple[jax.Array, jax.Array]]
    schedule: Callable[[Any, jax.Array], TileSchedule] | None = None
    host_scale: bool = False


def _runs_anywhere(*_: Any, **__: Any) -> str | None:
    return None


def _mosaic_gpu_decode(*arrays: jax.Array, d_v: int, **options: Any) -> tuple[jax.Array, jax.Array]:
    from mla_jax.attention.mosaic_gpu import launch  # Pallas takes a while to load

    return launch.decode(*arrays, **options)


def _mosaic_gpu_schedule(q: Any, kv_lens: jax.Array) -> TileSchedule:
    from mla_jax.attention.mosaic_gpu import launch

    return launch.schedule_for(q, kv_lens)


def _flash_mla_decode(*arrays: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    return without_mask(flash_mla.decode)(*arrays, **options)


_STATIC = ("d_v", "causal")
# Fastest first: implementation=None takes the first that can run. flash_mla stands behind xla, so that only who names
# it gets it: it needs torch in the process, and waits for it.
IMPLEMENTATIONS = {
    i.name: i
    for i in (
        Implementation(
            "mosaic_gpu",
            requirements.cannot_run,
            _mosaic_gpu_decode,
            _mosaic_gpu_schedule,
        ),
        Implementation("xla", _runs_anywhere, jax.jit(xla.decode, static_argnames=_STATIC)),
        Implementation("flash_mla", flash_mla.cannot_run, _flash_mla_decode, flash_mla.schedule_for, host_scale=True),
        Implementation("reference", _runs_anywhere, jax.jit(reference.decode, static_argnames=_STATIC)),
    )
}


def mla_decode(
    q: Float[Array, "B S H D"],
    kv_cache: Float[Array, "P T D"],
    block_table: Int[Array, "B M"],
    kv_lens: Int[Array, "B"],
    *,
    d_v: int = 512,
    sm_scale: float | Float[Array, ""] | None = None,
    causal: bool = True,
    tree_mask: Bool[Array, "B S S"] | None = None,
    q_scale: float | Float[Array, ""] | Float[Array, "B S H"] | None = None,
    kv_scale: float | Float[Array, ""] | None = None,
    schedule: TileSchedule | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "B S H V"], Float[Array, "B H S"]]:
    """Multi-head latent attention of a few new tokens over a paged cache of latents.

    Per request: out = softmax(sm_scale · q Kᵀ) V, lse = log Σ exp(sm_scale · q Kᵀ), where a row of the cache is a
    key (all D numbers) and a value (its first d_v) for every head. q is already multiplied by W_UK
    (`absorb_query`), out still has to be multiplied by W_UV (`expand_output`).

    Args:
        q: `[B, S, H, D]` bf16, fp16 or fp32: S new tokens of B requests. D is 576 in DeepSeek's models.
            float8_e4m3fn too, with an FP8 cache.
        kv_cache: `[pages, 64, D]` bf16, fp16, fp32 or float8_e4m3fn, or uint8 `[pages, 64, 656]` in the layout of
            `fp8_ds_mla` (see `quantize_kv`). May differ from q's dtype.
        block_table: int32 `[B, max_pages]`: page that holds tokens 64·i … 64·i + 63 of the request. Entries past
            the request's length may hold anything.
        kv_lens: int32 `[B]`, tokens in the cache, the S new ones included; 0 is an empty request.
        d_v: width of a value, at most D.
        sm_scale: softmax scale, default D^−½; may be traced. For queries with W_UK absorbed pass the scale of the plain
            head, (K + R)^−½ times YaRN's factor: `MLAConfig.sm_scale`.
        causal: bottom-right: query j sees key t iff t ≤ kv_lens − S + j. Otherwise all t < kv_lens.
        tree_mask: bool `[B, S, S]`, replaces causal among the last S keys: query j sees key kv_lens − S + i iff
            tree_mask[b, j, i]; earlier keys are all seen.
        q_scale: factor of q in the logits, default 1: one number, or float32 `[B, S, H]`, one for each query row (see
            `quantize_queries`); may be traced. Numbers do not show what they were divided by: where q or the cache
            has a scale, and the call does not, the result is wrong and nothing says so.
        kv_scale: factor of a float8_e4m3fn cache, default 1 (`PagedKVCache.scale(layer)`); may be traced. None for the
            others.
        schedule: how kernels divide the work, from `step_schedule`: the same for all layers of a step. None makes one
            for this call; implementations that need none ignore it. One of other lengths gives wrong output
            (`TileSchedule.check`).
        implementation: None takes the fastest that can run; a name insists on one of `"mosaic_gpu"`, `"flash_mla"`,
            `"xla"`, `"reference"`, a sequence of names takes the first that can.

    Returns:
        out `[B, S, H, d_v]` in q's dtype, bf16 for an e4m3 q; lse float32 `[B, H, S]`, natural logarithm. A row
        that sees no key has out 0 and lse −inf. Bytes that no request owns reach neither, even if they hold NaN.

    Raises:
        ValueError: the call is wrong. The values of block_table and kv_lens are on the device and not checked.
        NotImplementedError: the call is legal, but no admitted implementation can run it here.

    Cost: reads Σ kv_lens · D numbers once and does 2·S·H·(D + d_v)·Σ kv_lens FLOP, in kernels that skip what is
    past a request's length. `"mosaic_gpu"` reads them once per 64 query rows (S·H), from L2 where it can, has a
    workspace of at most 18 MB, and two calls of it must not run on a GPU at the same time. `"xla"` walks all requests
    to the longest and holds B·512·(D + S·H) numbers at a time.

    Differentiable forward and backward with `"reference"`, forward only with `"xla"`, whose loop has no fixed length,
    not at all with `"mosaic_gpu"`.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the masks and the cache layout are FlashMLA's.
    """
    _check_arrays(q, kv_cache, block_table, kv_lens, d_v)
    _check_tree_mask(tree_mask, q)
    row_scales = _is_per_row(q_scale)
    if row_scales:
        _check_row_scales(q_scale, q)
    _check_options(causal, sm_scale=sm_scale, q_scale=None if row_scales else q_scale, kv_scale=kv_scale)
    if not isinstance(schedule, TileSchedule | None):
        raise InputError(f"schedule must be a TileSchedule or None, got {type(schedule).__name__}.")
    if schedule is not None:
        schedule.require_requests(q.shape[0])
    if kv_scale is not None and kv_cache.dtype != jnp.float8_e4m3fn:
        raise InputError(f"kv_scale must be None for a cache of {kv_cache.dtype.name}, which has no scale per tensor.")
    chosen = _choose(implementation, q, kv_cache, d_v=int(d_v), tree_mask=tree_mask, row_scales=row_scales)
    num_requests, num_queries, num_heads, _ = q.shape
    if num_requests == 0:
        empty = jnp.zeros((0, num_queries, num_heads, d_v), out_dtype(q))
        return empty, jnp.zeros((0, num_heads, num_queries), jnp.float32)
    value_scale = None if kv_scale is None else jnp.asarray(kv_scale, jnp.float32)
    logit_scale = _product(q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, q_scale, kv_scale)
    return chosen.decode(
        q,
        kv_cache,
        block_table,
        kv_lens,
        logit_scale=logit_scale if chosen.host_scale else jnp.asarray(logit_scale, jnp.float32),
        value_scale=value_scale,
        d_v=int(d_v),
        causal=bool(causal),
        tree_mask=tree_mask,
        **({} if chosen.schedule is None else {"schedule": schedule}),
    )


def step_schedule(
    implementation: str | Sequence[str] | None,
    q: jax.ShapeDtypeStruct | Array,
    kv_cache: jax.ShapeDtypeStruct | Array,
    kv_lens: Int[Array, "B"],
    *,
    row_scales: bool = False,
) -> TileSchedule | None:
    """What all layers of a step with these lengths share: `mla_decode(…, schedule=…)`. Nothing is read by the host.

    Args:
        implementation: as for `mla_decode`.
        q: shape and dtype of the layers' queries; arrays will do.
        kv_cache: shape and dtype of their caches.
        kv_lens: int32 `[B]`, as for `mla_decode`.
        row_scales: whether q_scale will be one for each query row.

    Returns None if the implementation that will be chosen divides no work by a schedule.

    Raises ValueError for lengths that are not those of q's requests, NotImplementedError as `mla_decode`.
    """
    for name, found, axes in (("q", q, 4), ("kv_cache", kv_cache, 3), ("kv_lens", kv_lens, 1)):
        if not isinstance(found, np.ndarray | jax.Array | jax.ShapeDtypeStruct) or len(found.shape) != axes:
            raise InputError(f"{name} must be an array of {axes} axes, or its shape and dtype, got {described(found)}.")
    if kv_lens.shape != q.shape[:1] or kv_lens.dtype != jnp.int32:
        raise InputError(
            f"kv_lens must be int32 [{q.shape[0]}], one for each of q's requests, got {described(kv_lens)}."
        )
    make = _choose(implementation, q, kv_cache, row_scales=row_scales).schedule
    return None if make is None or kv_lens.shape[0] == 0 else make(q, kv_lens)


def implementation_for(
    implementation: str | Sequence[str] | None,
    q: jax.ShapeDtypeStruct,
    kv_cache: jax.ShapeDtypeStruct,
    *,
    row_scales: bool = False,
) -> str:
    """The name of the implementation that `mla_decode` would take for arrays of these shapes and dtypes, with one
    q_scale, or one for each query row.

    Raises ValueError for an unknown name, NotImplementedError with all reasons if none can run.
    """
    return _choose(implementation, q, kv_cache, row_scales=row_scales).name


def _choose(wanted: str | Sequence[str] | None, q: Any, kv_cache: Any, **call: Any) -> Implementation:
    names: Any = (wanted,) if isinstance(wanted, str) else wanted
    if names is None:
        names = tuple(IMPLEMENTATIONS)
    if not isinstance(names, list | tuple):
        raise InputError(f"implementation must be a name, a list or tuple of names or None, got {wanted!r}.")
    for name in names:
        if not isinstance(name, str) or name not in IMPLEMENTATIONS:
            raise InputError(f"implementation {name!r} is not known; choose from {', '.join(IMPLEMENTATIONS)}.")
    reasons = []
    for name in names:
        reason = IMPLEMENTATIONS[name].cannot_run(q, kv_cache, **call)
        if reason is None:
            return IMPLEMENTATIONS[name]
        reasons.append(f"{name}: {reason}")
    if not reasons:
        raise InputError("implementation is an empty sequence; name at least one, or pass None.")
    which, hint = ("that was named ", "; None as implementation takes the fastest that can")
    if wanted is None:
        which, hint = "", ""
    raise NotImplementedError(f"No implementation {which}can run this call: " + "; ".join(reasons) + hint + ".")


def _product(*factors: Any) -> float | jax.Array:
    """In float32; a number if all factors are known ones."""
    numbers = int | float | np.number | np.ndarray
    known = all(f is None or (isinstance(f, numbers) and np.ndim(f) == 0) for f in factors)
    as_float32 = np.float32 if known else functools.partial(jnp.asarray, dtype=jnp.float32)
    product: Any = math.prod((as_float32(f) for f in factors if f is not None), start=as_float32(1))
    return float(product) if known else product


def _check_arrays(q: Any, kv_cache: Any, block_table: Any, kv_lens: Any, d_v: int) -> None:
    arrays = {"q": (q, 4), "kv_cache": (kv_cache, 3), "block_table": (block_table, 2), "kv_lens": (kv_lens, 1)}
    for name, (array, ndim) in arrays.items():
        if not isinstance(array, jax.Array | np.ndarray):
            raise InputError(f"{name} must be a JAX or NumPy array, got {type(array).__name__}.")
        if array.ndim != ndim:
            layout = {"q": "[B, S, H, D]", "kv_cache": "[pages, 64, D]", "block_table": "[B, max_pages]"}
            raise InputError(f"{name} must be {layout.get(name, '[B]')}, got shape {array.shape}.")
    for name, array in (("block_table", block_table), ("kv_lens", kv_lens)):
        if array.dtype != jnp.int32:
            raise InputError(f"{name} must be int32, got {array.dtype.name}; convert with .astype('int32').")
    _check_dtypes(q, kv_cache)
    num_requests, num_queries, num_heads, d = q.shape
    if 0 in (num_queries, num_heads, d) or 0 in kv_cache.shape or 0 in block_table.shape[1:]:
        raise InputError(
            f"S, H, D, pages and max_pages must be at least 1 (only B may be 0), got q {q.shape}, "
            f"kv_cache {kv_cache.shape}, block_table {block_table.shape}."
        )
    if kv_cache.shape[1] != PAGE_SIZE:
        raise InputError(
            f"kv_cache.shape = {kv_cache.shape}: a page holds {PAGE_SIZE} tokens, got "
            f"{kv_cache.shape[1]}; reshape the cache to [pages, {PAGE_SIZE}, {kv_cache.shape[2]}]."
        )
    if kv_cache.dtype == jnp.uint8 and kv_cache.shape[2] != DS_ROW:
        raise InputError(
            f"a uint8 cache must be [pages, {PAGE_SIZE}, {DS_ROW}] (fp8_ds_mla), got shape "
            f"{kv_cache.shape}; did you mean float8_e4m3fn?"
        )
    latent_dim = DS_LATENT + DS_ROPE if kv_cache.dtype == jnp.uint8 else kv_cache.shape[2]
    if latent_dim != d:
        raise InputError(
            f"q's last dim is {d} and the cache's rows hold {latent_dim} numbers, but they must be equal "
            f"(latent + rope); did you pass q before absorbing W_UK?"
        )
    if isinstance(d_v, bool) or not isinstance(d_v, int | np.integer) or not 1 <= d_v <= d:
        raise InputError(
            f"d_v must be a whole number between 1 and q's last dim {d}, got {d_v!r}; values are the "
            f"first d_v numbers of a cache row."
        )
    if block_table.shape[0] != num_requests or kv_lens.shape[0] != num_requests:
        raise InputError(
            f"q has {num_requests} requests, block_table {block_table.shape[0]} and kv_lens "
            f"{kv_lens.shape[0]}; the first dims must be equal."
        )


def _check_dtypes(q: jax.Array, kv_cache: jax.Array) -> None:
    if q.dtype.name not in (*DTYPES, "float8_e4m3fn"):
        raise InputError(f"q must be one of {', '.join(DTYPES)}, got {q.dtype.name}.")
    if q.dtype.name == "float8_e4m3fn" and kv_cache.dtype.name in DTYPES:
        raise InputError(f"q in float8_e4m3fn needs an FP8 cache, got kv_cache in {kv_cache.dtype.name}.")
    if kv_cache.dtype.name not in DTYPES + FP8_DTYPES:
        raise InputError(f"kv_cache must be one of {', '.join(DTYPES + FP8_DTYPES)}, got {kv_cache.dtype.name}.")


def _check_options(causal: Any, **scales: Any) -> None:
    if not isinstance(causal, bool | np.bool_):
        raise InputError(f"causal must be True or False and not traced, got {type(causal).__name__}.")
    for name, scale in scales.items():
        number = isinstance(scale, int | float | np.number | np.ndarray | jax.Array)
        number = number and not np.iscomplexobj(scale)
        if scale is not None and not (number and np.ndim(scale) == 0):
            found = f"shape {scale.shape}" if number else f"{type(scale).__name__} {reprlib.repr(scale)}"
            more = ", or a float32 array [B, S, H]" if name == "q_scale" else ""
            raise InputError(f"{name} must be one real number, or an array of shape (){more}, got {found}.")
    kv_scale = scales.get("kv_scale")
    if isinstance(kv_scale, int | float | np.number | np.ndarray) and not 0 < kv_scale < float("inf"):
        raise InputError(f"kv_scale must be a positive number, got {kv_scale}.")


def _is_per_row(q_scale: Any) -> bool:
    return isinstance(q_scale, np.ndarray | jax.Array) and q_scale.ndim > 0


def _check_row_scales(q_scale: Any, q: jax.Array) -> None:
    if q_scale.shape != q.shape[:3] or q_scale.dtype != jnp.float32:
        raise InputError(
            f"q_scale must be one real number, or float32 [B, S, H] = {q.shape[:3]}, one for each query row, got "
            f"{q_scale.dtype.name} {q_scale.shape}."
        )


def _check_tree_mask(tree_mask: Any, q: jax.Array) -> None:
    if tree_mask is None:
        return
    expected = (q.shape[0], q.shape[1], q.shape[1])
    if getattr(tree_mask, "shape", None) != expected or tree_mask.dtype != jnp.bool_:
        raise InputError(
            f"tree_mask must be bool [B, S, S] = {expected}, got {tree_mask.dtype} {tree_mask.shape}."
            if hasattr(tree_mask, "dtype")
            else f"tree_mask must be a bool array [B, S, S] = {expected}, got {type(tree_mask).__name__}."
        )
