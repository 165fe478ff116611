# %% [markdown]
# # FP8 latents
#
# Two FP8 layouts are in use for MLA caches. `fp8_e4m3`: 576 numbers of one byte each and **one scale per tensor**.
# `fp8_ds_mla` (DeepSeek-V3.2, FlashMLA): 656 bytes, **a scale per 128 numbers**, and the rotated key left in bf16. What
# do the 80 bytes more buy?

# %%
from dataclasses import replace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_jax import FORMATS, dequantize_kv, load_checkpoint, quantize_kv
from mla_jax.decode.calibrate import calibrate
from mla_jax.decode.evaluate import evaluate
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model.attend import attend_self
from mla_jax.model.transformer import decode_stack

config, params = load_checkpoint(CHECKPOINT, jnp.float32)
text = list(HELDOUT.read_bytes())
LATENT, ROPE, TILE = config.kv_lora_rank, config.qk_rope_head_dim, 128

# %% [markdown]
# ## The row, drawn to scale

# %%
rows = {
    "bf16": [("latent, bf16", 2 * LATENT, "C0"), ("rotated\nkey, bf16", 2 * ROPE, "C1")],
    "fp8_ds_mla": [
        ("latent: 4 tiles, e4m3", LATENT, "C4"),
        ("", 4 * (LATENT // TILE), "C3"),
        ("rotated\nkey, bf16", 2 * ROPE, "C1"),
    ],
    "fp8_e4m3": [("latent, e4m3", LATENT, "C4"), ("e4m3", ROPE, "C6")],
}
fig, ax = plt.subplots(figsize=(9.5, 2.6))
for y, (name, fields) in enumerate(rows.items()):
    left = 0
    for label, size, color in fields:
        ax.barh(y, size, left=left, height=0.62, color=color, edgecolor="white")
        ax.text(left + size / 2, y, label, ha="center", va="center", fontsize=8)
        left += size
    assert left == FORMATS[name].bytes_per_token(LATENT + ROPE)
    ax.text(left + 8, y, f"{left} bytes", va="center")
for tile in range(1, LATENT // TILE):
    ax.plot([tile * TILE] * 2, [0.69, 0.85], color="white", linewidth=1.5)
    ax.plot([tile * TILE] * 2, [1.15, 1.31], color="white", linewidth=1.5)
ax.annotate("4 scales, float32", (LATENT + 8, 0.69), (LATENT + 60, 0.42), fontsize=8.5, arrowprops={"arrowstyle": "-"})
ax.set(yticks=range(3), yticklabels=rows, xlabel="bytes of one token in one layer", xlim=(0, 1290))
ax.invert_yaxis()
plt.show()

# %% [markdown]
# The bytes are where the drawing says:

# %%
x = jax.random.normal(jax.random.key(0), (LATENT + ROPE,))
row = np.asarray(quantize_kv(x, "fp8_ds_mla"))
scales = row[LATENT : LATENT + 16].view(np.float32)
print(f"{row.dtype}{list(row.shape)}; scales {scales.round(5)}")
print(f"largest number of each tile / 448:    {(np.abs(x[:LATENT]).reshape(4, TILE).max(axis=1) / 448).round(5)}")

# %% [markdown]
# ## Error, tile by tile
#
# Latents of the trained model over 512 bytes of text, all layers. The tensor's scale is 1, or (calibrated) the layer's
# largest number / 448.

# %%
seen = {}


def attend(layer, weights, query, latents, cache):
    """Ordinary self-attention that remembers the latents."""
    seen[layer] = latents[0]
    return attend_self(config)(layer, weights, query, latents, cache)


tokens = jnp.asarray(text[:512], jnp.int32)[None]
decode_stack(params, config, tokens, jnp.arange(512, dtype=jnp.int32)[None], None, attend)
calibration = calibrate(params, config, text[-4096:])


def round_trip(x, kv_format, scale=None):
    """Into the cache and back."""
    return dequantize_kv(quantize_kv(x, kv_format, scale), kv_format, scale)


def relative_error(x, y, parts):
    """RMS error of each part of the rows, relative to the part."""
    return np.array([jnp.linalg.norm(y[:, p] - x[:, p]) / jnp.linalg.norm(x[:, p]) for p in parts])


parts = [slice(i, i + TILE) for i in range(0, LATENT, TILE)] + [slice(LATENT, LATENT + ROPE)]
errors = {
    "fp8_e4m3, scale 1": [relative_error(x, round_trip(x, "fp8_e4m3"), parts) for x in seen.values()],
    "fp8_e4m3, calibrated": [
        relative_error(x, round_trip(x, "fp8_e4m3", calibration.scales[i]), parts) for i, x in seen.items()
    ],
    "fp8_ds_mla": [relative_error(x, round_trip(x, "fp8_ds_mla"), parts) for x in seen.values()],
}
names = ["tile 0", "tile 1", "tile 2", "tile 3", "rotated key"]
fig, axes = plt.subplots(1, len(seen), figsize=(9.5, 3.6), sharey=True)
for layer, ax in enumerate(axes):
    for i, (name, error) in enumerate(errors.items()):
        ax.bar(np.arange(5) + 0.27 * (i - 1), 100 * error[layer], width=0.25, color=["C7", "C0", "C4"][i], label=name)
    ax.set(title=f"layer {layer}")
    ax.set_xticks(range(5), names, rotation=60)
axes[0].set_ylabel("RMS error / RMS, %")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
plt.show()
print("largest number of each layer:", np.asarray(calibration.largest[: config.num_layers]).round(1))

# %% [markdown]
# Nearly the same: a latent is normed before it is cached, so its numbers are of one size, and e4m3 is a
# *floating-point* format, whose relative error does not depend on the scale as long as the numbers stay in its range.
# The difference is the rotated key.
#
# ## What a scale is for
#
# Suppose one number of the first tile were larger than it is. A scale per tensor must follow it, and pushes all other
# numbers towards the smallest that e4m3 knows; a scale per tile gives up that tile alone.

# %%
x = seen[1]
factors = 10.0 ** np.arange(0, 7.01, 0.5)
rest = [slice(TILE, LATENT)]  # tiles 1 to 3, which the outlier does not touch
per_tensor, per_tile = [], []
for factor in factors:
    bad = x.at[:, 0].set(factor * jnp.abs(x).max())
    per_tensor.append(relative_error(bad, round_trip(bad, "fp8_e4m3", jnp.abs(bad).max() / 448), rest)[0])
    per_tile.append(relative_error(bad, round_trip(bad, "fp8_ds_mla"), rest)[0])
fig, ax = plt.subplots(figsize=(9, 3))
ax.loglog(
    factors, 100 * np.array(per_tensor), "o-", color="C0", label="fp8_e4m3: the tensor's scale follows the outlier"
)
ax.loglog(factors, 100 * np.array(per_tile), "s-", color="C4", label="fp8_ds_mla: a scale per tile")
ax.set(xlabel="outlier / largest latent", ylabel="RMS error of tiles 1–3, %")
ax.legend()
plt.show()

# %% [markdown]
# ## What it costs the model
#
# Bits per byte over a short piece of text that the model has not seen, each latent read back from a paged cache. As a
# control, a scale as if an outlier 30,000 times larger had set it: a cache broken this way must show, or the small
# numbers beside it would mean nothing.

# %%
piece = text[: 256 * 11]  # 10 windows of 512 bytes, the last 256 of each scored
caches = {
    "bf16": ("bf16", None),
    "fp8_e4m3, scale 1": ("fp8_e4m3", jnp.ones_like(calibration.scales)),
    "fp8_e4m3, calibrated": ("fp8_e4m3", calibration.scales),
    "fp8_ds_mla": ("fp8_ds_mla", None),
    "control: scale × 30,000": ("fp8_e4m3", calibration.scales * 30_000),
}
scores = {
    name: evaluate(replace(params, kv_scales=scale), config, piece, kv_format=kv_format)
    for name, (kv_format, scale) in caches.items()
}
exact = scores["bf16"]
print(f"{exact.scored_tokens} bytes scored")
for name, score in scores.items():
    loss = score.bits_per_byte - exact.bits_per_byte
    print(f"{name:<24} {score.bits_per_byte:.4f} bits per byte ({loss:+.4f}), ", end="")
    print(f"same likeliest byte as bf16: {score.top1_agreement(exact):.1%}")

# %%
others = [name for name in scores if name != "bf16"]
fig, axes = plt.subplots(1, 2, figsize=(9.5, 2.4), sharey=True)
delta = [scores[name].bits_per_byte - exact.bits_per_byte for name in others]
flips = [100 * (1 - scores[name].top1_agreement(exact)) for name in others]
for ax, values, unit, label in (
    (axes[0], delta, "{:+.4f}", "bits per byte more than with bf16"),
    (axes[1], flips, "{:.2f} %", "places with another likeliest byte, %"),
):
    ax.bar_label(ax.barh(others, values, color=["C7", "C0", "C4", "C3"]), fmt=" " + unit)
    ax.set(xlabel=label)
    ax.margins(x=0.25)
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# So little text cannot tell thousandths of a bit from chance, and the first three bars may change sign on another
# piece; how often the likeliest byte changes is the more sensitive measure. `python -m mla_jax evaluate` scores the
# whole sample.
