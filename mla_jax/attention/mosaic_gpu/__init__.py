"""Paged MLA decode for Hopper GPUs in Pallas Mosaic GPU: bf16 and fp16."""

from mla_jax.attention.mosaic_gpu.config import KernelConfig as KernelConfig
from mla_jax.attention.mosaic_gpu.launch import can_run as can_run
from mla_jax.attention.mosaic_gpu.launch import decode as decode
