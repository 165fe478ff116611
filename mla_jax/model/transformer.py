"""The decoder: whole sequences, prompt chunks into a paged cache, and decode steps from it."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.cache.paged import PagedKVCache
from mla_jax.config import MLAConfig
from mla_jax.model.attend import Attend, attend_decode, attend_prefill, attend_self, schedule_for_layers
from mla_jax.model.layers import linear, mlp, rms_norm
from mla_jax.model.mla import project_latent, project_query
from mla_jax.model.moe import moe
from mla_jax.model.params import LayerParams, MLPParams, ModelParams, MoEParams, MTPParams


def forward(params: ModelParams, config: MLAConfig, tokens: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """Hidden states after the final norm for whole sequences, causal, plain form, without a cache.

    Args:
        tokens: int32 `[B, S]`, each from position 0 on, all of one length.

    Returns `[B, S, E]` in the dtype of the weights.

    Cost: the layers' products, and B·H·S² float32 scores at a time.

    Source: DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437); tested against transformers.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return decode_stack(params, config, tokens, positions, None, attend_self(config))[0]


def prefill(
    params: ModelParams,
    config: MLAConfig,
    tokens: Int[Array, "B S"],
    counts: Int[Array, "B"],
    prefix_lens: Int[Array, "B"],
    block_table: Int[Array, "B M"],
    cache: PagedKVCache,
) -> tuple[Float[Array, "B S E"], PagedKVCache]:
    """Runs the next chunk of each prompt, plain form, and leaves its latents in the cache.

    Args:
        tokens: `[B, S]`, of which the first counts[b] of request b are real; the rest may be anything valid.
        counts: int32 `[B]`, 0 … S.
        prefix_lens: int32 `[B]`, tokens of each request that the cache holds already.
        block_table: int32 `[B, M]`; the pages for prefix_lens + counts tokens must be owned.
        cache: at least config.num_layers layers.

    Returns:
        Hidden states `[B, S, E]` after the final norm (meaningless past counts) and the cache.

    Raises ValueError if the cache has fewer layers or other rows than the model.

    Cost: in every layer, keys and values per head of the prefix, made for a part of it at a time, so S should not be
    small: `decode` is the form for a few tokens. B·H·S² float32 scores at a time.
    """
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = prefix_lens[:, None] + offsets
    attend = attend_prefill(config, block_table, prefix_lens, positions, offsets < counts[:, None])
    return decode_stack(params, config, tokens, positions, cache, attend)


def decode(
    params: ModelParams,
    config: MLAConfig,
    tokens: Int[Array, "B S"],
    kv_lens: Int[Array, "B"],
    block_table: Int[Array, "B M"],
    cache: PagedKVCache,
    *,
    implementation: str | Sequence[str] | None = None,
    schedule: Any = None,
    fp8_queries: bool = False,
) -> tuple[Float[Array, "B S E"], PagedKVCache]:
    """Runs S new tokens of each request, absorbed form, reading everything from the cache.

    Args:
        tokens: `[B, S]`, the last S tokens of each request.
        kv_lens: int32 `[B]`, counting them. Tokens before the start of a request (kv_lens < S) are ignored.
        block_table, cache: as for `prefill`.
        implementation, schedule: as for `mla_decode`; by default one schedule is made here and shared by all layers.
        fp8_queries: static; rounds what `mla_decode` gets to e4m3, row by row (`quantize_queries`). For a cache in
            fp8_e4m3.

    Returns:
        Hidden states `[B, S, E]` after the final norm and the cache, the latents of the new tokens in it.

    Raises:
        ValueError: the cache has fewer layers or other rows than the model, or is not fp8_e4m3 under FP8 queries.
        NotImplementedError: the implementation cannot run here.

    Cost: every weight is read once, and in each layer what `mla_decode` reads. Donate the cache to the jitted function
    around this, or each step copies it.
    """
    positions = new_positions(kv_lens, tokens.shape[1])
    if schedule is None:
        schedule = schedule_for_layers(
            config, tokens, params.embed.dtype, cache, kv_lens, implementation, fp8_queries=fp8_queries
        )
    attend = attend_decode(
        config,
        block_table,
        kv_lens,
        positions,
        positions >= 0,
        implementation=implementation,
        schedule=schedule,
        fp8_queries=fp8_queries,
    )
    return decode_stack(params, config, tokens, positions, cache, attend)


