"""MLAConfig: the geometry of a DeepSeek-style decoder, read from a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mla_jax.errors import InputError

RopeLayout = Literal["pairs_to_halves", "halves"]


@dataclass(frozen=True)
class MLAConfig:
    """Sizes and constants of a DeepSeek-V3-style decoder with multi-head latent attention.

    Field names follow Hugging Face's `config.json`, without the words that say nothing
    (`num_hidden_layers` → `num_layers`, `num_nextn_predict_layers` → `num_mtp_layers`).
    Hashable, so it can be a static argument of a jitted function.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    num_mtp_layers: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_layout: RopeLayout = "pairs_to_halves"
    max_position: int = 4096
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.endswith(("_size", "_heads", "_dim", "_rank", "_layers")) and value is not None:
                smallest = 0 if name == "num_mtp_layers" else 1
                if not isinstance(value, int) or value < smallest:
                    raise InputError(f"MLAConfig.{name} must be an integer of at least {smallest}, got {value!r}.")
        if self.qk_rope_head_dim % 2:
            raise InputError(f"MLAConfig.qk_rope_head_dim must be even (RoPE rotates pairs), got "
                             f"{self.qk_rope_head_dim}.")

    @property
    def latent_dim(self) -> int:
        """D, numbers that one token leaves in the cache of one layer: latent + rotated key (576 in V3)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query in the plain (not absorbed) form."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def sm_scale(self) -> float:
        """Softmax scale. It belongs to the plain head width, so the absorbed form uses it unchanged."""
        return self.qk_head_dim**-0.5

    @property
    def num_cache_layers(self) -> int:
        """Layers that keep latents: the decoder's, then one per MTP module."""
        return self.num_layers + self.num_mtp_layers

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "MLAConfig":
        """Reads a Hugging Face config: a mapping, a `config.json`, or a folder that holds one.

        Raises InputError (a ValueError) for a missing or malformed entry, NotImplementedError for a legal
        config that is outside what this version runs (other model types, MoE layers, RoPE scaling).
        """
        if isinstance(source, Mapping):
            return cls._from_mapping(source, "config")
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        try:
            entries = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{path} does not exist; a DeepSeek checkpoint folder must hold config.json.") from None
        except (json.JSONDecodeError, UnicodeDecodeError, OSError) as e:
            raise InputError(f"{path} cannot be read as JSON ({e}).") from None
        if not isinstance(entries, dict):
            raise InputError(f"{path} must hold a JSON object, found {type(entries).__name__}.")
        return cls._from_mapping(entries, str(path))

    def to_hf(self) -> dict[str, Any]:
        """The entries of a Hugging Face `config.json` for this model, with dense MLPs in all layers."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "first_k_dense_replace": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "num_nextn_predict_layers": self.num_mtp_layers,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_interleave": self.rope_layout == "pairs_to_halves",
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    @classmethod
    def _from_mapping(cls, hf: Mapping[str, Any], where: str) -> "MLAConfig":
        _refuse_unsupported(hf, where)
        rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise NotImplementedError(f"{where}: RoPE type {rope_type!r} is not implemented, only 'default'.")

        def need(key: str) -> Any:
            if key not in hf:
                raise InputError(f"{where} has no entry {key!r}, which a DeepSeek-V3 config must have.")
            return hf[key]

        return cls(
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=need("num_attention_heads"),
            kv_lora_rank=need("kv_lora_rank"),
            qk_nope_head_dim=need("qk_nope_head_dim"),
            qk_rope_head_dim=need("qk_rope_head_dim"),
            v_head_dim=need("v_head_dim"),
            q_lora_rank=hf.get("q_lora_rank"),
            num_mtp_layers=hf.get("num_nextn_predict_layers") or 0,
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta", 10_000.0)),
            rope_layout="pairs_to_halves" if hf.get("rope_interleave", True) else "halves",
            max_position=int(hf.get("max_position_embeddings", 4096)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        )


def _refuse_unsupported(hf: Mapping[str, Any], where: str) -> None:
    model_type = hf.get("model_type")
    if model_type != "deepseek_v3":
        raise NotImplementedError(f"{where}: model_type {model_type!r} is not implemented, only 'deepseek_v3'.")
    layers = hf.get("num_hidden_layers", 0)
    dense = hf.get("first_k_dense_replace", layers)
    if hf.get("n_routed_experts") and isinstance(layers, int) and dense < layers:
        raise NotImplementedError(f"{where}: layers from {dense} on have mixture-of-experts MLPs, which are not "
                                  f"implemented; only dense MLPs (first_k_dense_replace = num_hidden_layers) run.")
    if hf.get("attention_bias"):
        raise NotImplementedError(f"{where}: attention_bias = true is not implemented.")
    if hf.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"{where}: hidden_act {hf['hidden_act']!r} is not implemented, only 'silu'.")
