"""`python -m mla_jax evaluate`: bits per byte of a text."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax

from mla_jax.cache.formats import kv_format
from mla_jax.cli.common import Model, add_model_options, load_model, progress_bar, table
from mla_jax.decode.evaluate import Score, evaluate
from mla_jax.demo import HELDOUT
from mla_jax.errors import InputError


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("evaluate", help="bits per byte of a text")
    parser.add_argument("file", nargs="?", help="text file; default: the demo model's held-out sample")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="score only the first N bytes of the text")
    parser.add_argument(
        "--against", metavar="FORMAT", help="score with this cache format too, and tell how often both predict the same"
    )
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    for name in (args.kv_format, args.against or "bf16"):
        kv_format(name)  # refuse it before loading anything
    if args.max_bytes is not None and args.max_bytes < 1:
        raise InputError(f"--max-bytes must be at least 1, got {args.max_bytes}.")
    path = HELDOUT if args.file is None else Path(args.file)
    try:
        data = path.read_bytes()[: args.max_bytes]
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        raise InputError(f"{path} cannot be read ({getattr(e, 'strerror', e)}).") from None
    model = load_model(args)
    tokens = model.tokenizer.encode(data.decode("utf-8", errors="surrogateescape"))
    started = time.perf_counter()
    score = _score(args, model, tokens, len(data), args.kv_format)
    compared = {}
    if args.against is not None:
        other = _score(args, model, tokens, len(data), args.against)
        compared = {
            "top1_agreement": round(score.top1_agreement(other), 5),
            "against": kv_format(args.against).name,
            "bits_per_byte_against": round(other.bits_per_byte, 4),
        }
    report = {
        "bits_per_byte": round(score.bits_per_byte, 4),
        "bits_per_token": round(score.bits_per_token, 4),
        **compared,
        "scored_tokens": score.scored_tokens,
        "windows": score.windows,
        "text": path.name,
        "model": model.name,
        "device": jax.devices()[0].device_kind,
        "kv_format": kv_format(args.kv_format).name,
        "kv_bytes_per_token": kv_format(args.kv_format).bytes_per_token(model.config.latent_dim),
        "implementation": score.implementation,
        "seconds": round(time.perf_counter() - started, 2),
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(table({name.replace("_", " "): str(value) for name, value in report.items()}))


def _score(args: argparse.Namespace, model: Model, tokens: list[int], num_bytes: int, name: str) -> Score:
    return evaluate(
        model.params,
        model.config,
        tokens,
        num_bytes / max(len(tokens), 1),
        kv_format=name,
        implementation=args.implementation,
        progress=lambda batches: progress_bar(batches, unit="batch"),
    )
