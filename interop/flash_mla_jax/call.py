"""A kernel as a JAX operation: shapes anywhere, a callback into torch where it is compiled for a GPU.

The callback gets XLA's own buffers and stream. XLA runs it while it captures a CUDA graph and then replays the graph
without Python; where XLA does not capture, it runs at every call.
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flash_mla_jax import provider as providers
from flash_mla_jax.errors import UnavailableError
from flash_mla_jax.provider import DENSE_FP8, METADATA, METADATA_FP8, SPARSE, Provider

D_V = 512


@dataclass(frozen=True)
class Spec:
    """What is fixed when a call is compiled.

    Attributes:
        kind: of kernel, see `provider`.
        parts: rows of the metadata.
        with_metadata: the last two arguments are metadata and num_splits; else the kernel makes its own.
        options: of the kernel, in its order.
        provider: where the kernel comes from; None looks for one when the call is compiled.
    """

    kind: str
    parts: int
    with_metadata: bool = False
    options: tuple[Any, ...] = ()
    provider: Provider | None = None


@dataclass
class Runs:
    """How often callbacks ran: `total`, and `captured` of these into a CUDA graph."""

    total: int = 0
    captured: int = 0


runs = Runs()
kernel_p = Primitive("flash_mla")
kernel_p.multiple_results = True


def run(spec: Spec, *arrays: jax.Array) -> list[jax.Array]:
    """out and lse `[b, s_q, h_q]`, or metadata and num_splits: what the kernel of `spec.kind` gives."""
    return kernel_p.bind(*arrays, spec=spec)[:2]


def results_of(spec: Spec, arrays: Any) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the two results and of the scratch."""
    if spec.kind in (METADATA, METADATA_FP8):
        batch = arrays[0].shape[0]
        made = [jax.ShapeDtypeStruct((spec.parts, 8), jnp.int32), jax.ShapeDtypeStruct((batch + 1,), jnp.int32)]
        return [*made, jax.ShapeDtypeStruct((256,), jnp.uint8)]
    batch, queries, heads, _ = arrays[0].shape
    dtype = jnp.bfloat16 if spec.kind == DENSE_FP8 else arrays[0].dtype
    return [
        jax.ShapeDtypeStruct((batch, queries, heads, D_V), dtype),
        jax.ShapeDtypeStruct((batch, queries, heads), jnp.float32),
        jax.ShapeDtypeStruct((scratch_bytes(spec, batch, queries * heads),), jnp.uint8),
    ]


