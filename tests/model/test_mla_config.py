"""MLAConfig from the config.json files that DeepSeek and its descendants publish."""

import dataclasses
import json
import math

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from mla_jax import InputError, MLAConfig
from mla_jax.config import MoEConfig, YarnConfig
from mla_jax.model.rope import inverse_frequencies

# The entries that matter of the published files.
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
YARN_V2 = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
YARN_V3 = {**YARN_V2, "mscale": 1.0, "mscale_all_dim": 1.0}
V2 = {
    **MLA,
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 16.0,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN_V2,
}
V2_LITE = {
    **V2,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
V3 = {
    **MLA,
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN_V3,
    "num_nextn_predict_layers": 1,
}
KIMI_K2 = {
    **V3,
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN_V3, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
}
MOONLIGHT = {
    **V3,
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "max_position_embeddings": 8192,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
}
PUBLISHED = {"V2": V2, "V2-Lite": V2_LITE, "V3": V3, "Kimi-K2": KIMI_K2, "Moonlight": MOONLIGHT}


@pytest.mark.parametrize("hf", PUBLISHED.values(), ids=PUBLISHED)
def test_rope_and_softmax_scale_are_those_of_transformers(hf):
    config = MLAConfig.from_hf(hf)
    cls = transformers.DeepseekV2Config if hf["model_type"] == "deepseek_v2" else transformers.DeepseekV3Config
    theirs = cls(**{key: value for key, value in hf.items() if key != "model_type"})
    scale = yarn_apply_mscale(theirs.rope_parameters, theirs.qk_head_dim**-0.5)
    assert config.sm_scale == pytest.approx(scale, rel=1e-12)
    if hf["rope_scaling"] is None:
        assert config.yarn is None
        expected = config.rope_theta ** -(np.arange(0, 64, 2) / 64)
        np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=3e-7)
    else:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
        np.testing.assert_allclose(inverse_frequencies(config), frequencies.numpy(), rtol=2e-7)
        assert config.yarn.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_the_published_softmax_scale_of_v3():
    assert MLAConfig.from_hf(V3).sm_scale == pytest.approx(0.135234, abs=1e-6)  # 192^−½ · (0.1 · ln 40 + 1)²


def test_experts_of_the_published_models():
    v2, lite, v3, kimi, moonlight = (MLAConfig.from_hf(hf) for hf in PUBLISHED.values())
    assert (v2.moe.scoring, v2.moe.num_groups, v2.moe.groups_per_token, v2.moe.normalize) == ("softmax", 8, 3, False)
    assert (lite.moe.scoring, lite.moe.num_groups, lite.q_lora_rank) == ("softmax", 1, None)
    assert (v3.moe.scoring, v3.moe.num_groups, v3.moe.groups_per_token, v3.moe.normalize) == ("sigmoid", 8, 4, True)
    assert (kimi.moe.num_experts, kimi.moe.routed_scaling, moonlight.moe.num_shared_experts) == (384, 2.827, 2)
    assert [v3.is_moe(i) for i in (0, 2, 3, 60, 61)] == [False, False, True, True, True]  # 61 is the MTP module
    assert {c.rope_layout for c in (v2, lite)} == {"pairs"}
    assert {c.rope_layout for c in (v3, kimi, moonlight)} == {"pairs_to_halves"}


