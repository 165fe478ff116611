"""Fills the generated parts of README.md from code and committed results: `make readme`.

A part stands between `<!-- made: NAME -->` and `<!-- end -->`. `tests/test_readme.py` fails where one is out of date.
"""

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from scripts.cpu_tables import cpu, demo_bits, fp8, fp8_limit
from scripts.gpu_tables import checked, drafts, end_to_end, flash_mla, gpu_bits, query_steps, stack, step
from scripts.kernel_table import kernels
from scripts.support import support

README = Path(__file__).parents[1] / "README.md"
PART = re.compile(r"(<!-- made: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
WIDTH = 120  # of a line of prose
MAKERS = (
    support,
    kernels,
    step,
    drafts,
    stack,
    end_to_end,
    flash_mla,
    checked,
    fp8,
    fp8_limit,
    gpu_bits,
    query_steps,
    demo_bits,
    cpu,
)
PARTS: dict[str, Callable[[], str]] = {maker.__name__: maker for maker in MAKERS}


def filled(text: str) -> str:
    """The README with its parts made anew. Raises KeyError for a part that nothing makes."""
    return PART.sub(lambda found: f"{found[1]}{_wrapped(PARTS[found[2]]())}\n{found[4]}", text)


def without_parts(text: str) -> str:
    """What is written by hand."""
    return PART.sub("", text)


def _wrapped(text: str) -> str:
    return "\n".join(line if line.startswith("|") else _wrap(line) for line in text.splitlines())


def _wrap(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """The exit code."""
    README.write_text(filled(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
