#!/bin/bash
# Step times with and without drafts, a process per case: all compile side by side, then time in turns. JSON under $OUT.
: "${OUT:?must name a folder for results}"; mkdir -p "$OUT"
here=$(dirname "$0")
meet=$(mktemp -d)
# A process has the GPU to itself when it is its turn; what makes weights and caches is compiled once for all.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=$meet/compiled JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
drafts="off 1-1-2 3-1-4 3-4-8"
cases=()
for mtp in $drafts; do
    for b in 1 8 32; do cases+=("--model demo --context 400 --batch $b --mtp $mtp"); done
    for b in 8 32; do cases+=("--model v3 --heads 16 --context 8192 --batch $b --mtp $mtp"); done
done
for mtp in off 3-1-4; do cases+=("--model v3 --heads 128 --context 8192 --batch 32 --mtp $mtp"); done
i=0
for case in "${cases[@]}"; do
    i=$((i + 1))
    timeout "${1:-240}" python3 "$here/step_time.py" --json "$OUT/case_$i.json" --implementations mosaic_gpu --steps 8 \
        --after ${#cases[@]} --meet "$meet" $case >>"$OUT/rows.txt" 2>"$OUT/case_$i.err" &
done
wait
cut -c1-400 "$OUT/rows.txt"
for f in "$OUT"/case_*.err; do grep -h -E "Error|error:" "$f" | tail -1 | cut -c1-200; done | sort | uniq -c
