"""Imports point one way, and the package never needs what only tests and interop need."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mla_jax

ROOT = Path(mla_jax.__file__).parent
# Each room may import itself, what stands before it, and nothing behind it.
ROOMS = [
    "errors", "config", "hf_config", "cache", "schedule", "explain", "attention", "model", "speculative", "demo",
    "tokenizer", "decode", "check", "bench", "cli", "__main__",
]  # fmt: skip


def imports(path: Path) -> set[str]:
    """First components below mla_jax that a file imports at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mla_jax."):
            found.add((node.module or "").split(".")[1])
    return found


@pytest.mark.parametrize(
    "path",
    sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem != "__init__"),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if room == "demo" and path.stem == "train":
        return  # a script on top of everything
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    assert imports(path) <= allowed


def test_cache_knows_no_attention_and_attention_no_model() -> None:
    for path in (ROOT / "cache").rglob("*.py"):
        assert imports(path) <= {"cache", "config", "errors"}
    for path in (ROOT / "attention").rglob("*.py"):
        assert "model" not in imports(path)


def test_torch_is_never_imported() -> None:
    heavy = {"torch", "transformers", "optax", "matplotlib"}
    program = f"import sys, mla_jax, mla_jax.__main__; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_documented() -> None:
    for name in mla_jax.__all__:
        assert name == "PAGE_SIZE" or name == "FORMATS" or getattr(mla_jax, name).__doc__, name


def test_test_modules_have_names_of_their_own() -> None:
    """pytest imports them by name; two of one name break the collection of whichever comes second."""
    names = sorted(p.name for p in Path(__file__).parent.rglob("test_*.py"))
    assert len(names) == len(set(names)), [n for n in names if names.count(n) > 1]
