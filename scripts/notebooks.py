"""Executes notebooks/*.py and writes the paired .ipynb beside each: `python scripts/notebooks.py [NAME…]`.

NAME is a part of a notebook's name; none means all of them. Ends with the first error, whose notebook is not written.
What a second run would change for no reason (cell ids, times, versions) is left out or made the same.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

FOLDER = Path(__file__).parents[1] / "notebooks"
CELL_TIMEOUT = 300  # seconds
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook of a .py, with outputs. Raises CellExecutionError."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    place = {"metadata": {"path": str(FOLDER)}}
    options = {"timeout": CELL_TIMEOUT, "record_timing": False, "coalesce_streams": True, "resources": place}
    with tempfile.TemporaryDirectory() as sockets:
        config = Config(AsyncKernelManager={"transport": "ipc", "ip": f"{sockets}/kernel"})  # no port, no warning
        NotebookClient(notebook, config=config, **options).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    return notebook


def main(names: list[str]) -> int:
    """The exit code."""
    paths = [p for p in sorted(FOLDER.glob("*.py")) if not names or any(name in p.stem for name in names)]
    if not paths:
        print(f"No notebook in {FOLDER} is called {' or '.join(names)}.", file=sys.stderr)
        return 2
    os.environ["JAX_PLATFORMS"] = "cpu"  # the same outputs everywhere
    for path in paths:
        started = time.perf_counter()
        try:
            notebook = execute(path)
        except CellExecutionError as error:
            print(f"{path.name} failed:\n{error}", file=sys.stderr)
            return 1
        target = path.with_suffix(".ipynb")
        nbformat.write(notebook, target)
        print(f"{path.stem}: {time.perf_counter() - started:.0f} s, {target.stat().st_size / 1000:.0f} kB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
