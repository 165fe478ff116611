"""The next tokens that the decode step chooses with the Hopper kernel and with "xla": `same_tokens.py --json FILE`.

All are fed what "xla" chose, so that every choice is made behind the same tokens, over a cache that the model wrote
(prompts of held-out text for the demo model, random ones for a stack of DeepSeek-V3's attention with random weights,
whose logits lie close together). The best two logits are now and then as near as bf16 numbers can be, or equal, and any
other rounding decides for the other. So others that are right too show how much rounding does ("xla" with smaller
chunks, "reference"), and the same step with the weights widened to float32 who is nearer to what all of them mean.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import forced
import jax
import jax.numpy as jnp
import numpy as np
import stack

from mla_jax.decode.state import DecodeState
from mla_jax.demo import HELDOUT
from mla_jax.model.transformer import prefill

DEFAULT = ("xla", "mosaic_gpu", forced.SMALL_CHUNKS, "reference")
CONTROLS = (forced.SMALL_CHUNKS, "reference", "xla")  # whose difference from the first is rounding
TRUTH = "float32"


@dataclass
class Model:
    """One of the models, its executables on their way.

    Attributes:
        start: all slots running, prompts of zeros in the cache.
        prompts: int32 `[b, context + 1]`; the last token is what the first step is fed.
        steps: by implementation, and that of the truth.
        refused: why an implementation cannot run here, or failed.
    """

    name: str
    config: Any
    params: Any
    wide_params: Any
    start: DecodeState
    prompts: jax.Array
    prefill: Future[Any]
    steps: dict[str, Future[Any]]
    refused: dict[str, str]


@dataclass(frozen=True)
class Run:
    """Tokens that one would choose `[steps, b]`, and logits `[steps, b, vocab]`."""

    tokens: np.ndarray
    logits: np.ndarray


def main() -> None:
    """Prints a row per model and implementation, and writes all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=("demo", "v3"), default=["demo", "v3"])
    parser.add_argument("--layers", type=int, default=27, help="of v3")
    parser.add_argument("--heads", type=int, default=128, help="of v3")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument(
        "--implementations",
        type=lambda text: text.split(","),
        default=list(DEFAULT),
        help="the first chooses the tokens; default: " + ",".join(DEFAULT),
    )
    args = parser.parse_args()
    forced.add_small_chunks()
    rows = []
    with ThreadPoolExecutor() as pool:  # XLA compiles outside Python's lock
        models = [begin(name, args, pool) for name in args.models]
        for model in models:
            for row in measure(model, args):
                rows.append(row)
                print(json.dumps(row), flush=True)
    report = {
        "command": " ".join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "rows": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


def begin(name: str, args: argparse.Namespace, pool: ThreadPoolExecutor) -> Model:
    """The model, and everything lowered and being compiled."""
    config, params = stack.demo() if name == "demo" else _v3(args)
    wide_params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    start = stack.running_state(config, params, args.slots, args.context, args.steps + 1, "bf16")
    prompts = _text(args) if name == "demo" else _random(args, config.vocab_size)
    lowered = partial(jax.jit, static_argnums=1, donate_argnums=6)(prefill).lower(
        params, config, prompts[:, :-1], *_lengths(args), start.pool.block_table, start.cache
    )
    model = Model(name, config, params, wide_params, start, prompts, pool.submit(lowered.compile), {}, {})
    for implementation in args.implementations:
        try:
            step = forced.lower(params, start, config, implementation)
            model.steps[implementation] = pool.submit(step.compile)
        except NotImplementedError as e:
            model.refused[implementation] = str(e)
    model.steps[TRUTH] = pool.submit(forced.lower(wide_params, start, config, "reference").compile)
    return model


def measure(model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row per implementation: how it differs from the first, and from float32."""
    runs = _run_all(model, args)
    truth, first = runs.pop(TRUTH), runs[args.implementations[0]]
    about = {"model": model.name, "layers": model.config.num_layers, "heads": model.config.num_heads}
    about |= {"slots": args.slots, "context": args.context, "steps": args.steps, "fed": args.implementations[0]}
    controls = [runs[name] for name in CONTROLS if name in runs and runs[name] is not first]
    rounding = max((largest_difference(run, first) for run in controls), default=0.0)
    for name in args.implementations:
        if name in model.refused:
            yield about | {"implementation": name, "skipped": model.refused[name]}
            continue
        yield about | {"implementation": name} | compare(runs[name], first, truth, rounding)


def _run_all(model: Model, args: argparse.Namespace) -> dict[str, Run]:
    cache = jax.tree.map(lambda x: x.copy(), model.start.cache)
    _, cache = model.prefill.result()(
        model.params, model.prompts[:, :-1], *_lengths(args), model.start.pool.block_table, cache
    )
    start = replace(model.start, cache=cache, last_tokens=model.prompts[:, -1])
    runs: dict[str, Run] = {}
    for name, step in model.steps.items():  # the first of args.implementations is the first here
        params = model.wide_params if name == TRUTH else model.params
        tokens = next(iter(runs.values())).tokens if runs else None
        try:
            runs[name] = Run(*forced.run(step.result(), params, start, args.steps, tokens))
        except Exception as e:
            if name in (TRUTH, args.implementations[0]):  # what the others are compared with
                raise
            model.refused[name] = f"{type(e).__name__}: {e}"[:500]
    return runs


def compare(run: Run, first: Run, truth: Run, rounding: float) -> dict[str, Any]:
    """Counts of choices, and the largest numbers.

    A disagreement is beyond rounding if the first's two best logits differ by more than twice the largest difference
    that rounding makes: each of them can move by it.
    """
    gaps, true_gaps = gaps_of(first), gaps_of(truth)
    differ, wrong = run.tokens != first.tokens, run.tokens != truth.tokens
    error = run.logits - truth.logits
    return {
        "choices": differ.size,
        "different_tokens": len(np.unique(first.tokens)),
        "ties": int((gaps == 0).sum()),
        "median_gap": _short(np.median(gaps)),
        "disagreements": int(differ.sum()),
        "largest_gap_at_disagreement": _largest(gaps[differ]),
        "largest_float32_gap_at_disagreement": _largest(true_gaps[differ]),
        "disagreements_beyond_rounding": int((differ & (gaps > 2 * rounding)).sum()),
        "largest_logit_difference": _short(largest_difference(run, first)),
        "rms_logit_difference": _short(np.sqrt(np.mean(np.square(run.logits - first.logits)))),
        "largest_of_controls": _short(rounding),
        "from_float32": {
            "disagreements": int(wrong.sum()),
            "largest_gap_at_disagreement": _largest(true_gaps[wrong]),
            "largest_logit_difference": _short(np.abs(error).max()),
            "rms_logit_difference": _short(np.sqrt(np.mean(np.square(error)))),
        },
    }


def gaps_of(run: Run) -> np.ndarray:
    """Between the two best logits: `[steps, b]`."""
    best = np.partition(run.logits, -2, axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]


def largest_difference(run: Run, other: Run) -> float:
    """Of any logit."""
    return float(np.abs(run.logits - other.logits).max())


def _v3(args: argparse.Namespace) -> tuple[Any, Any]:
    config = stack.v3_config(args.layers, args.heads)
    return config, stack.v3_params(config)


def _text(args: argparse.Namespace) -> jax.Array:
    text, length = np.frombuffer(HELDOUT.read_bytes(), np.uint8), args.context + 1
    starts = np.arange(args.slots) * ((len(text) - length) // args.slots)
    return jnp.asarray(np.stack([text[s : s + length] for s in starts]), jnp.int32)


def _random(args: argparse.Namespace, vocab_size: int) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (args.slots, args.context + 1), 0, vocab_size, jnp.int32)


def _lengths(args: argparse.Namespace) -> tuple[jax.Array, jax.Array]:
    """Tokens of each prompt, and those before them."""
    return jnp.full((args.slots,), args.context, jnp.int32), jnp.zeros((args.slots,), jnp.int32)


def _largest(values: np.ndarray) -> float | None:
    return _short(values.max()) if values.size else None


def _short(value: Any) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
