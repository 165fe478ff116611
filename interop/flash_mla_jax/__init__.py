"""FlashMLA's CUDA kernels called from JAX, in and out of `jax.jit`, under FlashMLA's own names.

Imports neither torch nor flash_mla until a call is compiled for a GPU, so shapes can be evaluated anywhere.
"""

from flash_mla_jax.dlpack import from_torch, release_dropped, to_torch
from flash_mla_jax.errors import InputError, UnavailableError
from flash_mla_jax.interface import flash_mla_with_kvcache, get_mla_metadata
from flash_mla_jax.provider import cannot_run

__all__ = [
    "InputError",
    "UnavailableError",
    "cannot_run",
    "flash_mla_with_kvcache",
    "from_torch",
    "get_mla_metadata",
    "release_dropped",
    "to_torch",
]
