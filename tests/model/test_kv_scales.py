"""Scales of an FP8 cache beside a checkpoint: where they are found, what goes first, and what is refused."""

import json
from dataclasses import replace

import checkpoints
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import SMALL

from mla_jax import InputError, load_checkpoint, save_checkpoint
from mla_jax.model.kv_scales import SCALES_FILE, write_kv_scales

LAYERS = SMALL.num_cache_layers  # two of the decoder and one MTP module
KEY = "self_attn.attn.k_scale"
NAMES = [  # as vLLM and SGLang name them inside, as compressed-tensors and ModelOpt write them, and vLLM's older word
    KEY,
    "self_attn.mla_attn.k_scale",
    "self_attn.mla_attn.mla_attn.k_scale",
    "self_attn.attn_mqa.k_scale",
    "self_attn.k_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.kv_a_proj_with_mqa.k_scale",
    "self_attn.kv_scale",
]


@pytest.fixture
def folder(tmp_path):
    checkpoints.write(tmp_path, SMALL)
    return tmp_path


def add(folder, name: str, *scales: float, dtype=torch.float32) -> None:
    """One tensor per layer, from layer 0 on."""
    tensors = {f"model.layers.{i}.{name}": torch.tensor(scale, dtype=dtype) for i, scale in enumerate(scales)}
    checkpoints.change(folder, tensors)


def loaded(folder) -> list[float] | None:
    scales = load_checkpoint(folder, jnp.bfloat16)[1].kv_scales
    assert scales is None or (scales.dtype == jnp.float32 and scales.shape == (LAYERS,))
    return None if scales is None else scales.tolist()


def refused(folder) -> str:
    with pytest.raises(InputError) as error:
        load_checkpoint(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message and message.endswith("."), message
    return message


def test_without_any_there_are_none(folder):
    assert loaded(folder) is None


@pytest.mark.parametrize("name", NAMES)
def test_k_scales_of_a_checkpoint(folder, name):
    add(folder, name, 0.5, 0.125, 3.0)
    assert loaded(folder) == [0.5, 0.125, 3.0]


def test_mtp_modules_without_a_scale_have_1(folder):
    add(folder, KEY, 0.5, 0.125)
    assert loaded(folder) == [0.5, 0.125, 1.0]


def test_scales_may_be_vectors_of_one_and_in_bf16(folder):
    add(folder, KEY, [0.5], [0.125], [2.0], dtype=torch.bfloat16)
    assert loaded(folder) == [0.5, 0.125, 2.0]


def test_scales_of_values_queries_and_weights_are_passed_over(folder):
    for name in ("self_attn.attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.q_scale", "self_attn.prob_scale"):
        add(folder, name, 7.0, 7.0)
    assert loaded(folder) is None
    add(folder, KEY, 0.5, 0.25)
    assert loaded(folder) == [0.5, 0.25, 1.0]


def test_the_file_goes_before_tensors(folder):
    add(folder, KEY, 0.5, 0.125, 3.0)
    write_kv_scales(folder / SCALES_FILE, jnp.array([0.1, 0.2, 0.3]), text="some.txt")
    assert loaded(folder) == np.float32([0.1, 0.2, 0.3]).tolist()  # every bit survives the decimals
    assert json.loads((folder / SCALES_FILE).read_text())["text"] == "some.txt"


def test_shards_hold_scales_too(folder):
    add(folder, KEY, 0.5, 0.125, 3.0)
    checkpoints.shard(folder, 3)
    assert loaded(folder) == [0.5, 0.125, 3.0]


def test_save_keeps_them_and_removes_those_of_other_weights(folder, tmp_path):
    config, params = load_checkpoint(folder, jnp.float32)
    scales = jnp.array([0.1, 1e-6, 3e8], jnp.float32)
    ours = tmp_path / "ours"
    save_checkpoint(ours, config, replace(params, kv_scales=scales))
    assert loaded(ours) == scales.tolist()
    save_checkpoint(ours, config, params)
    assert loaded(ours) is None and not (ours / SCALES_FILE).exists()
    with pytest.raises(ValueError, match="kv_scales"):
        save_checkpoint(tmp_path / "short", config, replace(params, kv_scales=scales[:1]))
    assert not (tmp_path / "short").exists()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-39])
def test_a_scale_that_is_no_positive_number_is_refused(folder, bad):
    write_kv_scales(folder / SCALES_FILE, np.float32([0.5, bad, 1.0]))
    assert "scale of layer 1 is" in refused(folder) and "positive" in refused(folder)
    (folder / SCALES_FILE).unlink()
    add(folder, KEY, 0.5, bad, 1.0)
    assert "scale of layer 1 is" in refused(folder)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ((0.5,), "layers 0 to 1, and up to 1 more for MTP modules, got 1 of them, none for layer 1"),
        ((0.5,) * 4, "got 4 of them, one of them for layer 3"),
    ],
)
def test_a_wrong_number_of_scales_is_refused(folder, scales, words):
    write_kv_scales(folder / SCALES_FILE, np.float32(scales))
    assert words in refused(folder)
    (folder / SCALES_FILE).unlink()
    add(folder, KEY, *scales)
    assert words in refused(folder)


def test_two_scales_for_a_layer_and_scales_of_more_numbers_are_refused(folder):
    add(folder, KEY, 0.5, 0.5)
    add(folder, "self_attn.kv_scale", 0.5)
    assert "two scales for one layer" in refused(folder)
    add(folder, "self_attn.kv_scale", [0.5, 0.5])
    assert "must be one number, got shape (2,)" in refused(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("[1, 1, 1]", "must hold a JSON object"),
        ('{"scales": [1, 1, 1]}', "kv_format None"),
        ('{"kv_format": "int8", "scales": [1, 1, 1]}', "kv_format 'int8'"),
        ('{"kv_format": "fp8_e4m3"}', "list of float32 numbers"),
        ('{"kv_format": "fp8_e4m3", "scales": [1, true, 1]}', "list of float32 numbers"),
        ('{"kv_format": "fp8_e4m3", "scales": [1, "1", 1]}', "list of float32 numbers"),
        ('{"kv_format": "fp8_e4m3", "scales": []}', "got 0 of them"),
        ('{"kv_format": "fp8_e4m3", "scales": [1, 1, NaN]}', "layer 2 is nan"),
        (f'{{"kv_format": "fp8_e4m3", "scales": [1{"0" * 400}, 1, 1]}}', "list of float32 numbers"),
        ('{"kv_format": "fp8_e4m3", "scales": [1e39, 1, 1]}', "layer 0 is 1e+39"),
    ],
)
def test_a_damaged_file_is_one_sentence(folder, text, words):
    (folder / SCALES_FILE).write_text(text)
    assert words in refused(folder)


def test_writing_leaves_the_old_file_or_the_new_one(folder, monkeypatch):
    path = folder / SCALES_FILE
    write_kv_scales(path, np.float32([1, 2, 3]))
    before = path.read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(InputError, match="cannot be written \\(No space left"):
            write_kv_scales(path, np.float32([4, 5, 6]))
    assert path.read_text() == before and not list(folder.glob(".kv_scales*"))
    with pytest.raises(InputError, match="cannot be written \\(No such file"):
        write_kv_scales(folder / "nowhere" / SCALES_FILE, np.float32([1]))
    assert path.stat().st_mode & 0o777 == 0o644
