#!/bin/bash
# Tests and benchmarks on a GPU machine in one go: `smoke.sh SECONDS_FOR_TESTS CASE...`; logs and rows.jsonl under $OUT.
# The cases compile beside the tests and measure after them, in turn. OTHERS: more configurations to compare.
limit=$1; shift
lock=/tmp/gpu.lock
export PYTHONPATH=$PYTHONPATH:$PWD/tests/attention/mosaic_gpu
flock $lock timeout "$limit" python3 -m pytest -q -n 8 --noconftest -o filterwarnings= -p no:cacheprovider \
    tests/gpu/test_mosaic_gpu.py -m "${MARK:-not full}" --timeout 60 >"$OUT/tests.txt" 2>&1 &
sleep 2
number=0
for case in "$@"; do
    number=$((number + 1))
    echo "$case --rounds ${ROUNDS:-9} --lock $lock ${OTHERS:---config left_last:held_back=3} --json /tmp/row$number.json"
done | xargs -P 8 -L 1 timeout 140 python3 tests/gpu/against_flash_mla.py >>"$OUT/rows.txt" 2>>"$OUT/errors.txt"
wait
cat /tmp/row*.json >"$OUT/rows.jsonl"
tail -30 "$OUT/tests.txt" | cut -c1-300
grep -v -i warn "$OUT/errors.txt" | tail -15 | cut -c1-300
cat "$OUT/rows.txt"
