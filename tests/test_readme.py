"""What the README tells people to run, runs."""

import contextlib
import io
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import mla_jax
import mla_jax.model
from mla_jax import MLAConfig
from mla_jax.__main__ import main
from mla_jax.demo import CHECKPOINT
from mla_jax.model.checkpoint import tensor_shapes
from scripts import architecture
from scripts.readme import PART, PARTS, filled, without_parts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python -m mla_jax (.*)$", README, re.MULTILINE)


def test_python_blocks_print_what_their_comments_say() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = [[line for line in block.splitlines() if line.strip()] for block in blocks]
    assert len(code) == 4 and len(code[0]) <= 12
    out = io.StringIO()
    # As a reader runs it: without the strict promotion that our tests add.
    with contextlib.redirect_stdout(out), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile("".join(blocks), "README.md", "exec"), {})
    assert out.getvalue().splitlines() == [lines[-1].split("  # ")[1] for lines in code]


def test_names_in_the_table_exist() -> None:
    table = README.split("## What is in it")[1].split("##")[0]
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", row):
            assert name == "mla_jax.model" or hasattr(mla_jax, name), name
    model_row = next(line for line in table.splitlines() if line.startswith("| `mla_jax.model`"))
    for name in re.findall(r"`(\w+)`", model_row):
        assert hasattr(mla_jax.model, name), name


@pytest.mark.parametrize("command", sorted({line.split()[0] for line in COMMANDS}))
def test_commands_exist(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_take_the_arguments_that_are_printed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, ran = shlex.split(line, comments=True), []
    monkeypatch.setattr(f"mla_jax.cli.{words[0]}.run", ran.append)
    assert main(words) == 0 and len(ran) == 1


def test_generated_parts_are_what_code_and_results_say() -> None:
    assert {name for _, name, _, _ in PART.findall(README)} == set(PARTS)
    assert filled(README) == README, "run: make readme"
    assert architecture.PICTURE.read_text() == architecture.picture(), "run: make readme"


def test_no_measured_number_is_written_by_hand() -> None:
    assert not re.findall(r"[\d.,]+ ?(?:µs|ms|GB/s|TFLOP/s|tokens/s|%)", without_parts(README))


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(part)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("part", ["kernels", "step", "flash_mla"])
def test_numbers_of_measured_tables_are_in_the_files_that_they_name(part: str) -> None:
    """Without the code that made the tables. Ratios are left out: they are of two numbers beside them."""
    text = next(found for _, name, found, _ in PART.findall(README) if name == part)
    files = re.findall(r"\(([\w./-]+\.json)\)", text)
    known = list(numbers_in([json.loads((ROOT / file).read_text()) for file in files]))
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    cells = [cell for row in rows for i, cell in enumerate(row[1:], 1) if not (part == "kernels" and i == 5)]
    printed = [n for cell in cells for n in re.findall(r"\d+(?:\.\d+)?", cell.replace(" ", ""))]
    assert len(printed) >= 3 * len(rows)
    for number in printed:
        decimals = len(number.partition(".")[2])
        assert any(f"{n:.{decimals}f}" == number for n in known), number


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_demo_model_is_as_large_as_said_and_took_as_long() -> None:
    minutes = json.loads((CHECKPOINT / "training_log.json").read_text())["bits_per_byte"][-1]["seconds"] / 60
    size = sum(math.prod(shape) for shape in tensor_shapes(MLAConfig.from_hf(CHECKPOINT)).values())
    assert f"{size / 1e6:.1f} million parameters" in README and f"in {minutes:.0f} minutes on one H200" in README


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(ROOT.glob("notebooks/*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_links_to_headings_resolve() -> None:
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", README, re.MULTILINE)}
    for target in re.findall(r"\]\(#([^)]+)\)", README):
        assert target in headings, target
