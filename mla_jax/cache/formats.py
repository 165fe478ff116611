"""How a latent row lies in the cache."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from mla_jax.errors import InputError

PAGE_SIZE = 64  # tokens; FlashMLA's kernels know no other
DS_TILE = 128  # values that share a scale in fp8_ds_mla
DS_LATENT, DS_ROPE = 512, 64  # values of a row in fp8_ds_mla
DS_ROW = DS_LATENT + DS_LATENT // DS_TILE * 4 + DS_ROPE * 2  # bytes: 512 e4m3, 4 float32 scales, 64 bf16


@dataclass(frozen=True)
class KVFormat:
    """A cache format.

    Attributes:
        name: as users spell it.
        dtype: of the stored array.
        has_scale: one float32 per tensor belongs to it.
    """

    name: str
    dtype: Any
    has_scale: bool = False

    def row_width(self, latent_dim: int) -> int:
        """Numbers of `dtype` that one token takes in one layer. Raises ValueError if the format cannot hold the row."""
        if self.name != "fp8_ds_mla":
            return latent_dim
        if latent_dim != DS_LATENT + DS_ROPE:
            raise InputError(f"fp8_ds_mla holds rows of {DS_LATENT} + {DS_ROPE} values, got {latent_dim}.")
        return DS_ROW

    def bytes_per_token(self, latent_dim: int) -> int:
        """Bytes that one token takes in one layer."""
        return self.row_width(latent_dim) * jnp.dtype(self.dtype).itemsize


FORMATS = {
    f.name: f
    for f in (
        KVFormat("bf16", jnp.bfloat16),
        KVFormat("fp16", jnp.float16),
        KVFormat("fp32", jnp.float32),
        KVFormat("fp8_e4m3", jnp.float8_e4m3fn, has_scale=True),
        KVFormat("fp8_ds_mla", jnp.uint8),
    )
}
ALIASES = {"fp8": "fp8_e4m3"}


def kv_format(name: str) -> KVFormat:
    """The format of that name or alias. Raises ValueError for an unknown one."""
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise InputError(f"KV format {name!r} is not known; choose from {', '.join(FORMATS)}.")
    return FORMATS[name]
