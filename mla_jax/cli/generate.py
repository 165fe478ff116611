"""`python -m mla_jax generate`: continue one prompt, or a file of prompts together."""

import argparse
import json
import re
import sys
from collections.abc import Callable
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
    parse_bytes,
    physical_memory,
    progress_bar,
    speculation_of,
    table,
    waiting,
)
from mla_jax.config import MLAConfig
from mla_jax.decode.generate import Generation, OnTokens, Settings, generate
from mla_jax.decode.sampling import Sampling
from mla_jax.errors import InputError
from mla_jax.model.cache import page_bytes
from mla_jax.tokenizer import ByteTokenizer

DEFAULT_PROMPT = "ROMEO: "


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser("generate", help="continue prompts")
    parser.add_argument("prompt", nargs="*", help=f"one or more prompts; default: {DEFAULT_PROMPT!r}")
    parser.add_argument(
        "--prompt",
        dest="more_prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; may be given several times",
    )
    parser.add_argument("--prompts", "--prompt-file", metavar="FILE", help="a file with one prompt per line")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt; default 128")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K best; 0, the default: all")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the best tokens that together have probability P; default 1: all",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--stop-bytes",
        default="",
        metavar="TEXT",
        help=r"end at any of these characters; \n, \t and \xHH are understood; default: none",
    )
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="prompts that are decoded together at the most, the others join as these end; default 64",
    )
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--pages",
        type=int,
        metavar="N",
        help="pages of 64 tokens in the pool; default: what the prompts and new tokens need",
    )
    pool.add_argument("--cache-bytes", metavar="N", help="size of the pool instead, such as 64MiB, all layers")
    add_speculation_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    prompts = _prompts(args)
    for name in ("pages", "slots"):
        number = getattr(args, name)
        if number is not None and number < 1:
            raise InputError(f"--{name} must be at least 1, got {number}.")
    sampling = Sampling.create(args.temperature, args.top_k, args.top_p)
    check_cache_options(args)  # before loading anything
    speculation = speculation_of(args)
    model = load_model(args)
    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        seed=args.seed,
        stop_tokens=_stop_tokens(args.stop_bytes, model),
        kv_format=args.kv_format,
        fp8_queries=args.fp8_queries,
        num_slots=args.slots,
        num_pages=_num_pages(args, model.config),
        implementation=args.implementation,
        speculation=speculation,
    )
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    with waiting("prefill and compilation …") as done:
        show = _show_progress(prompts, model, settings, args.json, done)
        result = generate(model.params, model.config, ids, settings, show)
    report = _report(prompts, model, settings, result)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report, result)


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [*args.prompt, *args.more_prompts]
    if args.prompts is not None:
        try:
            text = Path(args.prompts).read_text(encoding="utf-8", errors="surrogateescape")
        except (OSError, ValueError) as e:  # ValueError: a name with a null byte
            raise InputError(f"{args.prompts} cannot be read ({getattr(e, 'strerror', e)}).") from None
        lines = [line for line in text.split("\n") if line]
        prompts += lines
        if not lines:
            raise InputError(f"{args.prompts} holds no prompt; write one per line.")
    return prompts or [DEFAULT_PROMPT]


def _num_pages(args: argparse.Namespace, config: MLAConfig) -> int | None:
    """Of the pool, with the reserved page; None leaves it to `generate`."""
    per_page = page_bytes(config, args.kv_format, mtp=args.mtp_steps is not None)
    if args.pages is not None:
        num_pages = args.pages + 1
    elif args.cache_bytes is not None:
        num_pages = parse_bytes(args.cache_bytes) // per_page
    else:
        return None
    if jax.default_backend() == "cpu" and num_pages * per_page > physical_memory():
        raise InputError(
            f"A pool of {num_pages - 1} pages takes {num_pages * per_page} bytes, more than this machine's memory of "
            f"{physical_memory()}."
        )
    if num_pages < 2:
        raise InputError(
            f"--cache-bytes {args.cache_bytes} holds no page beside the reserved one; two take {2 * per_page} bytes."
        )
    return num_pages


def _stop_tokens(text: str, model: Model) -> tuple[int, ...]:
    """A token per character; \\xHH is a byte where tokens are bytes, else the character of that number."""
    tokens = []
    for piece in re.findall(r"\\x[0-9a-fA-F]{2}|\\.?|[^\\]", text, re.DOTALL):
        if piece.startswith("\\x") and len(piece) == 4 and isinstance(model.tokenizer, ByteTokenizer):
            tokens.append(int(piece[2:], 16))
            continue
        try:
            character = piece.encode("ascii").decode("unicode_escape") if piece[0] == "\\" else piece
        except UnicodeError as e:
            raise InputError(f"--stop-bytes {text!r} holds a broken escape ({e}).") from None
        ids = model.tokenizer.encode(character)
        if len(ids) != 1:
            raise InputError(f"--stop-bytes: {character!r} is {len(ids)} tokens for this model, and must be one.")
        tokens.append(ids[0])
    return tuple(tokens)


