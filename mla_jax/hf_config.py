"""Between Hugging Face's `config.json` and `MLAConfig`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mla_jax.config import MLAConfig, MoEConfig, RopeLayout, Scoring, YarnConfig, check_integer, has_experts
from mla_jax.errors import InputError

# model_type → how its router scores experts. R1 and Moonlight say deepseek_v3, V2-Lite and V2.5 deepseek_v2.
MODEL_TYPES: dict[str, Scoring] = {"deepseek_v2": "softmax", "deepseek_v3": "sigmoid", "kimi_k2": "sigmoid"}


LARGEST = 1e30  # of a number in a config


def read_hf_config(source: Mapping[str, Any] | str | Path) -> MLAConfig:
    """See `MLAConfig.from_hf`."""
    if isinstance(source, Mapping):
        return _from_mapping(source, "config")
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    return _from_mapping(read_json_object(path), str(path))


def hf_entries(config: MLAConfig) -> dict[str, Any]:
    """The entries of a Hugging Face `config.json` for this model, of type deepseek_v2 or deepseek_v3."""
    is_v2 = config.rope_layout == "pairs"
    if config.moe is not None and is_v2 != (config.moe.scoring == "softmax"):
        raise NotImplementedError(
            f"No Hugging Face model has the RoPE layout {config.rope_layout!r} and "
            f"{config.moe.scoring} scoring of experts."
        )
    return {
        "architectures": ["DeepseekV2ForCausalLM" if is_v2 else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if is_v2 else "deepseek_v3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        **({"first_k_dense_replace": config.num_layers} if config.moe is None else _moe_to_hf(config.moe)),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        **({} if config.yarn is None else {"rope_scaling": _yarn_to_hf(config.yarn)}),
        **({} if is_v2 else {"rope_interleave": config.rope_layout == "pairs_to_halves"}),
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint folder. Raises InputError if there is none."""
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; a DeepSeek checkpoint folder must hold {path.name}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError, RecursionError) as e:
        raise InputError(f"{path} cannot be read as JSON ({e}).") from None
    if not isinstance(entries, dict):
        raise InputError(f"{path} must hold a JSON object, found {type(entries).__name__}.")
    return entries


class _Entries:
    """The entries of a config, which knows their file when one is missing or of the wrong kind."""

    def __init__(self, hf: Mapping[str, Any], where: str):
        self.hf, self.where = hf, where

    def need(self, key: str) -> Any:
        if self.hf.get(key) is None:
            raise InputError(f"{self.where} has no entry {key!r}, which a DeepSeek config must have.")
        return self.hf[key]

    def get(self, key: str, default: Any) -> Any:
        value = self.hf.get(key)
        return default if value is None else value

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.where}: {key} must be a number, got {value!r}.")
        if not abs(value) < LARGEST:  # NaN, Infinity, and integers that no float holds
            raise InputError(f"{self.where}: {key} must be a finite number, got {value!r:.40}.")
        return float(value)


def _from_mapping(hf: Mapping[str, Any], where: str) -> MLAConfig:
    _refuse_unsupported(hf, where)
    entries = _Entries(hf, where)
    rope = _rope_entries(entries)
    try:
        return MLAConfig(
            vocab_size=entries.need("vocab_size"),
            hidden_size=entries.need("hidden_size"),
            intermediate_size=entries.need("intermediate_size"),
            num_layers=entries.need("num_hidden_layers"),
            num_heads=entries.need("num_attention_heads"),
            kv_lora_rank=entries.need("kv_lora_rank"),
            qk_nope_head_dim=entries.need("qk_nope_head_dim"),
            qk_rope_head_dim=entries.need("qk_rope_head_dim"),
            v_head_dim=entries.need("v_head_dim"),
            q_lora_rank=hf.get("q_lora_rank"),
            num_mtp_layers=entries.get("num_nextn_predict_layers", 0),
            rms_norm_eps=entries.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", entries.number("rope_theta", 10_000.0)),
            rope_layout=_rope_layout(hf),
            max_position=entries.get("max_position_embeddings", 4096),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            yarn=_yarn(entries, rope),
            moe=_moe(entries),
        )
    except InputError as e:
        raise e if str(e).startswith(where) else InputError(f"{where}: {e}") from None


def _rope_layout(hf: Mapping[str, Any]) -> RopeLayout:
    if hf["model_type"] == "deepseek_v2":
        return "pairs"
    return "pairs_to_halves" if hf.get("rope_interleave", True) else "halves"


