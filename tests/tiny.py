"""A model small enough to compile in a second, with everything that the real one has."""

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax import MLAConfig
from mla_jax.model.checkpoint import build_params
from mla_jax.model.params import ModelParams

TINY = MLAConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=3,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    num_mtp_layers=1,
)


def tiny_params(seed: int = 0, config: MLAConfig = TINY) -> ModelParams:
    """Random weights in float32, large enough that the logits differ clearly."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        weight = rng.normal(1 if len(shape) == 1 else 0, 0.3 if len(shape) == 1 else shape[-1] ** -0.5, shape)
        return jnp.asarray(weight * (3 if "lm_head" in name else 1), jnp.float32)

    return build_params(config, draw)


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, TINY.vocab_size, n).tolist() for n in lengths]
