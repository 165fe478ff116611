"""Scales of an FP8 latent cache beside a checkpoint: `kv_scales.json`, or `k_scale` tensors among the weights.

A scale is what a stored e4m3 number is multiplied by, largest magnitude / 448, as vLLM, SGLang and ModelOpt have it.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.hf_config import read_json_object
from mla_jax.model.tensor_file import StoredTensor

SCALES_FILE = "kv_scales.json"
_LAYER = r"model\.layers\.(\d+)\.self_attn\."
# On the attention module (compressed-tensors), under vLLM's or SGLang's names for its parts, beside a projection
# (ModelOpt's k_proj, which MLA does not have); kv_scale is vLLM's older word.
_KEY = re.compile(
    _LAYER + r"((attn|mla_attn|mla_attn\.mla_attn|attn_mqa|k_proj|kv_a_proj_with_mqa)\.)?(k_scale|kv_scale)"
)
# Not needed: a latent row is key and value at once and has one scale, and queries are not stored.
_OTHER = re.compile(_LAYER + r"([\w.]+\.)?(v_scale|q_scale|prob_scale)")


def is_scale(name: str) -> bool:
    """True for a checkpoint tensor that holds a scale of keys, values, queries or weights of attention."""
    return bool(_KEY.fullmatch(name) or _OTHER.fullmatch(name))


def read_kv_scales(
    folder: Path, config: MLAConfig, stored: Mapping[str, StoredTensor]
) -> Float[Array, "layers"] | None:
    """One scale per cache layer, decoder first, then MTP modules, or None if the folder holds none.

    `kv_scales.json` goes before tensors: it was made later, for this cache. MTP modules without a scale get 1.

    Raises ValueError for a scale that is not a positive number, layers that are not the model's, and some layers of
    the decoder with a scale and some without.
    """
    path = folder / SCALES_FILE
    if path.exists():
        return _checked(_from_file(path), config, str(path))
    found = _from_tensors(stored)
    if not found:
        return None
    return _checked(found, config, str(folder))


def write_kv_scales(path: Path, scales: Float[Array, "layers"], **about: Any) -> None:
    """Writes `kv_scales.json`, in one go: the file is the old one or the new one, whatever happens.

    Args:
        scales: float32 `[layers]`.
        about: what else the file says, such as how the scales came about.

    Raises ValueError if the folder or file cannot be written.
    """
    values = [float(scale) for scale in np.asarray(scales, np.float32)]
    text = json.dumps({"kv_format": "fp8_e4m3", "scales": values, **about}, indent=2) + "\n"
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            file.write(text)
        try:
            os.chmod(file.name, 0o644)  # as other files of a checkpoint; temporary ones are private
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as e:
        raise InputError(f"{path} cannot be written ({e.strerror}); name a file in another folder.") from None


def _from_file(path: Path) -> dict[int, float]:
    entries = read_json_object(path)
    if (name := entries.get("kv_format")) != "fp8_e4m3":
        raise InputError(f"{path} holds scales for kv_format {name!r}, expected 'fp8_e4m3'; calibrate again.")
    scales = entries.get("scales")
    try:
        if not isinstance(scales, list) or not all(type(scale) in (int, float) for scale in scales):
            raise TypeError
        return {layer: float(scale) for layer, scale in enumerate(scales)}
    except (TypeError, OverflowError):
        raise InputError(f"{path} must hold a list of float32 numbers under 'scales'; calibrate again.") from None


def _from_tensors(stored: Mapping[str, StoredTensor]) -> dict[int, float]:
    found: dict[int, float] = {}
    names: dict[int, str] = {}
    for name, tensor in stored.items():
        if not (match := _KEY.fullmatch(name)):
            continue
        if int(np.prod(tensor.shape)) != 1:
            raise InputError(f"{tensor.path}: tensor {name} must be one number, got shape {tensor.shape}.")
        layer = int(match[1])
        if layer in names:
            raise InputError(f"{tensor.path}: tensors {names[layer]} and {name} are two scales for one layer.")
        names[layer] = name
        found[layer] = float(tensor.read().reshape(()).astype(np.float32))
    return found


def _checked(found: dict[int, float], config: MLAConfig, where: str) -> Float[Array, "layers"]:
    depth, layers = config.num_layers, config.num_cache_layers
    missing = [layer for layer in range(depth) if layer not in found]
    if missing or max(found) >= layers:
        modules = f", and up to {config.num_mtp_layers} more for MTP modules" if config.num_mtp_layers else ""
        raise InputError(
            f"{where}: expected cache scales for layers 0 to {depth - 1}{modules}, got {len(found)} of them"
            + (f", none for layer {missing[0]}" if missing else f", one of them for layer {max(found)}")
            + "; calibrate again."
        )
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    for layer, scale in found.items():
        if not smallest <= scale <= largest:  # NaN too
            raise InputError(
                f"{where}: the cache scale of layer {layer} is {scale:g}, expected a positive float32; calibrate again."
            )
    return jnp.asarray([found.get(layer, 1.0) for layer in range(layers)], jnp.float32)
