"""Reads and writes checkpoint folders: `config.json` and safetensors, in Hugging Face names."""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.model.checkpoint import build_params, named_tensors, tensor_shapes
from mla_jax.model.params import ModelParams

log = logging.getLogger("mla_jax")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
STORED_DTYPES = ("bfloat16", "float16", "float32")


def load_checkpoint(folder: str | Path, dtype: Any = jnp.bfloat16) -> tuple[MLAConfig, ModelParams]:
    """Loads a checkpoint folder in Hugging Face's layout, one tensor at a time.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.
        dtype: of the loaded weights.

    Returns:
        The config, with num_mtp_layers 0 if the folder holds no MTP module (said in the log), and the weights.

    Raises:
        ValueError: a file or tensor is missing, misshapen or damaged, named in one sentence.
        NotImplementedError: a model or weight format outside what this version reads.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass a checkpoint folder that holds config.json.")
    config = MLAConfig.from_hf(folder)
    with _open_tensors(folder) as tensors:
        if config.num_mtp_layers and f"model.layers.{config.num_layers}.eh_proj.weight" not in tensors.files:
            log.warning("%s holds no multi-token-prediction module; drafting with it is not possible.", folder)
            config = replace(config, num_mtp_layers=0)
        missing = sorted(tensor_shapes(config).keys() - tensors.files.keys())
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise InputError(f"{folder} lacks the tensor {missing[0]}{more}, which its config.json calls for.")
        params = build_params(config, lambda name, shape: jnp.asarray(tensors.get(name, shape)).astype(dtype))
    return config, params


def save_checkpoint(folder: str | Path, config: MLAConfig, params: ModelParams, dtype: Any = jnp.bfloat16) -> None:
    """Writes a folder that `load_checkpoint` and Hugging Face transformers read."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config.to_hf(), "dtype": jnp.dtype(dtype).name}, indent=2) + "\n")
    tensors = {
        name: np.ascontiguousarray(jax.device_get(tensor.astype(dtype)))
        for name, tensor in named_tensors(config, params)
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


class _Tensors:
    """Which file holds which tensor, and the tensors themselves."""

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        path = self.files[name]
        try:
            tensor = self._handle(path).get_tensor(name)
        except (SafetensorError, AttributeError, TypeError) as e:
            raise InputError(f"{path}: tensor {name} cannot be read ({e}).") from None
        if tensor.shape != shape:
            raise InputError(f"{path}: tensor {name} has shape {tensor.shape}, config.json calls for {shape}.")
        if tensor.dtype.name not in STORED_DTYPES:
            raise NotImplementedError(f"{path}: tensor {name} is stored as {tensor.dtype.name}, which is not "
                                      f"implemented; only {', '.join(STORED_DTYPES)} are.")
        return tensor

    def close(self) -> None:
        self._open.close()

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._open.enter_context(_open_file(path))
        return self._handles[path]


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, "np")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist, although the checkpoint's index names it.") from None
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path} is not a whole safetensors file ({e}); copy or download it again.") from None


@contextmanager
def _open_tensors(folder: Path) -> Iterator[_Tensors]:
    tensors = _Tensors(_tensor_files(folder))
    try:
        yield tensors
    finally:
        tensors.close()


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if index.exists():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, AttributeError, TypeError) as e:
            raise InputError(f"{index} is not a safetensors index ({e!r}).") from None
    single = folder / SINGLE
    if not single.exists():
        raise InputError(f"{folder} holds neither {SINGLE} nor {INDEX}; weights in other formats are not read.")
    with _open_file(single) as handle:
        return dict.fromkeys(handle.keys(), single)
