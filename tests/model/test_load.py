"""Checkpoint folders: what is read, in which formats, and what is said when they are not whole."""

import dataclasses
import json
import logging

import checkpoints
import hf_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import SMALL
from safetensors.torch import load_file
from tiny import Tiny

from mla_jax import InputError, MLAConfig, load_checkpoint, save_checkpoint
from mla_jax.config import MoEConfig
from mla_jax.model.checkpoint import named_tensors

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
LAYER = "model.layers.0.mlp.down_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


def stored_values(config, params) -> dict[str, np.ndarray]:
    return {name: np.asarray(tensor) for name, tensor in named_tensors(config, params)}


def assert_same(ours: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


@pytest.fixture
def folder(tmp_path):
    checkpoints.write(tmp_path, SMALL)
    return tmp_path


def test_every_tensor_lands_where_its_name_says(tmp_path):
    tensors = checkpoints.write(tmp_path, SMALL)
    config, params = load_checkpoint(tmp_path, jnp.float32)
    assert config == SMALL
    assert_same(stored_values(config, params), {name: t.numpy() for name, t in tensors.items()})
    experts = params.layers[1].mlp  # [E, X, 2F]: gate, then up
    np.testing.assert_array_equal(experts.gate_up_proj[:, 3, 10:], tensors[EXPERT].numpy().T)


@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stored_and_wanted_dtypes(tmp_path, stored, target):
    tensors = checkpoints.write(tmp_path, SMALL, stored)
    config, params = load_checkpoint(tmp_path, target)
    routers = (ROUTER, ROUTER.replace(".weight", ".e_score_correction_bias"))
    routers += tuple(name.replace("layers.1", "layers.2") for name in routers)  # the MTP module's
    expected = {
        name: t.float().numpy().astype(jnp.float32 if name in routers else target) for name, t in tensors.items()
    }
    assert_same(stored_values(config, params), expected)


@pytest.mark.parametrize(
    "tiny", [Tiny(2, yarn=True, q_lora=True, moe=True), Tiny(3, yarn=True, moe=True, tied=True), Tiny(3)], ids=str
)
def test_save_and_load(tiny, tmp_path):
    tiny.make(tmp_path / "theirs")
    config, params = load_checkpoint(tmp_path / "theirs", jnp.float32)
    save_checkpoint(tmp_path / "ours", config, params, jnp.float32)
    again, loaded = load_checkpoint(tmp_path / "ours", jnp.float32)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, loaded)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    tokens = np.arange(20)
    expected, saved = (hf_oracle.run(hf_oracle.load(tmp_path / name), tokens) for name in ("theirs", "ours"))
    np.testing.assert_array_equal(saved.logits, expected.logits)  # transformers reads our config.json as its own


