#!/bin/bash
# FlashMLA through JAX on a GPU machine in one go; results and logs under $OUT. `flash_mla.sh correct time` runs both
# parts; SHORT=SECONDS ends the first after that long, without the command check.
: "${OUT:?must name a folder for results}"; mkdir -p "$OUT"
here=$(dirname "$0")
log=$(mktemp -d)
run_tests() { timeout 100 python3 -m pytest -q --noconftest -o filterwarnings= -p no:cacheprovider --timeout 60 "$here/test_flash_mla.py" "$@"; }
correct() {
    run_tests -n 6 >"$OUT/tests.txt" 2>&1 &
    timeout 90 python3 "$here/flash_mla_in_graph.py" replay "$OUT/replay.json" >"$log/replay.txt" 2>&1 &
    timeout 90 python3 "$here/flash_mla_in_graph.py" shared "$OUT/shared.json" >"$log/shared.txt" 2>&1 &
    [ -n "$SHORT" ] || timeout 100 python3 -m mla_jax check --against flash_mla,torch,transformers --json >"$OUT/check.json" \
        2>"$log/check.txt" &
    [ -n "$SHORT" ] || timeout 100 python3 -m mla_jax check --quick --json >"$OUT/check_quick.json" 2>>"$log/check.txt" &
    if [ -n "$SHORT" ]; then sleep "$SHORT"; kill $(jobs -p) 2>/dev/null; fi
    wait
    tail -40 "$OUT/tests.txt" | cut -c1-220
    for f in replay shared check; do echo "== $f"; tail -4 "$log/$f.txt" | cut -c1-700; done
    python3 - "$OUT/check.json" "$OUT/check_quick.json" <<'P'
import json, os, sys
for name in sys.argv[1:]:
    lines = open(name).read().splitlines() if os.path.exists(name) else []
    if not lines:
        print(name, "is empty")
        continue
    report = json.loads(lines[-1])
    print(name, {k: report[k] for k in ("ok", "pass", "fail", "skip", "seconds")})
    for row in [r for r in report["rows"] if r["status"] == "fail"][:12]:
        print({k: row[k] for k in ("case", "implementation", "reason", "errors")})
P
}
time_all() {
    timeout 70 python3 "$here/flash_mla_in_graph.py" overhead "$OUT/overhead.json" 2>"$log/overhead.txt" | cut -c1-300
    XLA_FLAGS=--xla_gpu_enable_command_buffer= \
        timeout 60 python3 "$here/flash_mla_in_graph.py" overhead "$OUT/overhead.json" 2>>"$log/overhead.txt" | cut -c1-300
    tail -3 "$log/overhead.txt" | cut -c1-500
}
for part in "$@"; do
    case $part in correct) correct ;; time) time_all ;; esac
done