def mtp_forward(
    p: MTPParams,
    params: ModelParams,
    config: MLAConfig,
    layer: int,
    hidden: Float[Array, "B S E"],
    next_tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    cache: Any,
    attend: Attend,
) -> tuple[Float[Array, "B S E"], Any]:
    """One multi-token-prediction module: from h[i] and token i + 1 to a state that predicts token i + 2.

    x = eh_proj([enorm(embed(token[i+1])), hnorm(h[i])]), one decoder layer, norm. The result goes through the main
    model's LM head (`lm_logits`), and serves as hidden for a further step.

    Args:
        layer: index of the module's latents in the cache; `config.num_layers` for the first.
        hidden: the main model's state after its final norm, or an earlier result of this function.
        positions: int32 `[B, S]`, i: the position of hidden, not of next_tokens.
        cache, attend: as the layers of the decoder get them; see `mla_jax.model.attend`.

    Cost: one layer, and a product of 2E × E.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
    """
    embedded = rms_norm(params.embed[next_tokens], p.enorm, config.rms_norm_eps)
    x = linear(jnp.concatenate([embedded, rms_norm(hidden, p.hnorm, config.rms_norm_eps)], axis=-1), p.eh_proj)
    x, cache = _layer(p.layer, config, layer, x, positions, cache, attend)
    return rms_norm(x, p.norm, config.rms_norm_eps), cache


def lm_logits(params: ModelParams, hidden: Float[Array, "*n E"]) -> Float[Array, "*n vocab"]:
    """Next-token logits `[…, vocab]` in float32. Cost: 2·E·vocab FLOP per state; reads the whole head."""
    return linear(hidden, params.lm_head).astype(jnp.float32)


def new_positions(kv_lens: Int[Array, "B"], num_new: int) -> Int[Array, "B S"]:
    """Positions of the last num_new tokens of each request; negative before its start."""
    return kv_lens[:, None] - num_new + jnp.arange(num_new, dtype=jnp.int32)[None]


def decode_stack(
    params: ModelParams,
    config: MLAConfig,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    cache: Any,
    attend: Attend,
) -> tuple[Float[Array, "B S E"], Any]:
    """Embedding, all layers, final norm, with any way to attend (`mla_jax.model.attend`)."""
    x = params.embed[tokens]
    for index, p in enumerate(params.layers):  # unrolled: XLA captures straight-line code, not loops
        x, cache = _layer(p, config, index, x, positions, cache, attend)
    return rms_norm(x, params.norm, config.rms_norm_eps), cache


def _layer(
    p: LayerParams,
    config: MLAConfig,
    index: int,
    x: Float[Array, "B S E"],
    positions: Int[Array, "B S"],
    cache: Any,
    attend: Attend,
) -> tuple[Float[Array, "B S E"], Any]:
    normed = rms_norm(x, p.input_layernorm, config.rms_norm_eps)
    query = project_query(p.attention.query, config, normed, positions)
    latents = project_latent(p.attention, config, normed, positions)
    heads, cache = attend(index, p.attention, query, latents, cache)
    x = x + linear(heads.reshape(*x.shape[:2], -1), p.attention.o_proj)
    return x + _feed_forward(p.mlp, config, rms_norm(x, p.post_attention_layernorm, config.rms_norm_eps)), cache


def _feed_forward(p: MLPParams | MoEParams, config: MLAConfig, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    if isinstance(p, MLPParams):
        return mlp(p, x)
    assert config.moe is not None  # no weights of experts without it
    return moe(p, config.moe, x)