def _rope_entries(entries: _Entries) -> _Entries:
    """RoPE's own entries: `rope_scaling` of older checkpoints if it holds any, else `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        if rope := entries.hf.get(key):
            if not isinstance(rope, Mapping):
                raise InputError(f"{entries.where}: {key} must be an object, got {rope!r}.")
            return _Entries(rope, f"{entries.where}: {key}")
    return _Entries({}, entries.where)


def _yarn(entries: _Entries, rope: _Entries) -> YarnConfig | None:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "yarn"):
        raise NotImplementedError(
            f"{entries.where}: RoPE type {rope_type!r} is not implemented, only 'default' and 'yarn' are."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError(
            f"{entries.where}: partial_rotary_factor "
            f"{rope.hf['partial_rotary_factor']!r} is not implemented, only 1 is."
        )
    if rope_type == "default":
        return None
    longest = entries.number("max_position_embeddings", 4096)
    original = rope.number("original_max_position_embeddings", longest)
    return YarnConfig(
        factor=rope.number("factor", longest / original if original else 0),
        original_max_position=int(original),
        beta_fast=rope.number("beta_fast", 32) or 32.0,  # 0 means the default, as in transformers
        beta_slow=rope.number("beta_slow", 1) or 1.0,
        mscale=rope.number("mscale", 0),
        mscale_all_dim=rope.number("mscale_all_dim", 0),
        attention_factor=rope.number("attention_factor", 0) if rope.get("attention_factor", None) else None,
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_to_hf(yarn: YarnConfig) -> dict[str, Any]:
    entries = {
        "type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }
    if yarn.attention_factor is not None:
        entries["attention_factor"] = yarn.attention_factor
    return entries if yarn.truncate else {**entries, "truncate": False}


def _moe(entries: _Entries) -> MoEConfig | None:
    """None if no layer of the decoder has experts, whatever else the config says of them."""
    layers, dense = entries.need("num_hidden_layers"), entries.get("first_k_dense_replace", 0)
    every = entries.get("moe_layer_freq", 1)
    for name, value, smallest in (("first_k_dense_replace", dense, 0), ("moe_layer_freq", every, 1)):
        check_integer(f"{entries.where}: {name}", value, smallest)
    check_integer(f"{entries.where}: num_hidden_layers", layers, 1)
    if not any(has_experts(i, dense, every) for i in range(layers)) or not entries.get("n_routed_experts", 0):
        return None
    scoring = MODEL_TYPES[entries.hf["model_type"]]
    _refuse_unsupported_router(entries, scoring)
    grouped = scoring == "sigmoid" or entries.get("topk_method", "greedy") == "group_limited_greedy"
    return MoEConfig(
        num_experts=entries.need("n_routed_experts"),
        experts_per_token=entries.need("num_experts_per_tok"),
        intermediate_size=entries.need("moe_intermediate_size"),
        num_shared_experts=entries.get("n_shared_experts", 0),
        scoring=scoring,
        num_groups=entries.get("n_group", 1) if grouped else 1,
        groups_per_token=entries.get("topk_group", 1) if grouped else 1,
        normalize=bool(entries.get("norm_topk_prob", scoring == "sigmoid")),
        routed_scaling=entries.number("routed_scaling_factor", 1.0),
        first_dense=dense,
        layer_freq=every,
    )


def _moe_to_hf(moe: MoEConfig) -> dict[str, Any]:
    v2_method = "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    return {
        "first_k_dense_replace": moe.first_dense,
        "moe_layer_freq": moe.layer_freq,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.num_shared_experts,
        "scoring_func": moe.scoring,
        "topk_method": v2_method if moe.scoring == "softmax" else "noaux_tc",
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.routed_scaling,
    }


def _refuse_unsupported(hf: Mapping[str, Any], where: str) -> None:
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise NotImplementedError(
            f"{where}: model_type {model_type!r} is not implemented, only {', '.join(map(repr, MODEL_TYPES))} are."
        )
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise NotImplementedError(f"{where}: {key} = true is not implemented.")
    if hf.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"{where}: hidden_act {hf['hidden_act']!r} is not implemented, only 'silu' is.")


def _refuse_unsupported_router(entries: _Entries, scoring: Scoring) -> None:
    """What Hugging Face's class of the model type does not compute, or computes unlike DeepSeek's own code."""
    method = entries.get("topk_method", "greedy" if scoring == "softmax" else "noaux_tc")
    methods = ("greedy", "group_limited_greedy") if scoring == "softmax" else ("noaux_tc",)
    if method not in methods:
        raise NotImplementedError(
            f"{entries.where}: topk_method {method!r} is not implemented for "
            f"{entries.hf['model_type']}, only {', '.join(methods)}."
        )
    if (wanted := entries.get("scoring_func", scoring)) != scoring:
        raise NotImplementedError(
            f"{entries.where}: scoring_func {wanted!r} is not implemented for "
            f"{entries.hf['model_type']}, only {scoring!r}."
        )
    if scoring == "softmax" and entries.get("norm_topk_prob", False):
        raise NotImplementedError(
            f"{entries.where}: norm_topk_prob = true is not implemented for {entries.hf['model_type']}."
        )
