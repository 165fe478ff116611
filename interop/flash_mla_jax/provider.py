"""Which installed package has FlashMLA's Hopper kernels, found by what it can do, never by its name.

Two packages install a module called `flash_mla`:

- `sgl-flash-mla`: the kernels for Hopper are operators in `torch.ops.flash_mla_legacy`, optional when it is built.
- `deepseek-ai/FlashMLA`: functions of the extension `flash_mla.cuda`; `dense_decode_fwd` since 2026-01, no Hopper
  kernels since the release of 2026-09-30.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.buffer_callback import buffer_callback

from flash_mla_jax.errors import InputError, UnavailableError

SMS = 132  # of an H100 or H200
CAPABILITY = "9.0"  # of Hopper, which all of these kernels are written for
INSTALL = "pip install 'mla-jax[flashmla]'"
LEGACY = "flash_mla_legacy"  # namespace of sgl-flash-mla's operators for Hopper
DENSE, DENSE_FP8, SPARSE = "dense", "dense_fp8", "sparse"
METADATA, METADATA_FP8 = "metadata", "metadata_fp8"
# What the operators must take and return; another schema means another generation, whose arguments we do not know.
SCHEMAS = {
    DENSE: "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
    "float softmax_scale, bool is_causal, Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)",
    DENSE_FP8: "fwd_kvcache_mla_fp8(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
    "float softmax_scale, bool is_causal, Tensor tile_scheduler_metadata, Tensor num_splits, Tensor? descale_q, "
    "Tensor? descale_k) -> Tensor[]",
    SPARSE: "sparse_decode_fwd(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "Tensor(a!)? tile_scheduler_metadata, Tensor(b!)? num_splits, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_topk_length, int d_v, float sm_scale, str? kv_format=None) "
    "-> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)",
    METADATA: "get_mla_decoding_metadata(Tensor seqlens_k, int num_q_tokens_per_head_k, int h_k, int? h_q, "
    "bool is_fp8_kvcache, int? topk) -> Tensor[]",
    METADATA_FP8: "get_mla_decoding_metadata_dense_fp8(Tensor seqlens_k, int num_heads_per_head_k, "
    "int num_heads_k) -> Tensor[]",
}


@dataclass(frozen=True)
class Provider:
    """Kernels that take torch tensors, by kind; None where this package has none.

    Each enters the kernel of its platform directly, so that a dispatch mode sees what it allocates.
    """

    name: str
    dense: Callable[..., Any] | None = None
    dense_fp8: Callable[..., Any] | None = None
    sparse: Callable[..., Any] | None = None
    metadata: Callable[..., Any] | None = None
    metadata_fp8: Callable[..., Any] | None = None
    platform: str = "cuda"

    def kernel(self, kind: str) -> Callable[..., Any]:
        """The kernel of that kind. Raises UnavailableError if this package has none."""
        found: Callable[..., Any] | None = getattr(self, kind)
        if found is None:
            raise UnavailableError(f"{self.name} has no {kind} kernel for Hopper; {INSTALL} brings one.")
        return found


def cannot_run(kind: str = DENSE) -> str | None:
    """Why calls of this kind cannot run here, in one sentence; None if they can.

    Args:
        kind: `"dense"` (bf16, fp16), `"dense_fp8"` (e4m3) or `"sparse"` (rows of 656 bytes).

    Raises ValueError for another kind.

    The first call on a machine with a Hopper GPU loads torch and flash_mla.
    """
    if kind not in (DENSE, DENSE_FP8, SPARSE):
        raise InputError(f"kind must be {DENSE!r}, {DENSE_FP8!r} or {SPARSE!r}, got {kind!r:.60}.")
    try:
        find().kernel(kind)
    except UnavailableError as error:
        return str(error)
    return None


def find() -> Provider:
    """The provider of this machine. Raises UnavailableError with the first reason against it."""
    device = default_device()
    for reason in (
        device_reason(device.platform, device.device_kind, getattr(device, "compute_capability", None)),
        jax_reason(buffer_callback),
    ):
        if reason is not None:
            raise UnavailableError(reason)
    return _find_on_gpu()


@functools.lru_cache(1)
def _find_on_gpu() -> Provider:
    if (reason := torch_reason()) is not None:
        raise UnavailableError(reason)
    return load()


def default_device() -> Any:
    """The JAX device that calls run on."""
    default = jax.config.jax_default_device
    return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def num_sms() -> int:
    """Streaming multiprocessors of that device; those of an H200 where it is no GPU and only shapes are asked for."""
    device = default_device()
    return int(device.core_count) if device.platform == "gpu" else SMS


def device_reason(platform: str, name: str, capability: str | None) -> str | None:
    """Why a device is out of reach."""
    if platform not in ("gpu", "cuda") or capability is None:
        return f"FlashMLA's kernels need an NVIDIA Hopper GPU, and JAX runs on {platform} here."
    if capability != CAPABILITY:
        return f"FlashMLA's kernels need a Hopper GPU (compute capability {CAPABILITY}), found {name} ({capability})."
    return None


@functools.lru_cache(None)
def jax_reason(callback: Callable[..., Any]) -> str | None:
    """Why this JAX is out of reach."""
    if "command_buffer_compatible" not in inspect.signature(callback).parameters:
        return f"jax {jax.__version__} cannot capture callbacks into a CUDA graph; upgrade to jax 0.11.2 or newer."
    return None


def torch_reason() -> str | None:
    """Why this torch is out of reach."""
    if not _installed("torch"):
        return f"PyTorch is not installed, and FlashMLA's kernels are loaded through it; {INSTALL}."
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build, see pytorch.org."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device, check the driver with nvidia-smi."
    return None


def load() -> Provider:
    """Imports flash_mla and looks at what it has. Raises UnavailableError."""
    if not _installed("flash_mla"):
        raise UnavailableError(f"no package with FlashMLA's kernels is installed; {INSTALL}.")
    try:
        module = importlib.import_module("flash_mla")
    except Exception as error:  # a library that does not load raises many kinds
        raise UnavailableError(f"flash_mla is installed but does not load ({_causes(error)}).") from error
    provider = _from_legacy_operators(module) or _from_extension(module)
    if provider is None:
        raise UnavailableError(_no_kernels(module))
    return provider


def _from_legacy_operators(module: Any) -> Provider | None:
    import torch

    namespace = getattr(torch.ops, LEGACY)
    if not hasattr(namespace, "dense_decode_fwd"):
        return None
    return from_operators(_describe(module), namespace)


def from_operators(name: str, namespace: Any, platform: str = "cuda") -> Provider:
    """A provider from operators of `torch.ops`. Raises UnavailableError if one has another schema than expected."""
    import torch

    key = torch._C.DispatchKey.CUDA if platform == "cuda" else torch._C.DispatchKey.CPU
    found = {}
    for kind, expected in SCHEMAS.items():
        packet = getattr(namespace, expected.split("(")[0], None)
        if packet is None:
            continue
        schema = packet.default._schema
        if schema != torch._C.parse_schema(f"{schema.name}({expected.split('(', 1)[1]}"):
            raise UnavailableError(f"{name} has an operator that this version cannot call: {schema} is not {expected}.")
        found[kind] = functools.partial(packet.default._op_dk, key)
    return Provider(name, **found, platform=platform)


def _from_extension(module: Any) -> Provider | None:
    """Upstream from 2026-01 to 2026-09: plain functions with the arguments of the operators above."""
    extension: Any = getattr(module, "cuda", None)
    if not callable(getattr(extension, "dense_decode_fwd", None)):
        return None
    return Provider(
        _describe(module), dense=extension.dense_decode_fwd, sparse=getattr(extension, "sparse_decode_fwd", None)
    )


def _no_kernels(module: Any) -> str:
    name = _describe(module)
    extension: Any = getattr(module, "cuda", None)
    if hasattr(extension, "fwd_kvcache_mla") or hasattr(extension, "get_mla_decoding_metadata"):
        return f"{name} is from before 2026-01 and takes other arguments; {INSTALL}."
    loader = getattr(module, "_loader", None)
    if (error := getattr(loader, "_LEGACY_UNAVAILABLE", None)) is not None:
        return f"{name} comes without its half for Hopper ({error}); {INSTALL}."
    return f"{name} has no decode kernels for Hopper, which upstream removed on 2026-09-30; {INSTALL}."


def _describe(module: Any) -> str:
    return f"flash_mla {getattr(module, '__version__', 'of unknown version')}"


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _causes(error: BaseException) -> str:
    """The messages of an error and of what caused it, on one line."""
    messages = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(" ".join(str(cause).split()).rstrip("."))
        cause = cause.__cause__ or cause.__context__
    return "; ".join(messages)
