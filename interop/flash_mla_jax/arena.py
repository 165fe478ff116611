"""Memory of an operator that runs under XLA: all of it from XLA's buffers, nothing from torch's allocator.

XLA replays a captured call by address. Memory that torch had allocated during the capture would be torch's to reuse
afterwards, and the replay would write into somebody's data.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 256  # bytes: what CUDA's allocators give, and more than tensor memory accesses ask for
_aten = torch.ops.aten


class Arena(TorchDispatchMode):
    """While active, tensors that an operator makes are result buffers where their size fits, else parts of a scratch.

    Anything else that would allocate raises, and `failure` keeps the text, which C++ may swallow.

    Attributes:
        used: bytes of scratch handed out.
    """

    def __init__(self, scratch: torch.Tensor, results: tuple[torch.Tensor, ...] = ()):
        super().__init__()
        self.scratch, self.results = scratch, list(results)
        self.used = 0
        self.failure: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.new_empty.default:
            return self._serve(args[1], kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device)
        if func is _aten.empty_like.default:
            return self._serve(args[0].shape, kwargs.get("dtype") or args[0].dtype, args[0].device)
        if func is _aten.empty.memory_format:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self._serve(args[0], dtype, kwargs.get("device") or "cpu")
        if func is _aten.reshape.default:  # arrives whole in inference mode; a copy would need memory
            func = _aten.view.default
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            self._fail(f"{func} failed ({error})")
        if isinstance(out, torch.Tensor) and not self._is_known(out, args):
            self._fail(f"the operator called {func}, whose memory would be torch's")
        return out

    def _serve(self, shape: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if torch.device(device).type != self.scratch.device.type:
            self._fail(f"the operator allocates on {device}, the call is on {self.scratch.device}")
        count = math.prod(int(n) for n in shape)
        for i, result in enumerate(self.results):
            if result.dtype == dtype and result.numel() == count:
                return self.results.pop(i).view(tuple(shape))
        start, size = self.used, count * dtype.itemsize
        self.used += aligned(size)
        if start + size > self.scratch.numel():
            self._fail(f"the operator wants {start + size} bytes of scratch and {self.scratch.numel()} were expected")
        return self.scratch[start : start + size].view(dtype).view(tuple(shape))

    def _is_known(self, out: torch.Tensor, args: Any) -> bool:
        storage = out.untyped_storage().data_ptr()
        return any(isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() == storage for a in args)

    def _fail(self, text: str) -> Any:
        self.failure = text
        raise RuntimeError(text)


def aligned(size: int) -> int:
    """Bytes that a piece of `size` bytes takes in the scratch."""
    return -(-size // ALIGNMENT) * ALIGNMENT
