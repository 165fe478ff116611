"""`python -m mla_jax calibrate`: scales for an FP8 latent cache from a text."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mla_jax.cli.common import add_checkpoint_options, check_can_write, load_model, progress_bar, table
from mla_jax.decode.calibrate import calibrate
from mla_jax.demo import CHECKPOINT
from mla_jax.errors import InputError
from mla_jax.model.kv_scales import SCALES_FILE, write_kv_scales


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "calibrate",
        help="scales for an FP8 cache, from a text",
        description="Finds the largest latent of each layer over a text and keeps scales for the cache format "
        f"fp8_e4m3 beside the checkpoint, in {SCALES_FILE}, where the other commands find them.",
    )
    parser.add_argument(
        "--text", required=True, metavar="FILE", help="text like what the model will read; not what it is scored on"
    )
    parser.add_argument("--max-bytes", type=int, metavar="N", help="use only the first N bytes of the text")
    parser.add_argument("--output", metavar="FILE", help=f"default: {SCALES_FILE} in the checkpoint's folder")
    add_checkpoint_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    if args.max_bytes is not None and args.max_bytes < 1:
        raise InputError(f"--max-bytes must be at least 1, got {args.max_bytes}.")
    try:
        data = Path(args.text).read_bytes()[: args.max_bytes]
    except (OSError, ValueError) as e:  # ValueError: a name with a null byte
        raise InputError(f"{args.text} cannot be read ({getattr(e, 'strerror', e)}).") from None
    output = (CHECKPOINT if args.model is None else Path(args.model)) / SCALES_FILE
    output = output if args.output is None else Path(args.output)
    model = load_model(args, kv_scales=False)  # damaged ones are replaced
    check_can_write(output, "--output")  # before the long part
    started = time.perf_counter()
    found = calibrate(
        model.params,
        model.config,
        model.tokenizer.encode(data.decode("utf-8", errors="surrogateescape")),
        progress=lambda batches: progress_bar(batches, unit="batch"),
    )
    seconds = time.perf_counter() - started
    about = {"text": Path(args.text).name, "tokens": found.tokens, "model": model.name}
    write_kv_scales(output, found.scales, **about)
    report = {
        "scales": [float(scale) for scale in np.asarray(found.scales)],
        "largest": [float(value) for value in np.asarray(found.largest)],
        "layers": model.config.num_layers,
        "mtp_layers": model.config.num_mtp_layers,
        **about,
        "output": str(output),
        "device": jax.devices()[0].device_kind,
        "seconds": round(seconds, 2),
    }
    if args.json:
        print(json.dumps(report))
    else:
        lists = {name: "  ".join(f"{v:.4g}" for v in report[name]) for name in ("scales", "largest")}
        print(table({name.replace("_", " "): str(value) for name, value in (report | lists).items()}))