def scratch_bytes(spec: Spec, batch: int, rows: int) -> int:
    """Bytes of one call's scratch: outputs and log-sum-exps of up to b + parts pieces, float32, and own metadata.

    A request that is cut at n borders between parts has n + 1 pieces, so there are never more than b + parts.
    """
    pieces = (batch + spec.parts) * rows
    sizes = [pieces * 4, pieces * D_V * 4]
    if not spec.with_metadata:
        sizes += [spec.parts * 8 * 4, (batch + 1) * 4]
    return sum(-(-size // 256) * 256 for size in sizes)


@kernel_p.def_abstract_eval
def _abstract(*arrays: Any, spec: Spec) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in results_of(spec, arrays)]


@functools.partial(jax.jit, static_argnames="spec")
def _jitted(*arrays: jax.Array, spec: Spec) -> Any:
    return kernel_p.bind(*arrays, spec=spec)


kernel_p.def_impl(lambda *arrays, spec: _jitted(*arrays, spec=spec))


def _no_gradient(*_: Any, **__: Any) -> Any:
    raise UnavailableError(
        "FlashMLA has no gradient; differentiate mla_jax.mla_decode(..., implementation='reference') instead."
    )


def _no_vmap(*_: Any, **__: Any) -> Any:
    raise UnavailableError(
        "FlashMLA's calls cannot be mapped by jax.vmap; pass all requests as one batch, with one row of block_table "
        "and one entry of cache_seqlens each."
    )


ad.primitive_jvps[kernel_p] = _no_gradient
batching.primitive_batchers[kernel_p] = _no_vmap


def _lower(ctx: Any, *operands: Any, spec: Spec) -> Any:
    if len(ctx.module_context.platforms) > 1:
        raise UnavailableError("FlashMLA's calls are compiled for one platform at a time.")
    (platform,) = ctx.module_context.platforms
    found = _provider_for(platform, spec, ctx.avals_in)

    def lowered(*arrays: jax.Array) -> Any:
        call = buffer_callback(_callback(spec, found), results_of(spec, arrays), command_buffer_compatible=True)
        return call(*arrays)

    return mlir.lower_fun(lowered, multiple_results=True)(ctx, *operands)


mlir.register_lowering(kernel_p, _lower)


def _provider_for(platform: str, spec: Spec, avals: Any) -> Provider | None:
    """The provider of a call that is compiled, its kernel loaded. None: compiled here for a GPU that is elsewhere."""
    if spec.provider is not None and spec.provider.platform == platform:
        return spec.provider
    if platform == "cuda" and providers.default_device().platform != "gpu":
        return None
    found = providers.find()
    _load_kernel(spec, found, tuple((a.shape, str(a.dtype)) for a in avals))
    return found


@functools.lru_cache(None)
def _load_kernel(spec: Spec, provider: Provider, shapes: tuple[Any, ...]) -> None:
    """Runs the kernel once on one request of one token: CUDA loads code at its first launch, and not in a capture."""
    import torch

    device = torch.device("cuda", providers.default_device().local_hardware_id)
    inputs = _one_request(spec, shapes, device)
    with torch.cuda.device(device), torch.inference_mode():
        _launch(spec, provider, inputs)
        torch.cuda.synchronize(device)


def _one_request(spec: Spec, shapes: tuple[Any, ...], device: Any) -> list[Any]:
    """Arguments like these for one request: a page of zeros, a length of 1, and metadata of parts without work."""
    import torch

    inputs = [torch.zeros((1, *shape[1:]), dtype=getattr(torch, dtype), device=device) for shape, dtype in shapes]
    for tensor, (shape, dtype) in zip(inputs, shapes, strict=True):
        if len(shape) == 1 and dtype == "int32":
            tensor.fill_(1)  # lengths
    if spec.with_metadata:
        inputs[-2] = torch.ones(shapes[-2][0], dtype=torch.int32, device=device)
        inputs[-1] = torch.arange(2, dtype=torch.int32, device=device)
    return inputs


@functools.lru_cache(None)  # another function object would make XLA compile again
def _callback(spec: Spec, provider: Provider | None) -> Callable[..., None]:
    def callback(ctx: Any, out: Any, *args: Any) -> None:
        import torch

        from flash_mla_jax.arena import Arena

        found = providers.find() if provider is None else provider
        with _no_collection(), torch.inference_mode():
            inputs, results = ([torch.from_dlpack(b) for b in buffers] for buffers in (args, out))
            with _on_stream(ctx, inputs[0].device):
                arena = Arena(results[-1], tuple(results[:2]))
                try:
                    with arena:
                        made = _launch(spec, found, inputs)
                except Exception as error:
                    raise RuntimeError(f"{spec.kind} of {found.name} failed: {arena.failure or error}") from error
            _check_written(made, results)

    return callback


def _launch(spec: Spec, provider: Provider, inputs: list[Any]) -> Any:
    """Calls the kernel with torch tensors in the order of its arguments."""
    kernel = provider.kernel(spec.kind)
    if spec.kind in (METADATA, METADATA_FP8):
        return kernel(inputs[0], *spec.options)
    metadata = inputs[-2:] if spec.with_metadata else (None, None)
    if spec.kind == SPARSE:
        q, cache, indices = inputs[:3]
        scale, *more = spec.options
        return kernel(q, cache, indices, None, None, *metadata, None, None, None, D_V, scale, *more)
    q, cache, table, lens, *scales = inputs[: len(inputs) - 2 * spec.with_metadata]
    scale, causal = spec.options
    common = (q, cache, D_V, lens, table, scale, causal, *metadata)
    return kernel(*common, *scales) if spec.kind == DENSE_FP8 else kernel(*common)


def _check_written(made: Any, results: list[Any]) -> None:
    """Fails closed if the kernel has put its results elsewhere than into XLA's buffers."""
    for got, wanted in zip(made, results[:2], strict=False):
        if got.data_ptr() != wanted.data_ptr() or got.dtype != wanted.dtype or got.numel() != wanted.numel():
            raise RuntimeError("the kernel did not write into XLA's buffers; this version of it is not supported")


@contextmanager
def _on_stream(ctx: Any, device: Any) -> Iterator[None]:
    """torch launches on XLA's stream."""
    import torch

    runs.total += 1
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(ctx.stream, device=device)):
        runs.captured += torch.cuda.is_current_stream_capturing()
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """No finalizer may free device memory in a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
