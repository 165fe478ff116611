"""Paged MLA decode for Hopper GPUs in Pallas Mosaic GPU: bf16 and fp16.

`requirements.cannot_run` says whether a call can run; `launch.decode` runs it; `kernel` says how. Imported when the
first call needs it, because Pallas takes a while to load.
"""
