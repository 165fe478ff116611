"""`python -m mla_jax COMMAND`. Users' errors end with exit code 2 and one sentence on stderr."""

import argparse
import io
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from mla_jax import __version__
from mla_jax.cli import bench, calibrate, check, evaluate, generate, info, schedule
from mla_jax.errors import InputError


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        self.exit(2, f"{self.prog.replace('python -m ', '')}: {message}; see --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    parser = _Parser(prog="python -m mla_jax", description="MLA decode for JAX.")
    parser.add_argument("--version", action="version", version=f"mla_jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (generate, evaluate, calibrate, check, info, schedule, bench):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a prompt or text may hold what the terminal cannot show
    try:
        args.run(args)
        sys.stdout.flush()
    except (InputError, NotImplementedError) as e:
        print(f"mla_jax {args.command}: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        print(f"mla_jax {args.command}: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _keep_compiled() -> None:
    """Keeps what XLA compiles for the next run, unless JAX's own settings say where, or not to.

    Per machine, since executables for a CPU hold its instructions.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "mla_jax" / (platform.node() or "this machine")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return  # a home that cannot be written to
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


if __name__ == "__main__":
    _keep_compiled()
    sys.exit(main())
