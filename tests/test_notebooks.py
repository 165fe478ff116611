"""Every notebook was executed as it stands: the .ipynb holds the cells of the .py beside it, and what they gave."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
MOST_BYTES = 300_000  # of an .ipynb, its pictures included


def cells_of_script(path: Path) -> list[tuple[str, str]]:
    """(type, source) of each cell of a file in jupytext's percent format."""
    cells = []
    for part in re.split(r"^# %%", path.read_text(), flags=re.MULTILINE)[1:]:
        mark, _, source = part.partition("\n")
        markdown = mark.strip() == "[markdown]"
        if markdown:
            source = re.sub(r"^# ?", "", source, flags=re.MULTILINE)
        cells.append(("markdown" if markdown else "code", source.strip()))
    return cells


def notebook(path: Path) -> dict[str, Any]:
    return json.loads(path.with_suffix(".ipynb").read_text())


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in notebook(path)["cells"] if cell["cell_type"] == "code"]


def test_every_notebook_has_its_pair() -> None:
    assert len(SCRIPTS) >= 8
    assert [p.stem for p in SCRIPTS] == sorted(p.stem for p in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_both_hold_the_same_cells(path: Path) -> None:
    cells = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in notebook(path)["cells"]]
    assert cells == cells_of_script(path), f"run: make notebooks ARGS={path.stem}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_all_cells_ran_in_order_without_errors_or_warnings(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_it_is_small_and_the_readme_names_it(path: Path) -> None:
    assert path.with_suffix(".ipynb").stat().st_size < MOST_BYTES
    assert f"notebooks/{path.stem}.ipynb" in (FOLDER.parent / "README.md").read_text()
