"""What the README tells people to run, runs."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

import mla_jax
import mla_jax.model
from mla_jax.__main__ import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_python_blocks_print_what_their_comments_say() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    code = [[line for line in block.splitlines() if line.strip()] for block in blocks]
    assert len(code) == 3 and len(code[0]) <= 12
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


@pytest.mark.parametrize("command", re.findall(r"^python -m mla_jax (\w+)", README, re.MULTILINE))
def test_commands_exist(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "usage:" in capsys.readouterr().out


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_inside_the_repository_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / target).exists(), target
