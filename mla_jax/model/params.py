"""The weights of a DeepSeek-style decoder as a pytree. Linear weights are [out, in], as in checkpoints; those of
experts are [in, experts, out], which is how a ragged product reads them without a copy.

Shapes: E hidden size, F MLP size, FF = 2·F, X experts, C experts of one token, H heads, K and R a head's width
without and with RoPE, HQ = H·(K + R), Q query rank, V latent, D = V + R, W a head's value width, HW = H·W,
EE = 2·E.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryParams:
    """Query projection: one matrix, or (DeepSeek-V3) down to `q_lora_rank`, norm, up."""

    q_proj: Float[Array, "HQ E"] | None
    q_a_proj: Float[Array, "Q E"] | None
    q_a_layernorm: Float[Array, "Q"] | None
    q_b_proj: Float[Array, "HQ Q"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionParams:
    """One MLA layer. `w_uk`, `w_uv` are the two halves of the checkpoint's `kv_b_proj`, per head."""

    query: QueryParams
    kv_a_proj: Float[Array, "D E"]
    kv_a_layernorm: Float[Array, "V"]
    w_uk: Float[Array, "H K V"]
    w_uv: Float[Array, "H W V"]
    o_proj: Float[Array, "E HW"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLPParams:
    """SwiGLU: down(silu(gate x) * up x)."""

    gate_proj: Float[Array, "F E"]
    up_proj: Float[Array, "F E"]
    down_proj: Float[Array, "E F"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterParams:
    """Chooses experts; float32 whatever the rest is. `bias` (DeepSeek-V3) takes part in the choice alone."""

    weight: Float[Array, "X E"]
    bias: Float[Array, "X"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEParams:
    """Experts, each a SwiGLU of size F with gate and up side by side, and the shared ones as one wide MLP."""

    router: RouterParams
    gate_up_proj: Float[Array, "E X FF"]
    down_proj: Float[Array, "F X E"]
    shared: MLPParams | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One decoder layer."""

    input_layernorm: Float[Array, "E"]
    attention: AttentionParams
    post_attention_layernorm: Float[Array, "E"]
    mlp: MLPParams | MoEParams


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MTPParams:
    """One multi-token-prediction module; embedding and LM head are the main model's."""

    enorm: Float[Array, "E"]
    hnorm: Float[Array, "E"]
    eh_proj: Float[Array, "E EE"]
    layer: LayerParams
    norm: Float[Array, "E"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelParams:
    """A whole model; `lm_head` is `embed` itself when the config ties them.

    `kv_scales`, float32, are those of an `fp8_e4m3` latent cache: one per layer of the decoder, then one per MTP
    module; None means 1. No other cache format uses them.
    """

    embed: Float[Array, "vocab E"]
    layers: tuple[LayerParams, ...]
    norm: Float[Array, "E"]
    lm_head: Float[Array, "vocab E"]
    mtp: tuple[MTPParams, ...]
    kv_scales: Float[Array, "layers"] | None = None
