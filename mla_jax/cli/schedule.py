"""`python -m mla_jax schedule`: how the decode work of a batch is divided over a GPU."""

import argparse
import json
import sys
from typing import Any

from mla_jax.attention.mosaic_gpu.config import KernelConfig
from mla_jax.errors import InputError
from mla_jax.explain import explain, plot
from mla_jax.schedule import REQUEST_OVERHEAD, num_sm_parts


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("schedule", help="how decode work is divided over a GPU")
    parser.add_argument("--kv-lens", required=True, metavar="N,N,…", help="tokens per request, such as 130,4096,70")
    parser.add_argument("--num-sms", type=int, default=132, metavar="N", help="SMs of the GPU; an H200 has 132")
    parser.add_argument("--num-heads", type=int, default=128, metavar="H", help="query heads; default 128")
    parser.add_argument("--num-queries", type=int, default=1, metavar="S", help="new tokens per request; default 1")
    parser.add_argument(
        "--request-overhead",
        type=int,
        default=KernelConfig().request_overhead,
        metavar="N",
        help="blocks that a request costs beside its own; default %(default)s, as mosaic_gpu divides its work; "
        f"FlashMLA counts {REQUEST_OVERHEAD}",
    )
    parser.add_argument("--all", action="store_true", help="show every working part")
    parser.add_argument("--plot", metavar="FILE", help="draw it too: .png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    for option in ("num_sms", "num_heads", "num_queries", "request_overhead"):
        if getattr(args, option) < 1:
            raise InputError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(args, option)}.")
    parts = num_sm_parts(args.num_sms, args.num_queries, args.num_heads)
    explanation = explain(_lengths(args.kv_lens), parts, args.request_overhead)
    if args.plot is not None:
        print(f"Picture written to {plot(explanation, args.plot)}", file=sys.stderr)
    if args.json:
        pieces = [vars(piece) for piece in explanation.pieces]
        print(json.dumps({**explanation.summary(), "load": explanation.load, "pieces": pieces}))
    else:
        print(explanation.text(args.all))


def _lengths(text: str) -> list[int]:
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--kv-lens must be numbers with commas, such as 130,4096,70; got {text!r}.") from None
