"""Reads safetensors files: an 8-byte length, a JSON header (name → dtype, shape, byte range), then the bytes.

The safetensors package maps files into memory, where every page that was read counts as resident until the file is
closed, and its NumPy side knows no FP8. Plain reads into memory of our own need neither.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mla_jax.errors import InputError

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32, "F8_E4M3": jnp.float8_e4m3fn}
LENGTH_BYTES = 8
ALIGNMENT = 64  # bytes; a CPU device takes an array that is aligned to it over without a copy


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `num_bytes` bytes from `offset` on in the file `path`."""

    path: Path
    name: str
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def is_fp8(self) -> bool:
        """True for float8_e4m3fn, which means something only together with its scales."""
        return self.dtype_name == "F8_E4M3"

    def read(self) -> np.ndarray:
        """The tensor as stored, in fresh memory. NotImplementedError for a dtype not in DTYPES."""
        if self.dtype_name not in DTYPES:
            raise NotImplementedError(
                f"{self.path}: tensor {self.name} is stored as {self.dtype_name}, which is "
                f"not implemented; only {', '.join(DTYPES)} are."
            )
        dtype = np.dtype(DTYPES[self.dtype_name])
        if int(np.prod(self.shape)) * dtype.itemsize != self.num_bytes:
            raise InputError(
                f"{self.path}: tensor {self.name} of shape {self.shape} cannot lie in "
                f"{self.num_bytes} bytes of {self.dtype_name}; copy or download the file again."
            )
        tensor = aligned_empty(self.shape, dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset)
                _fill(file, memoryview(tensor.reshape(-1).view(np.uint8)))
        except OSError as e:
            raise InputError(f"{self.path}: tensor {self.name} cannot be read ({e}).") from None
        return tensor


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. Raises InputError if the file is not there, cut off or no safetensors file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= size - LENGTH_BYTES:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        start = LENGTH_BYTES + length
        tensors = [_stored(path, name, e, start) for name, e in entries.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise InputError(f"{path} is not a whole safetensors file ({e}); copy or download it again.") from None
    for tensor in tensors:
        if not start <= tensor.offset <= tensor.offset + tensor.num_bytes <= size:
            raise InputError(
                f"{path} is cut off: tensor {tensor.name} ends at byte "
                f"{tensor.offset + tensor.num_bytes}, the file has {size}; copy or download it again."
            )
    return {tensor.name: tensor for tensor in tensors}


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialized memory that a CPU device can take over as it is."""
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def _stored(path: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *entry["shape"])) or end < begin:
        raise ValueError(f"tensor {name} has shape {entry['shape']} and bytes {begin} to {end}")
    if not isinstance(entry["dtype"], str):
        raise TypeError(f"tensor {name} has dtype {entry['dtype']}")
    return StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)


def _fill(file: Any, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])
        if not count:
            raise OSError(f"the file ended {len(buffer) - done} bytes early")
        done += count
