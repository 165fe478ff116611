"""Strict settings for all tests, before anything of the package is imported."""

import os
from collections.abc import Iterator

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Threads of XLA's pool on the CPU. The interpreter of GPU kernels blocks one in each role that waits for another: with
# as many threads as a small machine has cores, nobody would be left to work.
os.environ.setdefault("PJRT_NPROC", "8")

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Shapes and dtypes in annotations are checked at every call while tests run. Not here: modules whose own checks, the
# sentences that users see, must come first (attention.api, attention.merge, cache.codec), and those that define
# pytrees, which JAX also builds with leaves that are no arrays.
MODULES = {
    "attention": ("operands", "reference", "tree", "visibility", "xla"),
    "model": ("attend", "layers", "mla", "moe", "rope", "transformer"),
    "speculative": ("draft", "verify"),
}
CHECKED = [f"mla_jax.{room}.{module}" for room, modules in MODULES.items() for module in modules]
jaxtyping.install_import_hook(CHECKED, "beartype.beartype")


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """What is compiled ahead of time, such as an engine's steps, is not optimized: a tiny model runs too shortly for it
    to pay."""
    compiled = jax.stages.Lowered.compile
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda lowered: compiled(lowered, compiler_options=options))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long versions too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "full" in item.keywords and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="long version; run `make test-full`"))
        if "gpu" in item.keywords and jax.default_backend() != "gpu":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
