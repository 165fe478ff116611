"""Who has the kernels, and one sentence for every way in which they cannot run here."""

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from decode_problems import assert_one_sentence
from jax.experimental.buffer_callback import buffer_callback

from flash_mla_jax import UnavailableError, cannot_run, provider

WHEEL = importlib.util.find_spec("flash_mla")
NO_WHEEL = "sgl-flash-mla has wheels for Linux on x86-64 alone, and is not installed"
needs_wheel = pytest.mark.skipif(WHEEL is None, reason=NO_WHEEL)


def library(stem: str) -> Path:
    assert WHEEL is not None and WHEEL.origin is not None
    return next(Path(WHEEL.origin).parent.glob(f"{stem}.*.so"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A package called flash_mla with this source, in place of the installed one."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_mla"]:
        monkeypatch.delitem(sys.modules, name)

    def make(source: str) -> None:
        folder = tmp_path / "flash_mla"
        folder.mkdir()
        (folder / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    yield make
    for name in [n for n in sys.modules if n.split(".")[0] == "flash_mla"]:
        del sys.modules[name]


def refusal(run: Callable[[], Any]) -> str:
    with pytest.raises(UnavailableError) as error:
        run()
    assert_one_sentence(str(error.value))
    return str(error.value)


@pytest.mark.parametrize("platform, name, capability, says", [
    ("cpu", "cpu", None, "need an NVIDIA Hopper GPU, and JAX runs on cpu here."),
    ("tpu", "TPU v5e", None, "and JAX runs on tpu here."),
    ("gpu", "AMD Instinct MI300X", None, "need an NVIDIA Hopper GPU"),
    ("gpu", "NVIDIA A100", "8.0", "need a Hopper GPU (compute capability 9.0), found NVIDIA A100 (8.0)."),
    ("gpu", "NVIDIA B200", "10.0", "found NVIDIA B200 (10.0)."),
])  # fmt: skip
def test_other_devices(platform: str, name: str, capability: str | None, says: str) -> None:
    reason = provider.device_reason(platform, name, capability)
    assert reason is not None and says in reason
    assert_one_sentence(reason)


def test_hopper_and_this_jax_are_fine() -> None:
    assert provider.device_reason("gpu", "NVIDIA H200", "9.0") is None
    assert provider.jax_reason(buffer_callback) is None


def test_this_machine() -> None:
    reason = cannot_run()
    if jax.default_backend() == "cpu":
        assert reason == "FlashMLA's kernels need an NVIDIA Hopper GPU, and JAX runs on cpu here."


def test_an_old_jax() -> None:
    def old_buffer_callback(callback: Any, result_shape_dtypes: Any, *, has_side_effect: bool = False) -> None: ...

    reason = provider.jax_reason(old_buffer_callback)
    assert reason is not None and "upgrade to jax 0.11.2 or newer" in reason
    assert_one_sentence(reason)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as Python marks a module that cannot be imported
    reason = provider.torch_reason()
    assert reason is not None and reason.startswith("PyTorch is not installed") and provider.INSTALL in reason
    assert_one_sentence(reason)
    assert "PyTorch is not installed" in refusal(lambda: importlib.import_module("flash_mla_jax").to_torch(None))


def test_torch_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    reason = provider.torch_reason()
    assert reason is not None and "CUDA" in reason
    assert_one_sentence(reason)
    monkeypatch.setattr(torch.version, "cuda", None)  # as in torch's CPU builds
    reason = provider.torch_reason()
    assert reason is not None and "is built without CUDA" in reason
    assert_one_sentence(reason)


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert "no package with FlashMLA's kernels is installed" in refusal(provider.load)


def test_a_package_that_does_not_load_keeps_its_error(package: Any) -> None:
    package("raise OSError('libcudart.so.13: cannot open shared object file')")
    assert "does not load (libcudart.so.13: cannot open shared object file)" in refusal(provider.load)


@needs_wheel
def test_the_wheel_on_a_machine_without_a_driver() -> None:
    if torch.cuda.is_available() or shutil.which("nvidia-smi"):
        pytest.skip("this machine has a driver")
    message = refusal(provider.load)
    assert "flash_mla is installed but does not load" in message and "libcuda.so.1" in message


def test_upstream_since_2026_09_30(package: Any) -> None:
    package("import types\n__version__ = '2.0.0'\ncuda = types.SimpleNamespace(sparse_decode_fwd=len)")
    message = refusal(provider.load)
    assert "flash_mla 2.0.0 has no decode kernels for Hopper, which upstream removed on 2026-09-30" in message


def test_upstream_before_2026(package: Any) -> None:
    package("import types\n__version__ = '1.0.0'\ncuda = types.SimpleNamespace(fwd_kvcache_mla=len)")
    assert "flash_mla 1.0.0 is from before 2026-01 and takes other arguments" in refusal(provider.load)


def test_upstream_between(package: Any) -> None:
    source = (
        "import types\n__version__ = '1.5'\ncuda = types.SimpleNamespace(dense_decode_fwd=len, sparse_decode_fwd=max)"
    )
    package(source)
    found = provider.load()
    assert found.name == "flash_mla 1.5" and found.kernel("dense") is len and found.kernel("sparse") is max
    assert "flash_mla 1.5 has no dense_fp8 kernel" in refusal(lambda: found.kernel("dense_fp8"))


def test_the_sgl_package_without_its_half_for_hopper(package: Any) -> None:
    package(
        "import types\n__version__ = '1.0.0'\n"
        "_loader = types.SimpleNamespace(_LEGACY_UNAVAILABLE='this wheel was built with FLASH_MLA_BUILD_LEGACY=0')"
    )
    message = refusal(provider.load)
    assert "comes without its half for Hopper (this wheel was built with FLASH_MLA_BUILD_LEGACY=0)" in message


def test_an_operator_of_another_generation() -> None:
    library = torch.library.Library("flash_mla_other_generation", "DEF")
    library.define("dense_decode_fwd(Tensor q, Tensor kcache, Tensor out) -> ()")
    namespace = torch.ops.flash_mla_other_generation
    message = refusal(lambda: provider.from_operators("flash_mla 3", namespace))
    assert "flash_mla 3 has an operator that this version cannot call: flash_mla_other_generation::dense" in message


@needs_wheel
def test_schemas_in_the_wheel_are_those_expected() -> None:
    """Read from the library's strings: nothing of it runs."""
    text = library("_C_legacy").read_bytes()
    for kind, schema in provider.SCHEMAS.items():
        assert b"\0" + schema.encode() + b"\0" in text, kind
    dense = re.findall(rb"\0(dense_decode_fwd\([^\0]*)\0", text)
    assert [d.decode() for d in dense] == [provider.SCHEMAS[provider.DENSE]]


@needs_wheel
def test_the_wheel_behind_a_stubbed_driver_is_a_provider(tmp_path: Path) -> None:
    """Its libraries load once something is called libcuda.so.1, and register their operators."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a stub of the driver needs a C compiler")
    if torch.version.cuda is None:
        pytest.skip("the wheel needs the libraries of a CUDA build of torch")
    stub = tmp_path / "libcuda.so.1"
    (tmp_path / "stub.c").write_text("int cuInit(unsigned flags) { return 100; }\n")  # CUDA_ERROR_NO_DEVICE
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", stub, tmp_path / "stub.c"], check=True, timeout=60)
    program = (
        "from flash_mla_jax import provider\n"
        "found = provider.load()\n"
        "print(found.name, *(kind for kind in provider.SCHEMAS if getattr(found, kind) is not None))"
    )
    root = Path(provider.__file__).parents[1]
    environment = {
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": str(root),
        "PATH": "/usr/bin:/bin",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr[-1500:]
    assert result.stdout.split() == ["flash_mla", "1.0.0", *provider.SCHEMAS]


@pytest.mark.parametrize("kind", ["nosuch", None, 3])
def test_an_unknown_kind(kind: object) -> None:
    with pytest.raises(ValueError, match="kind must be 'dense', 'dense_fp8' or 'sparse'"):
        cannot_run(kind)
