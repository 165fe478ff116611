"""What the roles of the kernel for caches in fp8_ds_mla share."""

import dataclasses
from typing import NamedTuple

from mla_jax.attention.mosaic_gpu.byte_work import BytesWork
from mla_jax.attention.mosaic_gpu.hardware import Signal
from mla_jax.attention.mosaic_gpu.work import Ref


class DsQueries(NamedTuple):
    """A request's queries in shared memory, each row divided by a power of two."""

    latent: Ref  # [rows, 512] float16
    rope: Ref  # [rows, 64] bfloat16
    factor: Ref  # [rows] float32: what brings a row's products to logits, base 2


@dataclasses.dataclass(frozen=True)
class DsCta(BytesWork):
    """What the roles of the kernel for fp8_ds_mla share."""

    queries: DsQueries
    keys: Ref  # [slots, LINES, LINE] uint8: pages
    scales: Ref  # [BUFFERS, 4, 64] float16: what values are multiplied with, divided by their key's unit
    top: Ref  # [rows] float32: of this request's rows, the largest logit so far, or up to SLACK below it
    differs: Ref  # [BUFFERS] int32: whether any decay is not 1; only then are decays there
    full: Ref  # barriers, by slot: the page has arrived
    slot_read: Signal  # the right side to the left: it has read the slot
    vote_barrier: int
