"""Greedy tokens of the captured decode step with the Hopper kernel and with "xla": `same_tokens.py --json FILE`.

The demo model, and 27 layers of DeepSeek-V3's attention with random weights, whose logits lie close together. Slots
begin with different tokens, behind a cache of random latents.
"""

import argparse
import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import stack

from mla_jax.decode.step import decode_step

BATCH, CONTEXT, STEPS = 8, 300, 64
IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def main() -> None:
    """Prints a row per model and writes all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=27)
    args = parser.parse_args()
    rows = []
    for name, make in {"demo": stack.demo, "v3": lambda: stack.v3_stack(args.layers)}.items():
        config, params = make()
        tokens = {implementation: run(config, params, implementation) for implementation in IMPLEMENTATIONS}
        equal = tokens["xla"] == tokens["mosaic_gpu"]
        rows.append(
            {
                "model": name,
                "layers": config.num_layers,
                "heads": config.num_heads,
                "slots": BATCH,
                "tokens_each": STEPS,
                "different_tokens": len(np.unique(tokens["xla"])),
                "equal_slots": int(equal.all(axis=1).sum()),
                "equal_before_the_first_difference": [int(row.argmin()) if not row.all() else STEPS for row in equal],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
        del params
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def run(config: Any, params: Any, implementation: str) -> np.ndarray:
    """Tokens of every slot: [BATCH, STEPS]."""
    state = stack.running_state(config, params, BATCH, CONTEXT, STEPS + 1, "bf16")
    keys = jax.random.split(jax.random.key(1), len(state.cache.layers))
    layers = tuple(
        jax.random.normal(key, layer.shape, layer.dtype) for key, layer in zip(keys, state.cache.layers, strict=True)
    )
    state = replace(
        state,
        cache=replace(state.cache, layers=layers),
        last_tokens=jnp.arange(1, BATCH + 1, dtype=jnp.int32) * (config.vocab_size // (BATCH + 1)),
    )
    slots = jnp.arange(BATCH, dtype=jnp.int32)
    found = []
    for _ in range(STEPS):
        state, emitted = decode_step(
            params, state, slots, config=config, greedy=True, implementation=implementation, steps=1
        )
        found.append(emitted.tokens)
    return np.asarray(jnp.concatenate(found, axis=1))


if __name__ == "__main__":
    main()
