"""Paged MLA decode for Hopper GPUs in Pallas Mosaic GPU: bf16 and fp16, and both FP8 formats.

`requirements.cannot_run` says whether a call can run; `launch.decode` runs it; `kernel`, `fp8_kernel` (e4m3) and
`ds_kernel` (fp8_ds_mla) say how.
Imported when the first call needs it, because Pallas takes a while to load.
"""
