"""Between checkpoint tensors under Hugging Face names and `ModelParams`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mla_jax.config import MLAConfig, MoEConfig
from mla_jax.model.mla import split_kv_b_proj
from mla_jax.model.params import (
    AttentionParams,
    LayerParams,
    MLPParams,
    ModelParams,
    MoEParams,
    MTPParams,
    QueryParams,
    RouterParams,
)

Get = Callable[[str, tuple[int, ...]], jax.Array]
"""Fetches the tensor of a name, which must have the shape."""

GetExperts = Callable[[Sequence[Sequence[str]], tuple[int, int]], jax.Array]
"""Fetches P matrices [O, I] of each of X experts as one array [I, X, P·O], from the P names of each expert and the
shape [O, I]."""


@dataclass(frozen=True)
class _Source:
    get: Get
    get_experts: GetExperts


def build_params(config: MLAConfig, get: Get, get_experts: GetExperts | None = None) -> ModelParams:
    """Assembles the weights. It asks for every tensor that the model needs, once, and for no other.

    get_experts None means to fetch the experts through `get`, then to stack them, which takes twice their memory.
    """
    source = _Source(get, get_experts or _stacking(get))
    vocab, e, depth = config.vocab_size, config.hidden_size, config.num_layers
    embed = get("model.embed_tokens.weight", (vocab, e))
    return ModelParams(
        embed=embed,
        layers=tuple(_layer(config, source, i) for i in range(depth)),
        norm=get("model.norm.weight", (e,)),
        lm_head=embed if config.tie_word_embeddings else get("lm_head.weight", (vocab, e)),
        mtp=tuple(_mtp(config, source, depth + i) for i in range(config.num_mtp_layers)),
    )


def tensor_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint for this config must hold."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> jax.Array:
        shapes[name] = shape
        return jnp.zeros(shape, jnp.float32)

    def note_experts(names: Sequence[Sequence[str]], shape: tuple[int, int]) -> jax.Array:
        shapes.update((name, shape) for parts in names for name in parts)
        return jnp.zeros((shape[1], len(names), len(names[0]) * shape[0]), jnp.float32)

    jax.eval_shape(lambda: build_params(config, note, note_experts))  # nothing is allocated
    return shapes


def in_float32(name: str) -> bool:
    """True for the tensors of a router, which are never rounded: it would change which experts are chosen."""
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


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


def _stacking(get: Get) -> GetExperts:
    def get_experts(names: Sequence[Sequence[str]], shape: tuple[int, int]) -> jax.Array:
        experts = [jnp.concatenate([get(name, shape) for name in parts]).T for parts in names]
        return jnp.stack(experts, axis=1)

    return get_experts


def _layer(config: MLAConfig, source: _Source, index: int) -> LayerParams:
    e, prefix = config.hidden_size, f"model.layers.{index}."
    if config.moe is not None and config.is_moe(index):
        feed_forward: MLPParams | MoEParams = _moe(config.moe, e, source, f"{prefix}mlp.")
    else:
        feed_forward = _mlp(e, config.intermediate_size, source.get, f"{prefix}mlp.")
    return LayerParams(
        input_layernorm=source.get(f"{prefix}input_layernorm.weight", (e,)),
        attention=_attention(config, source.get, f"{prefix}self_attn."),
        post_attention_layernorm=source.get(f"{prefix}post_attention_layernorm.weight", (e,)),
        mlp=feed_forward,
    )


def _mlp(e: int, f: int, get: Get, prefix: str) -> MLPParams:
    return MLPParams(
        gate_proj=get(f"{prefix}gate_proj.weight", (f, e)),
        up_proj=get(f"{prefix}up_proj.weight", (f, e)),
        down_proj=get(f"{prefix}down_proj.weight", (e, f)),
    )


def _moe(moe: MoEConfig, e: int, source: _Source, prefix: str) -> MoEParams:
    x, f = moe.num_experts, moe.intermediate_size
    experts = [f"{prefix}experts.{i}." for i in range(x)]
    has_bias, shared = moe.scoring == "sigmoid", moe.num_shared_experts * f
    return MoEParams(
        router=RouterParams(
            weight=source.get(f"{prefix}gate.weight", (x, e)),
            bias=source.get(f"{prefix}gate.e_score_correction_bias", (x,)) if has_bias else None,
        ),
        gate_up_proj=source.get_experts([(f"{p}gate_proj.weight", f"{p}up_proj.weight") for p in experts], (f, e)),
        down_proj=source.get_experts([(f"{p}down_proj.weight",) for p in experts], (e, f)),
        shared=_mlp(e, shared, source.get, f"{prefix}shared_experts.") if shared else None,
    )


def _attention(config: MLAConfig, get: Get, prefix: str) -> AttentionParams:
    e, h, v = config.hidden_size, config.num_heads, config.kv_lora_rank
    kv_b_proj = get(f"{prefix}kv_b_proj.weight", (h * (config.qk_nope_head_dim + config.v_head_dim), v))
    w_uk, w_uv = split_kv_b_proj(kv_b_proj, h, config.qk_nope_head_dim)
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


def _mtp(config: MLAConfig, source: _Source, index: int) -> MTPParams:
    get, e, prefix = source.get, config.hidden_size, f"model.layers.{index}."
    return MTPParams(
        enorm=get(f"{prefix}enorm.weight", (e,)),
        hnorm=get(f"{prefix}hnorm.weight", (e,)),
        eh_proj=get(f"{prefix}eh_proj.weight", (e, 2 * e)),
        layer=_layer(config, source, index),
        norm=get(f"{prefix}shared_head.norm.weight", (e,)),
    )


def _named_layer(prefix: str, p: LayerParams) -> Iterator[tuple[str, jax.Array]]:
    yield f"{prefix}input_layernorm.weight", p.input_layernorm
    yield f"{prefix}post_attention_layernorm.weight", p.post_attention_layernorm
    if isinstance(p.mlp, MLPParams):
        yield from _named_mlp(f"{prefix}mlp.", p.mlp)
    else:
        yield from _named_moe(f"{prefix}mlp.", p.mlp)
    a, attn = p.attention, f"{prefix}self_attn."
    for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"):
        if (weight := getattr(a.query, name)) is not None:
            yield f"{attn}{name}.weight", weight
    yield f"{attn}kv_a_proj_with_mqa.weight", a.kv_a_proj
    yield f"{attn}kv_a_layernorm.weight", a.kv_a_layernorm
    kv_b = jnp.concatenate([a.w_uk, a.w_uv], axis=1)
    yield f"{attn}kv_b_proj.weight", kv_b.reshape(-1, kv_b.shape[-1])
    yield f"{attn}o_proj.weight", a.o_proj


def _named_mlp(prefix: str, p: MLPParams) -> Iterator[tuple[str, jax.Array]]:
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield f"{prefix}{name}.weight", getattr(p, name)


def _named_moe(prefix: str, p: MoEParams) -> Iterator[tuple[str, jax.Array]]:
    yield f"{prefix}gate.weight", p.router.weight
    if p.router.bias is not None:
        yield f"{prefix}gate.e_score_correction_bias", p.router.bias
    f, num_experts, _ = p.down_proj.shape
    for i in range(num_experts):
        yield f"{prefix}experts.{i}.gate_proj.weight", p.gate_up_proj[:, i, :f].T
        yield f"{prefix}experts.{i}.up_proj.weight", p.gate_up_proj[:, i, f:].T
        yield f"{prefix}experts.{i}.down_proj.weight", p.down_proj[:, i].T
    if p.shared is not None:
        yield from _named_mlp(f"{prefix}shared_experts.", p.shared)