def test_shards_of_transformers_equal_the_single_file(tmp_path):
    Tiny(3, moe=True).make(tmp_path / "single")
    Tiny(3, moe=True).make(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    (config, single), (same, shards) = (load_checkpoint(tmp_path / name, jnp.float32) for name in ("single", "shards"))
    assert config == same
    jax.tree.map(np.testing.assert_array_equal, single, shards)


WIDE = dataclasses.replace(  # blocks of 128 × 128: whole, partial, one and several
    SMALL, hidden_size=200, intermediate_size=256, q_lora_rank=130, moe=MoEConfig(4, 2, 140, 1, first_dense=1)
)


@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("block", [(128, 128), (64, 32)], ids=str)
def test_block_scaled_fp8_equals_dequantizing_by_hand(tmp_path, block, target):
    tensors = checkpoints.write(
        tmp_path, WIDE, torch.bfloat16, quantization_config={"quant_method": "fp8", "weight_block_size": list(block)}
    )
    expected = {name: t.float().numpy() for name, t in tensors.items()}
    changes = {}
    for name, tensor in tensors.items():
        if "proj" in name:  # as DeepSeek does: no embedding, head, norm or router
            changes[name], changes[f"{name}_scale_inv"] = checkpoints.quantize(tensor.float(), block)
            expected[name] = checkpoints.dequantize_by_hand(changes[name], changes[f"{name}_scale_inv"], block)
    checkpoints.change(tmp_path, changes)
    config, params = load_checkpoint(tmp_path, target)
    rounded = {name: t if ".mlp.gate." in name else t.astype(target) for name, t in expected.items()}
    assert_same(stored_values(config, params), rounded)


def test_mtp_module_that_is_not_there_is_said(folder, caplog):
    checkpoints.change(folder, {name: None for name in load_file(folder / "model.safetensors") if ".layers.2." in name})
    with caplog.at_level(logging.WARNING, "mla_jax"):
        config, params = load_checkpoint(folder, jnp.float32)
    assert config.num_mtp_layers == 0 and params.mtp == ()
    assert f"{folder} holds no multi-token-prediction modules" in caplog.text and "drafting" in caplog.text


def test_mtp_module_that_the_config_does_not_mention_is_loaded(folder, caplog):
    entries = json.loads((folder / "config.json").read_text())
    del entries["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(entries))
    with caplog.at_level(logging.WARNING, "mla_jax"):
        config, params = load_checkpoint(folder, jnp.float32)
    assert config.num_mtp_layers == 1 and len(params.mtp) == 1
    assert "holds 1 multi-token-prediction modules, its config.json says 0" in caplog.text


def test_copies_and_buffers_that_deepseek_stores_are_passed_over(folder):
    checkpoints.change(
        folder,
        {
            "model.layers.2.embed_tokens.weight": torch.ones(40, 24),
            "model.layers.2.shared_head.head.weight": torch.ones(40, 24),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        },
    )
    config, params = load_checkpoint(folder, jnp.float32)
    assert config == SMALL and float(params.embed.max()) != 1


def damaged(folder, kind: str) -> None:
    """Makes one fault in a whole single-file checkpoint."""
    path, config = folder / "model.safetensors", folder / "config.json"
    size = path.stat().st_size
    fp8 = torch.zeros(24, 32, dtype=torch.float8_e4m3fn)
    tensors = {
        "missing": {LAYER: None},
        "missing expert": {EXPERT: None},
        "misshapen": {LAYER: torch.zeros(32, 24)},
        "misshapen expert": {EXPERT: torch.zeros(24, 10)},
        "extra": {"model.layers.0.self_attn.indexer.weight": torch.zeros(3)},
        "extra layer": {"model.layers.7.input_layernorm.weight": torch.zeros(24)},
        "no scale": {LAYER: fp8},
        "misshapen scale": {LAYER: fp8, f"{LAYER}_scale_inv": torch.ones(2, 1)},
        "fp8 norm": {"model.norm.weight": torch.zeros(24, dtype=torch.float8_e4m3fn)},
        "integers": {LAYER: torch.zeros(24, 32, dtype=torch.int32)},
    }
    if kind in tensors:
        checkpoints.change(folder, tensors[kind])
    elif kind in ("cut", "cut header"):
        with path.open("rb+") as file:
            file.truncate(size - 100 if kind == "cut" else 200)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    elif kind == "no weights":
        path.unlink()
    elif kind == "no config":
        config.unlink()
    elif kind in ("model type", "rope type", "quantization", "block size"):
        changes = {
            "model type": {"model_type": "mixtral"},
            "rope type": {"rope_scaling": {"type": "ntk"}},
            "quantization": {"quantization_config": {"quant_method": "awq"}},
            "block size": {"quantization_config": {"weight_block_size": [128]}},
        }
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes[kind]}))
    else:
        files, index = checkpoints.shard(folder, 3), folder / "model.safetensors.index.json"
        if kind == "no shard":
            (folder / files[LAYER]).unlink()
        elif kind == "cut shard":
            (folder / files[LAYER]).write_bytes((folder / files[LAYER]).read_bytes()[:-4])
        elif kind == "wrong shard":
            files[LAYER] = files[EXPERT]
            index.write_text(json.dumps({"weight_map": files}))
        else:
            index.write_text({"index text": "[1", "index list": "[]", "index map": '{"weight_map": [1]}'}[kind])


