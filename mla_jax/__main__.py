"""`python -m mla_jax COMMAND`. Users' errors end with exit code 2 and one sentence on stderr."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from mla_jax.cli import evaluate, generate, info, schedule
from mla_jax.errors import InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mla_jax", description="MLA decode for JAX.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (generate, evaluate, info, schedule):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    try:
        args.run(args)
        sys.stdout.flush()
    except (InputError, NotImplementedError) as e:
        print(f"mla_jax {args.command}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
