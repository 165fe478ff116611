"""One multi-head latent attention layer, in the absorbed form (decode) and the plain form (prefill).

Both use the same weights. With k_nope = W_UK c and v = W_UV c for a cached latent c, the plain form expands every
latent into keys and values per head; the absorbed form moves W_UK to the query and W_UV behind the attention, so
that the latent itself is key and value: q_nopeᵀ (W_UK c) = (W_UKᵀ q_nope)ᵀ c.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.config import MLAConfig
from mla_jax.errors import InputError
from mla_jax.model.layers import einsum, linear, rms_norm
from mla_jax.model.params import AttentionParams, QueryParams
from mla_jax.model.rope import apply_rope, rope_angles

LATENT_NORM_EPS = 1e-6  # DeepSeek's code fixes it here, whatever the config's rms_norm_eps says


def project_query(
    p: QueryParams, config: MLAConfig, x: Float[Array, "B S E"], positions: Int[Array, "B S"]
) -> tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]]:
    """Query heads: the part without position, and the rotated part."""
    if p.q_proj is not None:
        q = linear(x, p.q_proj)
    else:
        assert p.q_a_proj is not None and p.q_a_layernorm is not None and p.q_b_proj is not None  # all or none
        q = linear(rms_norm(linear(x, p.q_a_proj), p.q_a_layernorm, LATENT_NORM_EPS), p.q_b_proj)
    q = q.reshape(*x.shape[:2], config.num_heads, config.qk_head_dim)
    q_nope, q_rope = q[..., : config.qk_nope_head_dim], q[..., config.qk_nope_head_dim :]
    return q_nope, apply_rope(config, q_rope, rope_angles(config, positions)[:, :, None])


def project_latent(
    p: AttentionParams, config: MLAConfig, x: Float[Array, "B S E"], positions: Int[Array, "B S"]
) -> Float[Array, "B S D"]:
    """What a token leaves in the cache: the normed latent, then the rotated key that all heads share."""
    down = linear(x, p.kv_a_proj)
    latent = rms_norm(down[..., : config.kv_lora_rank], p.kv_a_layernorm, LATENT_NORM_EPS)
    rope_key = apply_rope(config, down[..., config.kv_lora_rank :], rope_angles(config, positions))
    return jnp.concatenate([latent, rope_key], axis=-1)


def split_kv_b_proj(
    kv_b_proj: Float[Array, "HKW V"], num_heads: int, qk_nope_head_dim: int
) -> tuple[Float[Array, "H K V"], Float[Array, "H W V"]]:
    """W_UK `[H, K, V]` and W_UV `[H, W, V]` from a checkpoint's `kv_b_proj.weight`.

    Args:
        kv_b_proj: `[H·(K + W), V]`, out × in as checkpoints hold it: for each head K rows of keys, then W of values.
        num_heads: H.
        qk_nope_head_dim: K, width of a head's key without its rotated part.

    Raises ValueError if the rows cannot be divided so.
    """
    per, left = divmod(kv_b_proj.shape[0], num_heads)
    if left or not 0 < qk_nope_head_dim < per:
        raise InputError(
            f"kv_b_proj must be [H·(K + W), V] with {num_heads} heads and K = {qk_nope_head_dim}, got "
            f"{kv_b_proj.shape}; is it transposed?"
        )
    per_head = kv_b_proj.reshape(num_heads, -1, kv_b_proj.shape[-1])
    return per_head[:, :qk_nope_head_dim], per_head[:, qk_nope_head_dim:]


def absorb_query(
    q_nope: Float[Array, "B S H K"], q_rope: Float[Array, "B S H R"], w_uk: Float[Array, "H K V"]
) -> Float[Array, "B S H V+R"]:
    """The query `[B, S, H, V + R]` that `mla_decode` takes: W_UKᵀ q_nope, then q_rope.

    `mla_decode` then needs `sm_scale` of the plain head, (K + R)^−½ (`MLAConfig.sm_scale`, with YaRN's factor): its
    default belongs to the width V + R. Cost: 2·B·S·H·K·V FLOP.

    Args:
        q_nope: query heads without position; q_rope: their rotated part, the rotation applied.
        w_uk: from `split_kv_b_proj`.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
    """
    return jnp.concatenate([einsum("bshk,hkv->bshv", q_nope, w_uk), q_rope], axis=-1)


def expand_output(out: Float[Array, "B S H V"], w_uv: Float[Array, "H W V"]) -> Float[Array, "B S H W"]:
    """Value heads `[B, S, H, W]` from what `mla_decode` returns with d_v = V: W_UV out. Cost: 2·B·S·H·W·V FLOP."""
    return einsum("bshv,hwv->bshw", out, w_uv)


def expand_latents(
    p: AttentionParams, config: MLAConfig, latents: Float[Array, "B T D"]
) -> tuple[tuple[Float[Array, "B T H K"], Float[Array, "B T R"]], Float[Array, "B T H W"]]:
    """The keys (per head without position, and the rotated part that heads share) and the values of cache rows."""
    latent, rope_key = latents[..., : config.kv_lora_rank], latents[..., config.kv_lora_rank :]
    return (einsum("btv,hkv->bthk", latent, p.w_uk), rope_key), einsum("btv,hwv->bthw", latent, p.w_uv)


def plain_scores(
    query: tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]],
    keys: tuple[Float[Array, "B T H K"], Float[Array, "B T R"]],
) -> Float[Array, "B H S T"]:
    """q · k of every query and key in the plain form, float32, not scaled."""
    f32 = {"preferred_element_type": jnp.float32}
    nope, rope = "bshk,bthk->bhst", "bshr,btr->bhst"
    return einsum(nope, query[0], keys[0], **f32) + einsum(rope, query[1], keys[1], **f32)


def plain_attention(
    p: AttentionParams,
    config: MLAConfig,
    query: tuple[Float[Array, "B S H K"], Float[Array, "B S H R"]],
    latents: Float[Array, "B T D"],
    seen: Bool[Array, "B S T"],
) -> tuple[Float[Array, "B S H W"], Float[Array, "B H S"]]:
    """The plain form: latents become keys and values per head, then ordinary attention.

    Returns value heads and the log-sum-exp (natural, float32), ready for `merge_states`. A row that sees no key
    has out 0 and lse −inf. Cheaper than the absorbed form when there are many queries: 2·(K + R + W) FLOP a
    query, key and head instead of 2·(2V + R), plus 2·V·(K + W) a key and head for the expansion. Temporaries:
    B·H·S·T float32 scores.
    """
    keys, values = expand_latents(p, config, latents)
    scores = jnp.where(seen[:, None], plain_scores(query, keys) * config.sm_scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    return einsum("bhst,bthw->bshw", weights.astype(values.dtype), values), lse
