"""`python -m mla_jax evaluate`: bits per byte of a text."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

from mla_jax.cache.formats import kv_format
from mla_jax.cli.common import (
    Model,
    add_model_options,
    add_speculation_options,
    check_cache_options,
    load_model,
    progress_bar,
    speculation_of,
    table,
    waiting,
)
from mla_jax.decode.accept import accept_length
from mla_jax.decode.evaluate import Score, evaluate
from mla_jax.demo import HELDOUT
from mla_jax.errors import InputError
from mla_jax.speculative.config import Speculation


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("evaluate", help="bits per byte of a text")
    parser.add_argument("file", nargs="?", help="text file; default: the demo model's held-out sample")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="score only the first N bytes of the text")
    parser.add_argument(
        "--against",
        metavar="FORMAT",
        help="score with this cache format too, queries unrounded, and tell how often both predict the same",
    )
    add_model_options(parser)
    add_speculation_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    check_cache_options(args)  # before loading anything
    kv_format(args.against or "bf16")
    if args.max_bytes is not None and args.max_bytes < 1:
        raise InputError(f"--max-bytes must be at least 1, got {args.max_bytes}.")
    speculation = speculation_of(args)
    path = HELDOUT if args.file is None else Path(args.file)
    try:
        data = path.read_bytes()[: args.max_bytes]
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        raise InputError(f"{path} cannot be read ({getattr(e, 'strerror', e)}).") from None
    model = load_model(args)
    tokens = model.tokenizer.encode(data.decode("utf-8", errors="surrogateescape"))
    started = time.perf_counter()
    drafts = {} if speculation is None else _accept_lengths(args, model, tokens, speculation)
    score = _score(args, model, tokens, len(data), args.kv_format, args.fp8_queries)
    compared = {}
    if args.against is not None:
        other = _score(args, model, tokens, len(data), args.against, fp8_queries=False)
        compared = {
            "top1_agreement": round(score.top1_agreement(other), 5),
            "against": kv_format(args.against).name,
            "bits_per_byte_against": round(other.bits_per_byte, 4),
        }
    report = {
        "bits_per_byte": round(score.bits_per_byte, 4),
        "bits_per_token": round(score.bits_per_token, 4),
        **compared,
        **drafts,
        "scored_tokens": score.scored_tokens,
        "windows": score.windows,
        "text": path.name,
        "model": model.name,
        "device": jax.devices()[0].device_kind,
        "kv_format": kv_format(args.kv_format).name,
        "fp8_queries": args.fp8_queries,
        "kv_bytes_per_token": kv_format(args.kv_format).bytes_per_token(model.config.latent_dim),
        "implementation": score.implementation,
        "seconds": round(time.perf_counter() - started, 2),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(table({name.replace("_", " "): str(value) for name, value in report.items()}))


def _accept_lengths(
    args: argparse.Namespace, model: Model, tokens: list[int], speculation: Speculation
) -> dict[str, Any]:
    """Tokens committed per step with drafts, greedy and at temperature 1."""
    found: dict[str, Any] = {"draft_steps": speculation.steps}
    for suffix, temperature in (("", 0.0), ("_t1", 1.0)):
        with waiting(f"Drafting at temperature {temperature:g}"):
            result = accept_length(
                model.params,
                model.config,
                tokens,
                speculation,
                temperature=temperature,
                kv_format=args.kv_format,
                fp8_queries=args.fp8_queries,
                implementation=args.implementation,
            )
        found[f"accept_length{suffix}"] = round(result.mean, 4)
        found[f"accept_histogram{suffix}"] = {str(n): times for n, times in result.histogram.items()}
    return found


def _score(
    args: argparse.Namespace, model: Model, tokens: list[int], num_bytes: int, name: str, fp8_queries: bool
) -> Score:
    return evaluate(
        model.params,
        model.config,
        tokens,
        num_bytes / max(len(tokens), 1),
        kv_format=name,
        fp8_queries=fp8_queries,
        implementation=args.implementation,
        progress=lambda batches: progress_bar(batches, unit="batch"),
    )
