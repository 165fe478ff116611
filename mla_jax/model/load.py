"""Reads and writes checkpoint folders: `config.json` and safetensors, in Hugging Face names."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.hf_config import read_json_object
from mla_jax.model.checkpoint import build_params, in_float32, named_tensors, tensor_shapes
from mla_jax.model.kv_scales import SCALES_FILE, is_scale, read_kv_scales, write_kv_scales
from mla_jax.model.params import ModelParams
from mla_jax.model.tensor_file import StoredTensor, aligned_empty, read_header

log = logging.getLogger("mla_jax")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SAVED_DTYPES = ("bfloat16", "float16", "float32")
SCALE_SUFFIX = "_scale_inv"
BLOCK_SIZE = (128, 128)  # rows and columns that share a scale in DeepSeek's FP8 checkpoints
# Buffers of older code, and the copies of embedding and head that DeepSeek stores with its MTP modules.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")


def load_checkpoint(
    folder: str | Path, dtype: Any = jnp.bfloat16, *, kv_scales: bool = True
) -> tuple[MLAConfig, ModelParams]:
    """Loads a checkpoint folder in Hugging Face's layout, one tensor at a time.

    Weights may be stored in bf16, fp16, fp32 or DeepSeek's block-scaled FP8 (`weight_scale_inv`), which is
    dequantized. Names, shapes and file sizes are checked before the first weight is read. Peak memory: the loaded
    weights and one stored tensor.

    Scales of an FP8 latent cache come from `kv_scales.json` (`python -m mla_jax calibrate` writes it), else from
    `k_scale` tensors of vLLM, SGLang or ModelOpt, else there are none and they count as 1.

    Args:
        folder: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.
        dtype: of the loaded weights; routers stay in float32, since rounding them changes which experts are chosen.
        kv_scales: read the scales of an FP8 cache; False for who is about to replace them.

    Returns:
        The config, with num_mtp_layers as many MTP modules as the folder holds (a difference to config.json is said
        in the log), and the weights.

    Raises:
        ValueError: a file or tensor is missing, unknown, misshapen or damaged, named in one sentence.
        NotImplementedError: a model or weight format outside what this version reads.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; pass a checkpoint folder that holds config.json.")
    config = MLAConfig.from_hf(folder)
    block_size = _block_size(folder / "config.json")
    stored = _stored_tensors(folder)
    config = _with_stored_mtp(config, stored, folder)
    _check_complete(config, stored, block_size, folder)
    scales = read_kv_scales(folder, config, stored) if kv_scales else None
    reader = _Reader(stored, block_size, dtype)
    return config, replace(build_params(config, reader.get, reader.get_experts), kv_scales=scales)


def save_checkpoint(folder: str | Path, config: MLAConfig, params: ModelParams, dtype: Any = jnp.bfloat16) -> None:
    """Writes a folder that `load_checkpoint` and Hugging Face transformers read. Routers are stored in float32.

    Cache scales go to `kv_scales.json`, which transformers passes over; without any, one that is there is removed,
    since it belonged to other weights.

    Raises ValueError for params that are not of the config, a dtype other than bf16, fp16 and fp32, and a folder that
    holds a checkpoint in shards.
    """
    folder = Path(folder)
    if (folder / INDEX).exists():
        raise InputError(f"{folder} holds a checkpoint in shards ({INDEX}), which would hide this one; save elsewhere.")
    if (name := jnp.dtype(dtype).name) not in SAVED_DTYPES:
        raise InputError(f"dtype must be one of {', '.join(SAVED_DTYPES)}, got {name}.")
    shapes = {n: t.shape for n, t in jax.eval_shape(lambda p: dict(named_tensors(config, p)), params).items()}
    if shapes != tensor_shapes(config) or len(params.layers) != config.num_layers:
        raise InputError("params and config are not of one model: their tensors differ in name or shape.")
    if params.kv_scales is not None and params.kv_scales.shape != (config.num_cache_layers,):
        raise InputError(f"params.kv_scales must be [{config.num_cache_layers}], got {params.kv_scales.shape}.")
    folder.mkdir(parents=True, exist_ok=True)
    entries = {**config.to_hf(), "dtype": jnp.dtype(dtype).name}
    (folder / "config.json").write_text(json.dumps(entries, indent=2) + "\n")
    tensors = {
        name: np.ascontiguousarray(jax.device_get(tensor.astype(jnp.float32 if in_float32(name) else dtype)))
        for name, tensor in named_tensors(config, params)
    }
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    if params.kv_scales is None:
        (folder / SCALES_FILE).unlink(missing_ok=True)
    else:
        write_kv_scales(folder / SCALES_FILE, params.kv_scales)


