#!/bin/bash
# Tests, then the benchmark, on a GPU machine in one go: `smoke.sh SECONDS_FOR_TESTS [CASE... OPTION...]`; under $OUT.
# MARK chooses the tests, such as MARK=full for upstream's grid.
: "${OUT:?must name a folder for results}"; mkdir -p "$OUT"
limit=$1; shift
export PYTHONPATH=$PYTHONPATH:$PWD/tests/attention/mosaic_gpu
timeout "$limit" python3 -m pytest -q -n "$(nproc)" --noconftest -o filterwarnings= -p no:cacheprovider \
    tests/gpu/test_mosaic_gpu.py -m "${MARK:-not full}" --timeout 120 >"$OUT/tests.txt" 2>&1
tail -30 "$OUT/tests.txt" | cut -c1-300
timeout 300 python3 -m mla_jax bench --against flash_mla --json --jobs 10 --output "$OUT/bench.json" "$@" \
    >"$OUT/bench.txt" 2>"$OUT/bench.err"
grep mosaic_gpu "$OUT/bench.err" | cut -c1-200
