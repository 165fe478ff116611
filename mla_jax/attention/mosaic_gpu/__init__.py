"""Paged MLA decode for Hopper GPUs in Pallas Mosaic GPU: bf16 and fp16. In the making.

In this form it has run in the Mosaic GPU interpreter and been compiled for sm_90a, but not run on a GPU; `mla_decode`
does not choose it until `tests/gpu` has passed on one.
"""

from mla_jax.attention.mosaic_gpu.config import KernelConfig as KernelConfig
from mla_jax.attention.mosaic_gpu.launch import can_run as can_run
from mla_jax.attention.mosaic_gpu.launch import decode as decode
