"""What the commands share: loading a model, options, and how they report."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from mla_jax.attention.api import IMPLEMENTATIONS
from mla_jax.cache.formats import FORMATS, kv_format
from mla_jax.config import MLAConfig
from mla_jax.demo import CHECKPOINT
from mla_jax.errors import InputError
from mla_jax.model.attend import check_fp8_queries
from mla_jax.model.load import load_checkpoint
from mla_jax.model.params import ModelParams
from mla_jax.speculative.config import Speculation
from mla_jax.tokenizer import Tokenizer, load_tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint with its tokenizer."""

    name: str
    config: MLAConfig
    params: ModelParams
    tokenizer: Tokenizer


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --json."""
    parser.add_argument("--model", metavar="DIR", help="DeepSeek checkpoint folder; default: the demo model")
    parser.add_argument(
        "--dtype",
        choices=("auto", *DTYPES),
        default="auto",
        help="of the weights; auto is float32 on a CPU and bfloat16 elsewhere",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line of stdout")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --dtype, --kv-format, --fp8-queries, --implementation, --json; see `check_cache_options`."""
    add_checkpoint_options(parser)
    parser.add_argument(
        "--kv-format", default="bf16", metavar="FORMAT", help=f"of the cache: {', '.join(FORMATS)}; default bf16"
    )
    parser.add_argument(
        "--fp8-queries",
        action="store_true",
        help="decode with queries in e4m3 too, half the products for logits on a Hopper GPU; with --kv-format fp8_e4m3",
    )
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help=f"of mla_decode: {', '.join(IMPLEMENTATIONS)}; default: the fastest that can run",
    )


def check_cache_options(args: argparse.Namespace) -> None:
    """Raises ValueError for an unknown cache format, or one that queries in e4m3 do not go with."""
    kv_format(args.kv_format)
    check_fp8_queries(args.fp8_queries, args.kv_format)


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """How many tokens a step drafts; see `speculation_of`."""
    parser.add_argument(
        "--mtp-steps",
        type=int,
        metavar="N",
        help="draft N tokens ahead with the model's multi-token-prediction module; default: no drafts",
    )
    parser.add_argument(
        "--mtp-topk", type=int, default=1, metavar="K", help="tokens a draft branches into; default 1: a chain"
    )
    parser.add_argument(
        "--mtp-draft-tokens",
        type=int,
        metavar="M",
        help="nodes that are verified at once, with the root; default N + 1 for a chain, 1 + N·K for a tree",
    )


def speculation_of(args: argparse.Namespace) -> Speculation | None:
    """What the options ask for. Raises ValueError in one sentence."""
    if args.mtp_steps is None:
        if args.mtp_topk != 1 or args.mtp_draft_tokens is not None:
            raise InputError("--mtp-topk and --mtp-draft-tokens need --mtp-steps N, the tokens to draft ahead.")
        return None
    nodes = 1 + args.mtp_steps * args.mtp_topk if args.mtp_draft_tokens is None else args.mtp_draft_tokens
    return Speculation(args.mtp_steps, args.mtp_topk, nodes)


def load_model(args: argparse.Namespace, *, kv_scales: bool = True) -> Model:
    """The checkpoint that the options name. Raises ValueError in one sentence if it cannot be loaded."""
    folder = CHECKPOINT if args.model is None else Path(args.model)
    on_cpu = jax.default_backend() == "cpu"
    dtype = (jnp.float32 if on_cpu else jnp.bfloat16) if args.dtype == "auto" else DTYPES[args.dtype]
    config, params = load_checkpoint(folder, dtype, kv_scales=kv_scales)
    name = "demo" if args.model is None else folder.name
    return Model(name, config, params, load_tokenizer(folder, config.vocab_size))


def progress_bar(iterable: Iterable[Any], **options: Any) -> Iterable[Any]:
    """A progress bar on stderr, hidden when that is no terminal."""
    return tqdm(iterable, file=sys.stderr, disable=None, leave=False, **options)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[], None]]:
    """Says on a terminal's stderr what one waits for, until the function it yields is called or the block ends."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(what)
        sys.stderr.flush()

    def done() -> None:
        nonlocal shown
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        shown = False

    try:
        yield done
    finally:
        done()


def parse_bytes(text: str) -> int:
    """A number of bytes: 1000000, 64MiB, 1.5GiB, 64M. Raises ValueError in one sentence."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if not match:
        raise InputError(f"{text!r} is no number of bytes; write it as 1000000, 64MiB or 1.5GiB.")
    return int(float(match[1]) * 1024 ** (" kmgt".index(match[2]) if match[2] else 0))


def check_can_write(file: str | Path, option: str) -> None:
    """Raises ValueError if a file of this name cannot be made: before the work whose result it is to hold."""
    path = Path(file)
    try:
        fine = path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()
    except ValueError:  # a null byte
        fine = False
    if not fine:
        raise InputError(f"{file} cannot be written; name a file in a folder that can with {option}.")


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of distributions by name; None where one is not installed."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def physical_memory() -> int:
    """Bytes of this machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def table(rows: dict[str, str]) -> str:
    """Two aligned columns."""
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())
