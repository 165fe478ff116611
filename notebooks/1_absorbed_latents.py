# %% [markdown]
# # From multi-head attention to the absorbed latent form
#
# Multi-head attention caches a key and a value per head. MLA caches one latent $c$ and one rotated key $k^R$ per
# token, and every head makes its own key and value from them: $k_h = [W^{UK}_h c,\ k^R]$ and $v_h = W^{UV}_h c$.
#
# Nothing forces you to compute $k_h$ and $v_h$. Since $q^\top (W^{UK} c) = (W^{UK\top} q)^\top c$, the matrix can move
# to the query, and $W^{UV}$ behind the attention: the latent is then key *and* value of all heads. Below, both forms
# run with the trained weights of the demo model.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_jax import FORMATS, PagedKVCache, PagePool, absorb_query, expand_output, load_checkpoint, mla_decode
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model.attend import attend_self
from mla_jax.model.mla import expand_latents, plain_attention, plain_scores
from mla_jax.model.transformer import decode_stack

config, params = load_checkpoint(CHECKPOINT, jnp.float32)
text = HELDOUT.read_bytes()[:192]
print(
    f"{config.num_heads} heads; a cached row: {config.kv_lora_rank} (latent) + {config.qk_rope_head_dim} (rotated key)"
)
print(text[-72:].decode())

# %% [markdown]
# A forward pass over 192 bytes of text, which takes down the queries and the latents of one layer on its way.

# %%
LAYER = 2
seen = {}


def attend(layer, weights, query, latents, cache):
    """Ordinary self-attention that remembers what it was given."""
    seen[layer] = query, latents
    return attend_self(config)(layer, weights, query, latents, cache)


tokens = jnp.asarray(list(text), jnp.int32)[None]
positions = jnp.arange(len(text), dtype=jnp.int32)[None]
decode_stack(params, config, tokens, positions, None, attend)

(q_nope, q_rope), latents = seen[LAYER]
q_nope, q_rope = q_nope[:, -1:], q_rope[:, -1:]  # the newest token asks
weights = params.layers[LAYER].attention
print(f"q_nope {q_nope.shape}, q_rope {q_rope.shape}, latents {latents.shape}")

# %% [markdown]
# **Plain form.** Latents become keys and values per head; the rest is multi-head attention.

# %%
keys, values = expand_latents(weights, config, latents)
scores_plain = plain_scores((q_nope, q_rope), keys)
out_plain, lse_plain = plain_attention(weights, config, (q_nope, q_rope), latents, jnp.ones((1, 1, len(text)), bool))
print(f"keys {keys[0].shape} and {keys[1].shape}, values {values.shape} -> out {out_plain.shape}")

# %% [markdown]
# **Absorbed form.** One query of 576 numbers per head, one row of 576 numbers per token, which all heads share. This is
# what decodes from a paged cache.

# %%
pool, _ = PagePool.create(num_pages=8, max_seqs=1, max_pages_per_seq=4).extend(jnp.array([len(text)], jnp.int32))
cache = PagedKVCache.create(1, 8, config.latent_dim, "fp32").write(0, pool.block_table, positions, latents)

q = absorb_query(q_nope, q_rope, weights.w_uk)
out, lse_absorbed = mla_decode(
    q, cache.layers[0], pool.block_table, pool.kv_lens, d_v=config.kv_lora_rank, sm_scale=config.sm_scale
)
out_absorbed = expand_output(out, weights.w_uv)

scores_absorbed = jnp.einsum("bshd,btd->bhst", q, latents)
print(f"q {q.shape} -> out {out.shape} -> {out_absorbed.shape}")
print(f"largest |difference|: output {jnp.abs(out_plain - out_absorbed).max():.1e} of {jnp.abs(out_plain).max():.2f}")
print(f"                      log-sum-exp {jnp.abs(lse_plain - lse_absorbed).max():.1e} of {lse_plain.max():.2f}")

# %% [markdown]
# The scores agree too, so every head looks at the same bytes in both forms:

