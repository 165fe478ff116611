"""Arrays between JAX and torch without a copy, in order, and alive as long as either side uses them.

DLPack hands over a pointer. What it does not do, and this module does:

- order: torch would start on an array that JAX is still computing. `to_torch` waits for it. In the other direction JAX
  waits for torch's current stream by itself.
- lifetime: both sides start work and return before it is done, and both reuse memory as soon as the last Python
  reference is gone. Memory that is dropped is kept until all work that was started before is done.
"""

import collections
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from flash_mla_jax import provider
from flash_mla_jax.errors import InputError, UnavailableError
from flash_mla_jax.validate import check_row_major

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int32", "uint8", "int8", "bool")
ALIGNMENT = 16  # bytes: XLA's executables refuse less

_dropped: collections.deque[tuple[Any, Any]] = collections.deque()  # (what is kept, torch's streams that may use it)
_waiting: collections.deque[tuple[Any, list[Any]]] = (
    collections.deque()
)  # (what is kept, events and arrays to wait for)
_lock = threading.Lock()


def to_torch(array: jax.Array, *, copy: bool = False) -> Any:
    """The same memory as a torch tensor, on the same device.

    Waits until JAX has computed the array. The tensor must not be written to: JAX's arrays never change.

    Args:
        array: bfloat16, float16, float32, float8_e4m3fn, int32, uint8, int8 or bool; on one device, row-major.
        copy: give memory of its own instead, which may be written to.

    Raises:
        ValueError: no such array. int64, float64 and complex numbers are refused, which JAX narrows by default.
        NotImplementedError: torch is not installed.

    JAX's memory is kept until torch's work on it is done, that is on the streams that are current here and when the
    tensor is dropped; work on others needs `torch.Tensor.record_stream`'s care. It is given back at the next call of
    `to_torch`, `from_torch` or `release_dropped` after that.
    """
    torch = _torch()
    release_dropped()
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        found = "a traced one; call it outside jit" if isinstance(array, jax.core.Tracer) else type(array).__name__
        raise InputError(f"to_torch needs a jax.Array with values, got {found}.")
    _check_dtype(array.dtype.name)
    if len(array.sharding.device_set) > 1:
        raise InputError(f"the array must lie on one device, found it on {len(array.sharding.device_set)}.")
    check_row_major("the array", array)
    tensor = torch.from_dlpack(jax.block_until_ready(array))
    if tensor.data_ptr() != array.unsafe_buffer_pointer() and array.size:
        raise InputError(f"torch has copied the {array.dtype.name} array instead of sharing its memory.")
    if copy:
        tensor = tensor.clone()
        _wait_for_torch(tensor.device)
        return tensor
    _keep(tensor.untyped_storage(), array, _streams(tensor.device))
    return tensor


def from_torch(tensor: Any, *, copy: bool = False) -> jax.Array:
    """The same memory as a JAX array, on the same device.

    JAX waits for the work on torch's current stream. The tensor must not be written to as long as the array lives.

    Args:
        tensor: bfloat16, float16, float32, float8_e4m3fn, int32, uint8, int8 or bool; contiguous, at an address that
            is a multiple of 16.
        copy: copy a tensor into memory of its own where it is not laid out so, or may be written to later.

    Raises:
        ValueError: no such tensor; with copy only for a dtype that JAX has not.
        NotImplementedError: torch is not installed.

    torch's memory is kept until JAX's work on the array is done, and given back at the next call of `to_torch`,
    `from_torch` or `release_dropped` after that.
    """
    torch = _torch()
    release_dropped()
    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"from_torch needs a torch.Tensor, got {type(tensor).__name__}.")
    _check_dtype(str(tensor.dtype).removeprefix("torch."))
    if tensor.layout != torch.strided or tensor.is_meta:
        where = "the meta device" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise InputError(f"the tensor must be dense and have memory, got one of {where}.")
    tensor = tensor.detach()
    if copy:
        tensor = tensor.resolve_neg().clone(memory_format=torch.contiguous_format)
    if tensor.is_neg():
        raise InputError("the tensor is a view whose signs are still to be changed; pass copy=True.")
    if not tensor.is_contiguous():
        raise InputError(
            f"the tensor must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; pass "
            "copy=True."
        )
    if tensor.data_ptr() % ALIGNMENT:
        raise InputError(f"the tensor must begin at a multiple of {ALIGNMENT} bytes; pass copy=True.")
    array = jax.dlpack.from_dlpack(tensor)
    if array.size and array.unsafe_buffer_pointer() != tensor.data_ptr():
        array.block_until_ready()  # a small copy of JAX's own, which has to read the tensor before it goes
    else:
        _keep(array, tensor, None)
    return array


def release_dropped(*, wait: bool = False) -> int:
    """Gives back memory that was shared, was dropped since, and has no work left on it.

    Args:
        wait: wait for the work instead of leaving what has some.

    Returns how many tensors and arrays are still kept.
    """
    with _lock:
        while _dropped:
            kept, streams = _dropped.popleft()
            _waiting.append((kept, _marks(kept, streams)))
        for _ in range(len(_waiting)):
            kept, marks = _waiting.popleft()
            if not _done(marks, wait):
                _waiting.append((kept, marks))
        return len(_waiting)


def _keep(holder: Any, kept: Any, streams: Any) -> None:
    """When holder goes, kept stays until `release_dropped` finds it unused. A finalizer must do next to nothing."""

    def dropped() -> None:
        _dropped.append((kept, streams and streams + _streams(streams[0].device)))

    weakref.finalize(holder, dropped).atexit = False


def _streams(device: Any) -> list[Any]:
    """torch's current stream on that device; none on a CPU, where torch is done when it returns."""
    import torch

    return [torch.cuda.current_stream(device)] if device.type == "cuda" else []


def _marks(kept: Any, streams: Any) -> list[Any]:
    """What has to be done before `kept` may go: events on torch's streams, or an array that JAX computes after all."""
    if streams is None:
        return [jnp.zeros((), jnp.int8, device=_jax_device(kept)) + jnp.int8(1)]
    return [stream.record_event() for stream in streams]


def _jax_device(tensor: Any) -> Any:
    if tensor.device.type == "cpu":
        return jax.local_devices(backend="cpu")[0]
    gpus = jax.local_devices(backend="gpu")
    return next((d for d in gpus if d.local_hardware_id == tensor.device.index), gpus[0])


def _done(marks: list[Any], wait: bool) -> bool:
    for mark in marks if wait else ():
        mark.block_until_ready() if isinstance(mark, jax.Array) else mark.synchronize()
    return all((mark.is_ready if hasattr(mark, "is_ready") else mark.query)() for mark in marks)


def _wait_for_torch(device: Any) -> None:
    for stream in _streams(device):
        stream.synchronize()


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise InputError(f"{name} is not shared between JAX and torch; convert to one of {', '.join(DTYPES)}.")


def _torch() -> Any:
    if not provider._installed("torch"):
        raise UnavailableError(f"PyTorch is not installed; {provider.INSTALL}.")
    import torch

    return torch
