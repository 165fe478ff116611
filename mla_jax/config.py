"""MLAConfig: the geometry of a DeepSeek-style decoder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mla_jax.errors import InputError

RopeLayout = Literal["pairs_to_halves", "halves", "pairs"]
"""How rotated pairs lie. `pairs_to_halves` (V3): side by side in what the weights produce, all first members before
all second ones in the cache; `halves`: so in both; `pairs` (V2): side by side in both."""

Scoring = Literal["softmax", "sigmoid"]


MAX_LAYERS = 10_000  # far beyond any model; a larger number is a broken file


@dataclass(frozen=True)
class YarnConfig:
    """YaRN: RoPE stretched to a context `factor` times longer (arXiv 2309.00071), DeepSeek's two mscales.

    0 for an mscale means that the checkpoint does not give it. `attention_factor`, where given, replaces the
    amplitude that follows from the two.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position"):
            if not getattr(self, name) >= 1:
                raise InputError(f"YarnConfig.{name} must be at least 1, got {getattr(self, name)!r}.")
        for name in ("beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise InputError(f"YarnConfig.{name} must be positive, got {getattr(self, name)!r}.")

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by: (0.1 · mscale_all_dim · ln factor + 1)²."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers: how many experts there are, and how a token chooses among them.

    Experts stand in `num_groups` equal groups; a token picks `groups_per_token` groups, then
    `experts_per_token` experts among theirs. A group counts as much as its best expert (softmax scoring, V2) or
    its two best together (sigmoid, V3, where a learned bias takes part in the choice, but not in the weights).
    The layers from `first_dense` on have experts, if their index is a multiple of `layer_freq`.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int = 0
    scoring: Scoring = "sigmoid"
    num_groups: int = 1
    groups_per_token: int = 1
    normalize: bool = True
    routed_scaling: float = 1.0
    first_dense: int = 0
    layer_freq: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            smallest = 0 if f.name in ("num_shared_experts", "first_dense") else 1
            if f.type is int:
                check_integer(f"MoEConfig.{f.name}", getattr(self, f.name), smallest)
        if self.scoring not in ("softmax", "sigmoid"):
            raise InputError(f"MoEConfig.scoring must be 'softmax' or 'sigmoid', got {self.scoring!r}.")
        per_group, left_over = divmod(self.num_experts, self.num_groups)
        if left_over:
            raise InputError(f"MoEConfig: {self.num_experts} experts cannot stand in {self.num_groups} equal groups.")
        if self.groups_per_token > self.num_groups:
            raise InputError(f"MoEConfig: a token cannot pick {self.groups_per_token} of {self.num_groups} groups.")
        if self.experts_per_token > self.groups_per_token * per_group:
            raise InputError(
                f"MoEConfig: a token cannot pick {self.experts_per_token} experts among "
                f"{self.groups_per_token} groups of {per_group}."
            )
        if self.scoring == "sigmoid" and self.num_groups > 1 and per_group < 2:
            raise InputError(
                "MoEConfig: sigmoid scoring rates a group by its two best experts, so groups of "
                "one expert are not possible."
            )


@dataclass(frozen=True)
class MLAConfig:
    """Sizes and constants of a DeepSeek-style decoder with multi-head latent attention.

    Field names follow Hugging Face's `config.json`, without the words that say nothing
    (`num_hidden_layers` → `num_layers`, `num_nextn_predict_layers` → `num_mtp_layers`).
    Hashable, so it can be a static argument of a jitted function. `yarn` None is plain RoPE, `moe` None a model
    of dense MLPs.
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
    yarn: YarnConfig | None = None
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        sizes = ("_size", "_heads", "_dim", "_rank", "_layers", "max_position")
        for name, value in vars(self).items():
            if name.endswith(sizes) and (value is not None or name != "q_lora_rank"):
                check_integer(f"MLAConfig.{name}", value, 0 if name == "num_mtp_layers" else 1)
        if self.num_layers > MAX_LAYERS:
            raise InputError(f"MLAConfig.num_layers must be at most {MAX_LAYERS}, got {self.num_layers}.")
        if self.qk_rope_head_dim % 2:
            raise InputError(
                f"MLAConfig.qk_rope_head_dim must be even (RoPE rotates pairs), got {self.qk_rope_head_dim}."
            )
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise InputError(f"MLAConfig.{name} must be positive, got {getattr(self, name)!r}.")

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
        """Softmax scale, YaRN's mscale² in it.

        It belongs to the plain head width, so the absorbed form uses it unchanged.
        """
        return self.qk_head_dim**-0.5 * (1.0 if self.yarn is None else self.yarn.softmax_factor)

    @property
    def num_cache_layers(self) -> int:
        """Layers that keep latents: the decoder's, then one per MTP module."""
        return self.num_layers + self.num_mtp_layers

    def is_moe(self, layer: int) -> bool:
        """True if the layer has experts. MTP modules (from num_layers on) have them if the model has any."""
        if self.moe is None:
            return False
        return layer >= self.num_layers or has_experts(layer, self.moe.first_dense, self.moe.layer_freq)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "MLAConfig":
        """Reads a Hugging Face config: a mapping, a `config.json`, or a folder that holds one.

        Model types deepseek_v2, deepseek_v3 and kimi_k2; RoPE settings in `rope_parameters` or, older,
        `rope_scaling` and `rope_theta`. Raises InputError (a ValueError) for a missing or malformed entry,
        NotImplementedError for a legal config that is outside what this version runs.
        """
        from mla_jax.hf_config import read_hf_config  # imports this module

        return read_hf_config(source)

    def to_hf(self) -> dict[str, Any]:
        """The entries of a Hugging Face `config.json` for this model, of type deepseek_v2 or deepseek_v3."""
        from mla_jax.hf_config import hf_entries

        return hf_entries(self)


def has_experts(layer: int, first_dense: int, layer_freq: int) -> bool:
    """True if a decoder layer has experts."""
    return layer >= first_dense and layer % layer_freq == 0


def check_integer(name: str, value: Any, smallest: int) -> None:
    """Raises InputError for a value that is no integer of at least `smallest`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise InputError(f"{name} must be an integer of at least {smallest}, got {value!r}.")
