"""How a latent row lies in the cache."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from mla_jax.errors import InputError

PAGE_SIZE = 64  # tokens; FlashMLA's kernels know no other


@dataclass(frozen=True)
class KVFormat:
    """A cache format. `dtype` is that of the stored array."""

    name: str
    dtype: Any

    def bytes_per_token(self, latent_dim: int) -> int:
        """Bytes that one token takes in one layer."""
        return latent_dim * jnp.dtype(self.dtype).itemsize


FORMATS = {
    "bf16": KVFormat("bf16", jnp.bfloat16),
    "fp16": KVFormat("fp16", jnp.float16),
    "fp32": KVFormat("fp32", jnp.float32),
}
FP8_NAMES = ("fp8_e4m3", "fp8", "fp8_ds_mla")


def kv_format(name: str) -> KVFormat:
    """The format of that name. Raises ValueError for an unknown name, NotImplementedError for FP8."""
    if name in FP8_NAMES:
        raise NotImplementedError(f"KV format {name!r} is not implemented yet; use {', '.join(FORMATS)}.")
    if name not in FORMATS:
        raise InputError(f"KV format {name!r} is not known; choose from {', '.join(FORMATS)}.")
    return FORMATS[name]
