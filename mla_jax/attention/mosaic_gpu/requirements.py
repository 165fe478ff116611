"""Which machines and calls the Hopper kernel can serve. Light: imports nothing of Pallas."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

DIM, LATENT, PAGE = 576, 512, 64
DS_ROW = 656  # bytes of a row of fp8_ds_mla
MAX_TREE_TOKENS = 256  # each 32 of them lengthen the kernel
CAPABILITY = "9.0"  # of Hopper


def cannot_run(
    q: Any = None, kv_cache: Any = None, *, d_v: int = LATENT, tree_mask: Any = None, row_scales: bool = False
) -> str | None:
    """Why this call cannot run here, in one sentence; None if it can. Reads shapes, dtypes and the device.

    Without arrays it speaks of the machine alone.
    """
    if q is not None and (reason := _unsupported_call(q, kv_cache, d_v, tree_mask, row_scales)):
        return reason
    device = _device(q)
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != CAPABILITY:
        found = f"{device.device_kind} (compute capability {capability})" if capability else device.platform
        return f"it needs a Hopper GPU (compute capability {CAPABILITY}), found {found}"
    if importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu") is None:
        return f"jax {jax.__version__} comes without Pallas for Mosaic GPU"
    return None


def num_sms() -> int:
    """Streaming multiprocessors of the GPU that calls run on."""
    return _device(None).core_count


def _device(q: Any) -> Any:
    """Where q lies, if it is there already; else where JAX puts what it computes."""
    if isinstance(q, jax.Array) and not isinstance(q, jax.core.Tracer):
        return next(iter(q.devices()))
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def _unsupported_call(q: Any, kv_cache: Any, d_v: int, tree_mask: Any, row_scales: bool) -> str | None:
    if kv_cache.dtype == jnp.uint8:
        if q.dtype != jnp.bfloat16:
            return f"with a cache in fp8_ds_mla it takes q in bfloat16, got {q.dtype}"
    elif kv_cache.dtype == jnp.float8_e4m3fn:
        if q.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
            return f"with a cache in float8_e4m3fn it takes q in bfloat16 or float8_e4m3fn, got {q.dtype}"
    elif q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, got q in {q.dtype}"
    elif kv_cache.dtype != q.dtype:
        return f"it needs q and kv_cache of one dtype, got {q.dtype} and {kv_cache.dtype}"
    if q.shape[-1] != DIM or d_v != LATENT:
        return f"it is built for {DIM} dims with {LATENT} value dims, got {q.shape[-1]} and {d_v}"
    width = DS_ROW if kv_cache.dtype == jnp.uint8 else DIM
    if kv_cache.ndim != 3 or kv_cache.shape[1:] != (PAGE, width):
        return f"it needs kv_cache [pages, {PAGE}, {width}], got {kv_cache.shape}"
    if tree_mask is not None and q.shape[1] > MAX_TREE_TOKENS:
        return f"it takes tree masks of up to {MAX_TREE_TOKENS} tokens, got {q.shape[1]}"
    if row_scales and kv_cache.dtype != jnp.float8_e4m3fn:
        return f"it takes a q_scale for each query row with a cache in float8_e4m3fn only, got {kv_cache.dtype}"
    return None