def _show_progress(
    prompts: list[str], model: Model, settings: Settings, quiet: bool, done: Callable[[], None]
) -> OnTokens:
    """Text as it comes for one prompt, a progress bar for several or where stdout is for JSON.

    `done` ends the notice that says what one waits for.
    """
    if len(prompts) == 1 and not quiet:
        push = model.tokenizer.streamer()
        waiting_for = [prompts[0]]

        def show(_: int, tokens: list[int]) -> None:
            done()
            text = "".join(push(t) for t in tokens if t not in settings.stop_tokens)
            sys.stdout.write("".join(waiting_for) + text)
            sys.stdout.flush()
            waiting_for.clear()

        return show
    bar: list[Any] = []

    def count(_: int, tokens: list[int]) -> None:
        if not bar:
            done()
            bar.append(progress_bar((), total=len(prompts) * settings.max_new_tokens, unit="token"))
        bar[0].update(len(tokens))

    return count


def _report(prompts: list[str], model: Model, settings: Settings, result: Generation) -> dict[str, Any]:
    sequences = []
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        shown = [t for t in sequence.tokens if t not in settings.stop_tokens]
        sequences.append(
            {
                "prompt": prompt,
                "text": model.tokenizer.decode(shown),
                "tokens": sequence.tokens,
                "finish_reason": sequence.finish_reason,
            }
        )
    drafts = {}
    if settings.speculation is not None:
        drafts = {
            "accept_length": round(result.accept_length, 4),
            "accept_histogram": {str(n): times for n, times in sorted(result.accept_histogram.items())},
            "draft_steps": settings.speculation.steps,
        }
    return {
        "sequences": sequences,
        "steps": result.steps,
        **drafts,
        "shared_prompt_tokens": result.shared_tokens,
        "tokens_per_second": round(result.tokens_per_second, 1),
        "prefill_seconds": round(result.prefill_seconds, 3),
        "decode_seconds": round(result.seconds, 3),
        "compile_seconds": round(result.compile_seconds, 3),
        "model": model.name,
        "device": jax.devices()[0].device_kind,
        "kv_format": kv_format(settings.kv_format).name,
        "fp8_queries": settings.fp8_queries,
        "kv_bytes_per_token": kv_format(settings.kv_format).bytes_per_token(model.config.latent_dim),
        "layers": model.config.num_layers,
        "implementation": result.implementation,
        "pages": {
            "total": result.pages_total,
            "free_before": result.pages_free_before,
            "used": result.pages_used,
            "free_after": result.pages_free_after,
        },
    }


def _print(report: dict[str, Any], result: Generation) -> None:
    if len(report["sequences"]) > 1:
        for sequence in report["sequences"]:
            print(f"{sequence['prompt']}{sequence['text']}\n[{sequence['finish_reason']}]\n")
    pages, tokens = report["pages"], sum(len(s.tokens) for s in result.sequences)
    returned = pages["free_after"] - (pages["total"] - pages["used"])
    drafts = {}
    if "accept_length" in report:
        often = ", ".join(f"{n}: {times}" for n, times in report["accept_histogram"].items())
        drafts["drafts"] = f"{report['accept_length']:.2f} tokens per step of a sequence (how often how many: {often})"
    print(
        ("\n\n" if len(report["sequences"]) == 1 else "")
        + table(
            {
                "model": f"{report['model']}, {report['layers']} layers, on {report['device']}",
                "attention": f"{report['implementation']}, cache in {report['kv_format']}"
                + (", queries in e4m3" if report["fp8_queries"] else ""),
                "new tokens": f"{tokens} in {report['steps']} steps, {report['decode_seconds']:.2f} s",
                "beside that": f"{report['compile_seconds']:.2f} s to compile, "
                f"{report['prefill_seconds']:.2f} s of prefill",
                "speed": f"{report['tokens_per_second']:.1f} tokens/s",
                **drafts,
                "finished by": ", ".join(sorted({s["finish_reason"] for s in report["sequences"]})),
                "cache": f"{report['kv_bytes_per_token']} bytes per token and layer",
                "pages": f"{pages['used']} used of {pages['total']}, {returned} returned",
            }
        )
    )
