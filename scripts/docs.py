"""The API reference as HTML: `python scripts/docs.py FOLDER`. A warning of pdoc's is an error."""

import sys
import warnings
from pathlib import Path

import pdoc

MODULES = ("mla_jax", "mla_jax.model", "mla_jax.demo", "flash_mla_jax")


def main(folder: str) -> int:
    """The exit code."""
    warnings.simplefilter("error")
    pdoc.render.configure(docformat="google", math=True, search=False, footer_text="mla_jax")
    pdoc.pdoc(*MODULES, output_directory=Path(folder))
    print(f"{folder}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