@pytest.mark.parametrize("hf", PUBLISHED.values(), ids=PUBLISHED)
def test_round_trip_through_hugging_face_entries(hf):
    config = MLAConfig.from_hf(hf)
    assert MLAConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_both_spellings_of_rope_settings():
    newer = {**V3, "rope_parameters": {**YARN_V3, "rope_type": "yarn", "rope_theta": 10000}}
    del newer["rope_scaling"], newer["rope_theta"], newer["rope_parameters"]["type"]
    assert MLAConfig.from_hf(newer) == MLAConfig.from_hf(V3)
    plain = {**MOONLIGHT, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    del plain["rope_theta"], plain["rope_scaling"]
    assert MLAConfig.from_hf(plain) == MLAConfig.from_hf(MOONLIGHT)


@pytest.mark.parametrize(
    "change",
    [
        {"mscale": None},
        {"mscale_all_dim": None},
        {"mscale": None, "mscale_all_dim": None},
        {"truncate": False},
        {"attention_factor": 1.25},
        {"beta_fast": 1, "beta_slow": 1},
        {"factor": 1.0},
        {"beta_fast": None},
        {"original_max_position_embeddings": 64},
    ],
    ids=str,
)
def test_unusual_yarn_settings_are_those_of_transformers(change):
    settings = {key: value for key, value in {**YARN_V3, "mscale": 0.8, **change}.items() if value is not None}
    config = MLAConfig.from_hf({**V3, "rope_scaling": settings})
    theirs = transformers.DeepseekV3Config(rope_scaling=settings, max_position_embeddings=163840)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    np.testing.assert_allclose(inverse_frequencies(config), frequencies.numpy(), rtol=2e-7)
    assert config.yarn.amplitude == pytest.approx(amplitude, rel=1e-12)
    scale = yarn_apply_mscale(theirs.rope_parameters, 192**-0.5)
    assert config.sm_scale == pytest.approx(scale, rel=1e-12)
    assert MLAConfig.from_hf(config.to_hf()) == config


def test_experts_every_second_layer():
    config = MLAConfig.from_hf({**V3, "num_hidden_layers": 7, "moe_layer_freq": 2})
    assert [config.is_moe(i) for i in range(7)] == [False, False, False, False, True, False, True]
    assert config.is_moe(7)  # an MTP module has experts if the model has, whatever its index


def test_a_model_without_a_layer_of_experts_is_dense():
    """transformers writes its default of 256 experts into every config."""
    config = MLAConfig.from_hf({**V3, "first_k_dense_replace": 61})
    assert config.moe is None and not config.is_moe(61)


def one_sentence(error: Exception) -> str:
    message = str(error)
    assert "\n" not in message and message.endswith("."), message
    return message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": None}, "no entry 'vocab_size'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": 10**400}, "rope_theta must be a finite number"),
        ({"num_hidden_layers": 2**31}, "num_layers must be at most"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be an integer of at least 1, got 2.5"),
        ({"num_attention_heads": True}, "num_heads must be an integer of at least 1, got True"),
        ({"q_lora_rank": 0}, "q_lora_rank must be an integer of at least 1, got 0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number, got 'tiny'"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be positive"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": "40"}}, "factor must be a number, got '40'"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
        ({"n_group": 7}, "256 experts cannot stand in 7 equal groups"),
        ({"topk_group": 9}, "cannot pick 9 of 8 groups"),
        ({"n_group": 128, "topk_group": 2}, "cannot pick 8 experts among 2 groups of 2"),
        ({"n_group": 256, "topk_group": 8}, "groups of one expert"),
        ({"num_experts_per_tok": None}, "no entry 'num_experts_per_tok'"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be an integer of at least 1, got 0"),
        ({"num_nextn_predict_layers": -1}, "num_mtp_layers must be an integer of at least 0, got -1"),
    ],
)
def test_wrong_entries_are_named_in_one_sentence(change, words):
    with pytest.raises(InputError) as caught:
        MLAConfig.from_hf({**V3, **change})
    message = one_sentence(caught.value)
    assert message.startswith("config") and words in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not implemented, only 'deepseek_v2'"),
        ({"model_type": None}, "model_type None"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "RoPE type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4}, "rope_scaling": None}, "RoPE type 'linear'"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"model_type": "deepseek_v2"}, "topk_method 'noaux_tc'"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob"),
    ],
)
def test_what_is_not_implemented_is_named_in_one_sentence(change, words):
    with pytest.raises(NotImplementedError) as caught:
        MLAConfig.from_hf({**V3, **change})
    message = one_sentence(caught.value)
    assert message.startswith("config: ") and words in message


def test_files_are_named(tmp_path):
    for text, words in ((None, "does not exist"), ("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=words) as caught:
            MLAConfig.from_hf(tmp_path)
        assert str(tmp_path / "config.json") in one_sentence(caught.value)


def test_settings_are_checked_without_hugging_face_too():
    with pytest.raises(InputError, match="scoring"):
        MoEConfig(8, 2, 32, scoring="top")
    with pytest.raises(InputError, match="beta_slow must be positive"):
        YarnConfig(4.0, 4096, beta_slow=0)
    with pytest.raises(InputError, match="num_experts must be an integer"):
        MoEConfig(math.pi, 2, 32)
    config = dataclasses.replace(MLAConfig.from_hf(V2), rope_layout="halves")
    with pytest.raises(NotImplementedError, match="softmax scoring"):
        config.to_hf()