FAULTS = {
    "missing": (InputError, ["lacks the tensor " + LAYER]),
    "missing expert": (InputError, ["lacks the tensor " + EXPERT]),
    "misshapen": (InputError, ["model.safetensors", LAYER, "has shape (32, 24)", "calls for (24, 32)"]),
    "misshapen expert": (InputError, ["model.safetensors", EXPERT, "has shape (24, 10)", "calls for (10, 24)"]),
    "extra": (InputError, ["model.safetensors", "model.layers.0.self_attn.indexer.weight", "is not part of"]),
    "extra layer": (InputError, ["model.safetensors", "model.layers.7.input_layernorm.weight", "is not part of"]),
    "no scale": (InputError, ["lacks the tensor " + LAYER + "_scale_inv"]),
    "misshapen scale": (InputError, ["model.safetensors", LAYER + "_scale_inv", "has shape (2, 1)", "for (1, 1)"]),
    "fp8 norm": (NotImplementedError, ["model.safetensors", "model.norm.weight", "FP8"]),
    "integers": (NotImplementedError, ["model.safetensors", LAYER, "I32"]),
    "cut": (InputError, ["model.safetensors is cut off: tensor ", "download it again"]),
    "cut header": (InputError, ["model.safetensors is not a whole safetensors file"]),
    "empty": (InputError, ["model.safetensors is not a whole safetensors file"]),
    "text": (InputError, ["model.safetensors is not a whole safetensors file"]),
    "no weights": (InputError, ["holds neither model.safetensors nor model.safetensors.index.json"]),
    "no config": (InputError, ["config.json does not exist"]),
    "model type": (NotImplementedError, ["config.json", "model_type 'mixtral'"]),
    "rope type": (NotImplementedError, ["config.json", "RoPE type 'ntk'"]),
    "quantization": (NotImplementedError, ["config.json", "quant_method 'awq'"]),
    "block size": (InputError, ["config.json", "weight_block_size", "[128]"]),
    "no shard": (InputError, ["-of-00003.safetensors does not exist", "says it holds tensor "]),
    "cut shard": (InputError, ["-of-00003.safetensors is cut off: tensor "]),
    "wrong shard": (InputError, ["-of-00003.safetensors does not hold tensor " + LAYER]),
    "index text": (InputError, ["model.safetensors.index.json cannot be read as JSON"]),
    "index list": (InputError, ["model.safetensors.index.json must hold a JSON object"]),
    "index map": (InputError, ["model.safetensors.index.json is not a safetensors index"]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named_in_one_sentence(folder, kind):
    damaged(folder, kind)
    expected, words = FAULTS[kind]
    with pytest.raises(expected) as caught:
        load_checkpoint(folder, jnp.float32)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and message.endswith("."), message
    assert all(word in message for word in words), message


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        load_checkpoint(tmp_path / "nowhere")


def test_faults_of_shape_are_found_before_weights_are_read(folder, monkeypatch):
    damaged(folder, "misshapen")
    monkeypatch.setattr("mla_jax.model.tensor_file.StoredTensor.read", lambda self: pytest.fail(self.name))
    with pytest.raises(InputError):
        load_checkpoint(folder)


def test_saving_refuses_what_would_not_load_as_it_was(folder, tmp_path):
    config, params = load_checkpoint(folder, jnp.float32)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="shards"):
        save_checkpoint(tmp_path, config, params)
    with pytest.raises(ValueError, match="not of one model"):
        save_checkpoint(tmp_path / "a", dataclasses.replace(config, num_layers=1), params)
    with pytest.raises(ValueError, match="dtype must be one of"):
        save_checkpoint(tmp_path / "b", config, params, jnp.int8)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_config_says_the_dtype_of_what_was_saved(folder, tmp_path):
    config, params = load_checkpoint(folder, jnp.float32)
    save_checkpoint(tmp_path / "half", config, params)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert MLAConfig.from_hf(tmp_path / "half") == config
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert stored[LAYER].dtype == torch.bfloat16 and stored[ROUTER].dtype == torch.float32
