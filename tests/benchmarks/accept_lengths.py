"""Tokens that the demo model commits per step when it drafts: `make bench-drafts [ARGS="--json FILE"]`.

64 prompts of the held-out sample, 128 new tokens each, weights in float32, for the drafts that README.md speaks of.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from mla_jax import Speculation, load_checkpoint
from mla_jax.decode.accept import accept_length
from mla_jax.demo import CHECKPOINT, HELDOUT

DRAFTS = {"1-1-2": Speculation.chain(1), "3-1-4": Speculation.chain(3), "3-4-8": Speculation(3, 4, 8)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the results to this file")
    args = parser.parse_args()
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    text = list(HELDOUT.read_bytes())
    rows = []
    for draft, speculation in DRAFTS.items():
        for temperature in (0.0, 1.0):
            found = accept_length(params, config, text, speculation, temperature=temperature)
            histogram = {str(n): times for n, times in found.histogram.items()}
            row = {"draft": draft, "temperature": temperature, "accept_length": found.mean, "histogram": histogram}
            rows.append(row)
            print(f"  {draft} at temperature {temperature}: {found.mean:.4f} tokens per step, {histogram}", flush=True)
    result = {
        "command": " ".join(["python tests/benchmarks/accept_lengths.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": rows,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
