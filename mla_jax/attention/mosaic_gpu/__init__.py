"""Paged MLA decode for Hopper GPUs in Pallas Mosaic GPU: bf16 and fp16, and caches in e4m3.

`requirements.cannot_run` says whether a call can run; `launch.decode` runs it; `kernel` and `fp8_kernel` say how.
Imported when the first call needs it, because Pallas takes a while to load.
"""
