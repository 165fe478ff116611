"""Paged MLA decode for Hopper GPUs in Pallas Mosaic GPU: bf16 and fp16, and both FP8 formats.

`requirements.cannot_run` says whether a call can run; `launch.decode` runs it. Three kernels, one file for each thing
that they do differently, and files that they share:

    all three      persistent (grid, signals), roles (who does what), work (what a CTA knows), supply (filling slots),
                   company (row blocks that wait for each other), scores (masks, softmax, lse)
    shared work    pieces (storing them), combine and merge_rows (merging them)
    16-bit         config, kernel, scores, values; launch
    fp8_e4m3       fp8_config, fp8_kernel, fp8_work, fp8_scores, steps (softmax between products), fp8_values,
                   fp8_hardware; fp8_launch
    fp8_ds_mla     ds_config, ds_kernel, ds_work, ds_keys, ds_products, ds_queries, ds_scores, ds_values,
                   ds_values_hardware, ds_layout; ds_launch
    both FP8       byte_work, byte_values (the value roles), column_softmax (over columns, for ds_mla)
    instructions   ptx (words for code in PTX), hardware (barriers, counters, clearing)
    calls          packing (query rows), requirements

Start with `kernel`, whose docstring says why roles are divided so, then `scores` and `values`.
Imported when the first call needs it, because Pallas takes a while to load.
"""