# %%
last = 64  # bytes shown
probability = {
    name: jax.nn.softmax(scores[0, :, 0] * config.sm_scale, axis=-1)
    for name, scores in {"plain": scores_plain, "absorbed": scores_absorbed}.items()
}
fig, axes = plt.subplots(2, 1, figsize=(9, 5.4), sharex=True)
for ax, (name, p) in zip(axes, probability.items(), strict=True):
    image = ax.imshow(np.asarray(p[:, -last:]), aspect="auto", cmap="magma_r", vmin=0, vmax=0.5)
    ax.set(title=f"{name} form: what each head reads", ylabel="head")
letters = [chr(c) if c > 32 else "␣" for c in text[-last:]]
axes[1].set_xticks(range(last), letters, family="monospace", fontsize=8)
axes[1].set_xlabel("cached byte (the last one asks)")
fig.colorbar(image, ax=axes, label="attention weight", extend="max")
plt.show()
print(f"largest difference of a weight: {jnp.abs(probability['plain'] - probability['absorbed']).max():.1e}")

# %% [markdown]
# ## What it saves
#
# Bytes that a token leaves in one layer, at the size of DeepSeek-V3: 128 heads, keys and values of 128 numbers.

# %%
HEADS, WIDTH, GROUPS, BF16 = 128, 128, 8, 2
LATENT, ROPE = 512, 64
per_token = {
    f"MHA, {HEADS} heads, bf16": 2 * HEADS * WIDTH * BF16,
    f"GQA, {GROUPS} key-value heads, bf16": 2 * GROUPS * WIDTH * BF16,
    "MLA, bf16": FORMATS["bf16"].bytes_per_token(LATENT + ROPE),
    "MLA, fp8_ds_mla": FORMATS["fp8_ds_mla"].bytes_per_token(LATENT + ROPE),
    "MLA, fp8_e4m3": FORMATS["fp8_e4m3"].bytes_per_token(LATENT + ROPE),
}
LAYERS = 61  # of DeepSeek-V3
fig, ax = plt.subplots(figsize=(9, 2.6))
bars = ax.barh(list(per_token), list(per_token.values()), color=["C7", "C7", "C0", "C1", "C1"])
ax.bar_label(bars, [f" {n:,} B; {2**30 // (n * LAYERS):,} tokens per GiB" for n in per_token.values()])
ax.set(xscale="log", xlim=(100, 3e6), xlabel=f"bytes per token and layer (tokens per GiB: {LAYERS} layers)")
ax.invert_yaxis()
plt.show()

# %% [markdown]
# ## What it costs
#
# Absorbed heads are wider: a query, a key and a head cost 2·(2·512 + 64) FLOP instead of 2·(128 + 64 + 128). The plain
# form pays for expanding each latent instead, once for all queries. So a decode step, with few queries, wants the
# absorbed form, and a long prefill the plain one.

# %%
K, V, W = 128, LATENT, 128
queries = np.arange(1, 513)
absorbed = 2 * (2 * V + ROPE) * queries
plain = 2 * (K + ROPE + W) * queries + 2 * V * (K + W)
equal = V * (K + W) / ((2 * V + ROPE) - (K + ROPE + W))

fig, ax = plt.subplots(figsize=(9, 3))
ax.loglog(queries, plain / 1e3, color="C7", label="plain, expansion included")
ax.loglog(queries, absorbed / 1e3, color="C0", label="absorbed")
ax.axvline(equal, color="0.4", linestyle=":", label=f"equal at {equal:.0f} queries")
ax.set(xlabel="queries that share the expanded latents", ylabel="kFLOP per key and head")
ax.legend()
plt.show()

mha = 2 * (WIDTH + WIDTH) / ((WIDTH + WIDTH) * BF16)  # FLOP of a query, key and head, over the bytes of that head
mla = HEADS * absorbed[0] / per_token["MLA, bf16"]  # all heads read the same bytes
h200 = 989e12 / 4.8e12  # dense bf16 FLOP/s over bytes/s, by its data sheet
print(f"FLOP per byte read for one query: MHA {mha:.0f}, absorbed MLA {mla:.0f}; an H200 can do {h200:.0f}.")

# %% [markdown]
# Decoding with MHA waits for memory. Absorbed MLA does so much on so few bytes that it meets both limits of a GPU at
# once, which is why it deserves a kernel of its own.
