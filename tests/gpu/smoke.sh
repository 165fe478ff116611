#!/bin/bash
# Tests and benchmarks on a GPU machine in one go: `smoke.sh SECONDS_FOR_TESTS CASE...`; logs under $OUT.
limit=$1; shift
lock=/tmp/gpu.lock
export PYTHONPATH=$PYTHONPATH:$PWD/tests/attention/mosaic_gpu
flock $lock timeout "$limit" python3 -m pytest -q -x -n 6 --noconftest -o filterwarnings= -p no:cacheprovider \
    tests/gpu/test_mosaic_gpu.py -m "not full" --timeout 45 >"$OUT/tests.txt" 2>&1 &
sleep 2
for case in "$@"; do
    extra=""
    case $case in *b128_h128_s1_4k~ | *b128_h16_s1_4k~) extra=" --config held0:held_back=0 --config tiles7:register_tiles=7" ;; esac
    echo "$case --rounds 5 --lock $lock$extra"
done | xargs -P 7 -L 1 timeout 140 python3 tests/gpu/against_flash_mla.py >>"$OUT/rows.txt" 2>>"$OUT/errors.txt"
wait
tail -30 "$OUT/tests.txt" | cut -c1-300
grep -v -i warn "$OUT/errors.txt" | tail -15 | cut -c1-300
cat "$OUT/rows.txt"
