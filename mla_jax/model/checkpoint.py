"""Between checkpoint tensors under Hugging Face names and `ModelParams`."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mla_jax.config import MLAConfig
from mla_jax.model.mla import split_kv_b_proj
from mla_jax.model.params import AttentionParams, LayerParams, MLPParams, ModelParams, MTPParams, QueryParams

Get = Callable[[str, tuple[int, ...]], jax.Array]
"""Fetches the tensor of a name, which must have the shape."""


def build_params(config: MLAConfig, get: Get) -> ModelParams:
    """Assembles the weights. It asks `get` for every tensor that the model needs, once, and for no other."""
    vocab, e = config.vocab_size, config.hidden_size
    embed = get("model.embed_tokens.weight", (vocab, e))
    return ModelParams(
        embed=embed,
        layers=tuple(_layer(config, get, f"model.layers.{i}.") for i in range(config.num_layers)),
        norm=get("model.norm.weight", (e,)),
        lm_head=embed if config.tie_word_embeddings else get("lm_head.weight", (vocab, e)),
        mtp=tuple(_mtp(config, get, f"model.layers.{config.num_layers + i}.") for i in range(config.num_mtp_layers)),
    )


def tensor_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint for this config must hold."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> jax.Array:
        shapes[name] = shape
        return jnp.zeros(shape, jnp.float32)

    jax.eval_shape(lambda: build_params(config, note))  # nothing is allocated
    return shapes


def named_tensors(config: MLAConfig, params: ModelParams) -> Iterator[tuple[str, jax.Array]]:
    """The inverse of `build_params`: (Hugging Face name, tensor), for saving."""
    yield "model.embed_tokens.weight", params.embed
    yield "model.norm.weight", params.norm
    if not config.tie_word_embeddings:
        yield "lm_head.weight", params.lm_head
    for i, layer in enumerate(params.layers):
        yield from _named_layer(f"model.layers.{i}.", layer)
    for i, module in enumerate(params.mtp):
        prefix = f"model.layers.{config.num_layers + i}."
        yield f"{prefix}enorm.weight", module.enorm
        yield f"{prefix}hnorm.weight", module.hnorm
        yield f"{prefix}eh_proj.weight", module.eh_proj
        yield f"{prefix}shared_head.norm.weight", module.norm
        yield from _named_layer(prefix, module.layer)


def _layer(config: MLAConfig, get: Get, prefix: str) -> LayerParams:
    e, f = config.hidden_size, config.intermediate_size
    return LayerParams(
        input_layernorm=get(f"{prefix}input_layernorm.weight", (e,)),
        attention=_attention(config, get, f"{prefix}self_attn."),
        post_attention_layernorm=get(f"{prefix}post_attention_layernorm.weight", (e,)),
        mlp=MLPParams(
            gate_proj=get(f"{prefix}mlp.gate_proj.weight", (f, e)),
            up_proj=get(f"{prefix}mlp.up_proj.weight", (f, e)),
            down_proj=get(f"{prefix}mlp.down_proj.weight", (e, f)),
        ),
    )


def _attention(config: MLAConfig, get: Get, prefix: str) -> AttentionParams:
    e, h, v = config.hidden_size, config.num_heads, config.kv_lora_rank
    per_head = config.qk_nope_head_dim + config.v_head_dim
    w_uk, w_uv = split_kv_b_proj(get(f"{prefix}kv_b_proj.weight", (h * per_head, v)), h, config.qk_nope_head_dim)
    return AttentionParams(
        query=_query(config, get, prefix),
        kv_a_proj=get(f"{prefix}kv_a_proj_with_mqa.weight", (config.latent_dim, e)),
        kv_a_layernorm=get(f"{prefix}kv_a_layernorm.weight", (v,)),
        w_uk=w_uk,
        w_uv=w_uv,
        o_proj=get(f"{prefix}o_proj.weight", (e, h * config.v_head_dim)),
    )


def _query(config: MLAConfig, get: Get, prefix: str) -> QueryParams:
    e, rank, width = config.hidden_size, config.q_lora_rank, config.num_heads * config.qk_head_dim
    if rank is None:
        return QueryParams(get(f"{prefix}q_proj.weight", (width, e)), None, None, None)
    return QueryParams(
        q_proj=None,
        q_a_proj=get(f"{prefix}q_a_proj.weight", (rank, e)),
        q_a_layernorm=get(f"{prefix}q_a_layernorm.weight", (rank,)),
        q_b_proj=get(f"{prefix}q_b_proj.weight", (width, rank)),
    )


def _mtp(config: MLAConfig, get: Get, prefix: str) -> MTPParams:
    e = config.hidden_size
    return MTPParams(
        enorm=get(f"{prefix}enorm.weight", (e,)),
        hnorm=get(f"{prefix}hnorm.weight", (e,)),
        eh_proj=get(f"{prefix}eh_proj.weight", (e, 2 * e)),
        layer=_layer(config, get, prefix),
        norm=get(f"{prefix}shared_head.norm.weight", (e,)),
    )


def _named_layer(prefix: str, p: LayerParams) -> Iterator[tuple[str, jax.Array]]:
    yield f"{prefix}input_layernorm.weight", p.input_layernorm
    yield f"{prefix}post_attention_layernorm.weight", p.post_attention_layernorm
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"{prefix}mlp.{name}.weight", getattr(p.mlp, name)
    a, attn = p.attention, f"{prefix}self_attn."
    for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"):
        if (weight := getattr(a.query, name)) is not None:
            yield f"{attn}{name}.weight", weight
    yield f"{attn}kv_a_proj_with_mqa.weight", a.kv_a_proj
    yield f"{attn}kv_a_layernorm.weight", a.kv_a_layernorm
    kv_b = jnp.concatenate([a.w_uk, a.w_uv], axis=1)
    yield f"{attn}kv_b_proj.weight", kv_b.reshape(-1, kv_b.shape[-1])
    yield f"{attn}o_proj.weight", a.o_proj
