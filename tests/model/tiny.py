"""Small random DeepSeek models, made and saved by transformers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

YARN = {  # two mscales that differ, so that both the softmax scale and the amplitude of cos and sin matter
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


@dataclass(frozen=True)
class Tiny:
    """What varies. Every model has two layers; with experts, the first is dense all the same."""

    version: int = 3
    yarn: bool = False
    q_lora: bool = False
    moe: bool = False
    tied: bool = False
    interleaved: bool = True
    shared_experts: int = 1
    mtp: bool = False

    def __str__(self) -> str:
        parts = [
            f"v{self.version}",
            "yarn" if self.yarn else "plain",
            "q-lora" if self.q_lora else "q-full",
            "moe" if self.moe else "dense",
        ]
        return "-".join(parts + ["tied"] * self.tied)

    def hf_config(self) -> transformers.PreTrainedConfig:
        sizes: dict[str, Any] = {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 20,
            "bos_token_id": 0,
            "eos_token_id": None,
            "routed_scaling_factor": 2.5,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "max_position_embeddings": 4096,
        }
        rope = YARN if self.yarn else {"rope_type": "default", "rope_theta": 10_000.0}
        varying: dict[str, Any] = {
            "rope_parameters": dict(rope),
            "q_lora_rank": 24 if self.q_lora else None,
            "first_k_dense_replace": 1 if self.moe else 2,
            "tie_word_embeddings": self.tied,
            "n_shared_experts": self.shared_experts,
        }
        if self.version == 2:
            method = "group_limited_greedy" if self.q_lora else "greedy"  # as V2 and V2-Lite
            return transformers.DeepseekV2Config(**sizes, **varying, topk_method=method)
        return transformers.DeepseekV3Config(
            **sizes, **varying, rope_interleave=self.interleaved, num_nextn_predict_layers=int(self.mtp)
        )

    def make(self, folder: Path, **saving: Any) -> Any:
        """Writes a checkpoint with weights large enough for mistakes to show; returns the model."""
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(self.hf_config(), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.state_dict().items():
                if name.endswith("norm.weight"):
                    weight.normal_(1, 0.2)
                elif name.endswith("e_score_correction_bias"):
                    weight.normal_(0, 0.3)
                else:
                    weight.normal_(0, weight.shape[-1] ** -0.5)
            model.lm_head.weight *= 0.5
        model.save_pretrained(folder, **saving)
        return model
