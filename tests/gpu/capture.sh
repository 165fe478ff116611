#!/bin/bash
# Proof that XLA captures the decode step, and its times with capture on and off; results under $OUT.
: "${OUT:?must name a folder for results}"; mkdir -p "$OUT"
here=$(dirname "$0")
dump=$(mktemp -d)
XLA_FLAGS="--xla_dump_to=$dump --xla_dump_hlo_module_re=.*decode_step.*" \
    timeout 200 python3 "$here/step_time.py" --json "$OUT/capture_on.json" --schedule "$@" 2>"$OUT/on.err"
for f in "$dump"/*thunk_sequence*; do
    echo "$(basename "$f"): $(grep -c kCommandBuffer "$f") command buffers of $(grep -vc '^ *$' "$f") lines"
done | tee "$OUT/thunks.txt"
ls "$dump" | sed 's/^module_[0-9]*//' | sort | uniq -c | sort -rn | head -20 >"$OUT/dump_files.txt"
f=$(ls "$dump"/*thunk_sequence* | head -1); [ -n "$f" ] && head -c 20000 "$f" >"$OUT/thunks_example.txt"
XLA_FLAGS="--xla_gpu_enable_command_buffer=" \
    timeout 200 python3 "$here/step_time.py" --json "$OUT/capture_off.json" "$@" 2>"$OUT/off.err"
grep -v -i warn "$OUT/on.err" | tail -8 | cut -c1-400
grep -v -i warn "$OUT/off.err" | tail -8 | cut -c1-400
