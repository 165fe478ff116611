"""Checkpoint folders written without the loader's help: random tensors under the names that a config calls for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from mla_jax import MLAConfig
from mla_jax.config import MoEConfig
from mla_jax.model.checkpoint import tensor_shapes

SMALL = MLAConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    q_lora_rank=8,
    num_mtp_layers=1,
    moe=MoEConfig(4, 2, 10, 1, num_groups=2, groups_per_token=1, first_dense=1),
)


def write(
    folder: Path, config: MLAConfig, dtype: torch.dtype = torch.float32, **entries: Any
) -> dict[str, torch.Tensor]:
    """A single-file checkpoint; returns its tensors. entries go to config.json."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in tensor_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config.to_hf(), **entries}))
    return tensors


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replaces, adds or (None) removes tensors of a single-file checkpoint."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def shard(folder: Path, num_files: int) -> dict[str, str]:
    """Splits a single-file checkpoint into shards with an index; returns which tensor went where."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % num_files + 1:05}-of-{num_files:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: t for name, t in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weight and scales of one matrix, one scale for each block, as DeepSeek stores them."""
    rows, columns = (-(-size // b) for size, b in zip(weight.shape, block, strict=True))
    scales, quantized = torch.ones(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = weight[part].abs().max() / 448
            quantized[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return quantized, scales


def dequantize_by_hand(quantized: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """Number by number."""
    values, factors = quantized.float().numpy(), scales.numpy()
    return np.array(
        [
            [value * factors[o // block[0], i // block[1]] for i, value in enumerate(row)]
            for o, row in enumerate(values)
        ],
        np.float32,
    )
