"""What the roles of the kernel for caches in e4m3 share."""

import dataclasses
from typing import NamedTuple

from mla_jax.attention.mosaic_gpu.byte_work import BytesWork
from mla_jax.attention.mosaic_gpu.work import HalvesWork, Ref, Slots


class Fp8Queries(NamedTuple):
    """A request's queries in shared memory, in e4m3; the sum over the first axis. Halves are lines of 128 dims."""

    left: Ref  # [query_parts, 2, 64, 128]
    right: Ref  # [query_parts, 2, 64, 128]
    rope: Ref  # [query_parts, 64, 64]


@dataclasses.dataclass(frozen=True)
class Fp8Cta(BytesWork, HalvesWork):
    """What the roles of the kernel for e4m3 share."""

    queries: Fp8Queries
    keys: Slots  # the slots, as operands of products
    query_scale: Ref  # [B, row_blocks * 64] float32: factor of a row's logits
    value_scale: Ref  # [1] float32
