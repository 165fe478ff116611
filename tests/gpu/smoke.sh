#!/bin/sh
# First run on a fresh GPU machine: shortest checks first, each under its own limit.
export XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
timeout 70 python3 -m pytest -q -x tests/gpu/test_mosaic_gpu.py -k "any_schedule and 1" --timeout 60 2>&1 | tail -25 || exit 1
timeout 240 python3 -m pytest -q tests/gpu/test_mosaic_gpu.py -m "not full" --timeout 60 2>&1 | tail -40