class _Reader:
    """Reads weights into the memory they stay in, converted to the wanted dtype on the way."""

    def __init__(self, stored: dict[str, StoredTensor], block_size: tuple[int, int], dtype: Any):
        self._stored, self._block_size, self._dtype = stored, block_size, jnp.dtype(dtype)

    def get(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        tensor = self._stored[name].read()
        dtype = jnp.dtype(jnp.float32) if in_float32(name) else self._dtype
        if tensor.dtype != dtype or self._stored[name].is_fp8:
            converted = aligned_empty(shape, dtype)
            self._convert(name, tensor, converted)
            tensor = converted
        return jax.device_put(tensor)

    def get_experts(self, names: Sequence[Sequence[str]], shape: tuple[int, int]) -> jax.Array:
        rows, columns = shape
        weights = aligned_empty((columns, len(names), len(names[0]) * rows), self._dtype)
        for expert, parts in enumerate(names):
            for i, name in enumerate(parts):
                place = weights[:, expert, i * rows : (i + 1) * rows]
                self._convert(name, self._stored[name].read(), place.T)
        return jax.device_put(weights)

    def _convert(self, name: str, tensor: np.ndarray, out: np.ndarray) -> None:
        if self._stored[name].is_fp8:
            dequantize(tensor, self._stored[name + SCALE_SUFFIX].read(), self._block_size, out)
        else:
            out[...] = tensor


def dequantize(tensor: np.ndarray, scales: np.ndarray, block_size: tuple[int, int], out: np.ndarray) -> None:
    """out = tensor · scale of the block that each number lies in, multiplied in float32, one row of blocks at a time.

    Args:
        tensor: `[O, I]` in float8_e4m3fn.
        scales: `[⌈O / rows⌉, ⌈I / columns⌉]`, with rows and columns the block_size.
        out: `[O, I]` of any float dtype; the last blocks may be partial.
    """
    rows, columns = block_size
    for i, row_scales in enumerate(scales.astype(np.float32)):
        band = slice(i * rows, (i + 1) * rows)
        out[band] = tensor[band].astype(np.float32) * np.repeat(row_scales, columns)[None, : tensor.shape[1]]


def _block_size(path: Path) -> tuple[int, int]:
    """The FP8 block size that config.json tells, or DeepSeek's. Refuses other ways of quantization."""
    quantization = read_json_object(path).get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise InputError(f"{path}: quantization_config must be an object, got {quantization!r}.")
    if (method := quantization.get("quant_method", "fp8")) != "fp8":
        raise NotImplementedError(f"{path}: quant_method {method!r} is not implemented, only 'fp8' is.")
    size = quantization.get("weight_block_size") or BLOCK_SIZE
    match size:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise InputError(f"{path}: weight_block_size must be two positive integers, got {size!r}.")


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor that the folder offers, from the headers of its files."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise InputError(f"{folder} holds neither {SINGLE} nor {INDEX}; weights in other formats are not read.")
        return read_header(folder / SINGLE)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{index} is not a safetensors index: weight_map must be an object of file names.")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, file in weight_map.items():
        if file not in headers:
            if not (folder / file).exists():
                raise InputError(f"{folder / file} does not exist, although {INDEX} says it holds tensor {name}.")
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise InputError(f"{folder / file} does not hold tensor {name}, although {INDEX} says so.")
    return {name: headers[file][name] for name, file in weight_map.items()}


def _with_stored_mtp(config: MLAConfig, stored: dict[str, StoredTensor], folder: Path) -> MLAConfig:
    found = 0
    while f"model.layers.{config.num_layers + found}.eh_proj.weight" in stored:
        found += 1
    if found != config.num_mtp_layers:
        log.warning(
            "%s holds %s multi-token-prediction modules, its config.json says %d%s.",
            folder,
            found or "no",
            config.num_mtp_layers,
            "" if found else "; drafting with it is not possible",
        )
    return replace(config, num_mtp_layers=found)


def _check_complete(
    config: MLAConfig, stored: dict[str, StoredTensor], block_size: tuple[int, int], folder: Path
) -> None:
    """Compares names and shapes with what the config calls for. Raises InputError for the first difference."""
    shapes = tensor_shapes(config)
    for name in [name for name in shapes if name in stored and stored[name].is_fp8]:
        if len(shapes[name]) != len(block_size):
            raise NotImplementedError(
                f"{stored[name].path}: tensor {name} is stored as FP8, which is implemented for matrices only."
            )
        blocks = zip(shapes[name], block_size, strict=True)
        shapes[name + SCALE_SUFFIX] = tuple(-(-size // block) for size, block in blocks)
    if missing := [name for name in shapes if name not in stored]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder} lacks the tensor {missing[0]}{more}, which its config.json calls for.")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise InputError(
                f"{stored[name].path}: tensor {name} has shape {stored[name].shape}, config.json calls for {shape}."
            )
    tied = ["lm_head.weight"] if config.tie_word_embeddings else []
    for name in stored:
        if name not in shapes and name not in tied and not IGNORED.fullmatch(name) and not is_scale(name):
            raise InputError(f"{stored[name].path}: tensor {name} is not part of the model that config.json describes.")
