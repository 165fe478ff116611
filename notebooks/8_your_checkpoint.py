# %% [markdown]
# # A DeepSeek checkpoint of your own
#
# `load_checkpoint` takes the folder of a DeepSeek V2 or V3 model or a descendant as it was published: `config.json`,
# and safetensors under Hugging Face's names, in one file or in shards, in bf16 or in DeepSeek's FP8 with a scale per
# block of 128 × 128. Such a folder is made here, a hundred thousand times smaller, with everything in it that the large
# one has: low-rank queries, YaRN, a dense layer, layers of experts, FP8 weights, shards. Put the path of yours in its
# place.

# %%
import importlib.util
import json
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mla_jax import FORMATS, MLAConfig, PagedKVCache, PagePool, load_checkpoint
from mla_jax.decode.generate import Settings, generate
from mla_jax.model import decode, lm_logits, prefill
from mla_jax.model.checkpoint import tensor_shapes

published = {  # the words of DeepSeek-V3's config.json; its latent dims, little else of its size
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BLOCK = 128  # rows and columns that share a scale


def draw_weights(config, seed=0):
    """Name and random weight of every tensor that a checkpoint for this config holds, in float32."""
    rng = np.random.default_rng(seed)
    for name, shape in tensor_shapes(config).items():
        if name.endswith("norm.weight"):
            yield name, np.ones(shape, np.float32)
        else:  # a router's bias is large, so that rounding seldom turns its choice of experts
            yield name, rng.standard_normal(shape, np.float32) * (1 if len(shape) == 1 else shape[-1] ** -0.5)


def in_blocks(weight):
    """A matrix in e4m3, and the inverse scale of each of its blocks, as DeepSeek stores them."""
    rows, columns = weight.shape
    padded = np.zeros([-(-n // BLOCK) * BLOCK for n in weight.shape], np.float32)
    padded[:rows, :columns] = weight
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = np.abs(blocks).max(axis=(1, 3)) / 448
    scaled = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return scaled.astype(ml_dtypes.float8_e4m3fn), scales


def is_fp8(name):
    """What DeepSeek-V3 stores in FP8: the matrices of its layers, but not the routers."""
    return "_proj" in name


def write(folder, weights, config, quantized):
    """A folder as published: config.json, two shards, and the index that says which tensor lies where."""
    tensors = {}
    for name, weight in weights.items():
        if quantized and is_fp8(name):
            tensors[name], tensors[name + "_scale_inv"] = in_blocks(weight)
        else:
            tensors[name] = weight.astype(np.float32 if ".mlp.gate." in name else ml_dtypes.bfloat16)
    names, files = sorted(tensors), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: files[i * 2 // len(names)] for i, name in enumerate(names)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    fp8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}}
    (folder / "config.json").write_text(json.dumps(config | (fp8 if quantized else {}), indent=1))


workspace = tempfile.TemporaryDirectory()  # removed with the kernel
checkpoint = Path(workspace.name) / "tiny-deepseek"  # your folder here
checkpoint.mkdir()
weights = dict(draw_weights(MLAConfig.from_hf(published)))
write(checkpoint, weights, published, quantized=True)
for path in sorted(checkpoint.iterdir()):
    print(f"{path.name:<36}{path.stat().st_size / 1e6:6.2f} MB")

# %% [markdown]
# ## Load

# %%
config, params = load_checkpoint(checkpoint, jnp.float32)
sizes = f"{config.num_layers} layers, {config.num_heads} heads"
print(f"{sizes}, latents of {config.kv_lora_rank} + {config.qk_rope_head_dim}, softmax scale {config.sm_scale:.4f}")
print(f"experts: {config.moe.num_experts} in {config.moe.num_groups} groups, from layer {config.moe.first_dense} on")
print(f"{sum(x.size for x in jax.tree.leaves(params)):,} numbers")

# %% [markdown]
# ## Decode, and swap the attention
#
# `generate` runs an engine of its own: prefill, then a jitted step per token. The implementation of attention is an
# argument, as is the format of the cache. Weights are random, so the text is noise, and equal noise is the point.

# %%
prompt = np.random.default_rng(1).integers(2, config.vocab_size, 150).tolist()


def continuation(kv_format, implementation):
    """24 tokens after the prompt, greedily; weights and cache in one format, which kernels ask for."""
    _, weights = load_checkpoint(checkpoint, FORMATS[kv_format].dtype)
    settings = Settings(max_new_tokens=24, kv_format=kv_format, implementation=implementation)
    return generate(weights, config, [prompt], settings).sequences[0].tokens


texts, runs = {}, {"xla": "fp32", "reference": "fp32", "mosaic_gpu": "bf16", "flash_mla": "bf16"}
for implementation, kv_format in runs.items():
    try:
        texts[implementation] = continuation(kv_format, implementation)
    except NotImplementedError as reason:
        print(f"{implementation:<11} skipped: {reason}")
    else:
        print(f"{implementation:<11}", *texts[implementation][:14], "…")
print("equal:", texts["xla"] == texts["reference"])

# %% [markdown]
# ## What lies beneath
#
# The same by hand, for a model of your own making: a page pool, a cache, one prefill, then decode steps. The last 30
# tokens of the prompt are decoded here, three at a time, from three cache formats.

# %%
NEW, STEP, PAGES = 30, 3, 4
tokens = jnp.asarray(prompt, jnp.int32)[None]
start = len(prompt) - NEW


@jax.jit(static_argnames="implementation")
def step(pool, cache, tokens, implementation):
    """A decode step of a few tokens: pages, latents, logits."""
    pool, _ = pool.extend(pool.kv_lens + tokens.shape[1])
    hidden, cache = decode(params, config, tokens, pool.kv_lens, pool.block_table, cache, implementation=implementation)
    return pool, cache, lm_logits(params, hidden)


def decoded_logits(kv_format, implementation="xla"):
    """Logits [NEW, vocab] behind the last tokens of the prompt."""
    counts = jnp.array([start], jnp.int32)
    pool, _ = PagePool.create(PAGES, 1, PAGES - 1).extend(counts)
    cache = PagedKVCache.create(config.num_layers, PAGES, config.latent_dim, kv_format)
    fill = jax.jit(prefill, static_argnums=1)
    _, cache = fill(params, config, tokens[:, :start], counts, jnp.zeros_like(counts), pool.block_table, cache)
    logits = []
    for at in range(start, len(prompt), STEP):
        pool, cache, new = step(pool, cache, tokens[:, at : at + STEP], implementation)
        logits.append(np.asarray(new[0]))
    return np.concatenate(logits)


logits = {name: decoded_logits(name) for name in ("fp32", "bf16", "fp8_ds_mla")}
swapped = decoded_logits("fp32", "reference")
print(f"xla and reference differ by {np.abs(logits['fp32'] - swapped).max():.0e} of {np.abs(swapped).max():.1f}")

# %% [markdown]
# ## Beside transformers
#
# transformers reads such folders too; the FP8 weights are written out as numbers first, because it multiplies in FP8 on
# GPUs only. It computes plain attention, with keys and values for each head, over the whole prompt at once.


# %%
def transformers_logits():
    """Logits [NEW, vocab], or None and why not."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return None, f"skipped: {' and '.join(missing)} not installed"
    warnings.filterwarnings("ignore", message="IProgress not found")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    plain = checkpoint.parent / "plain"
    plain.mkdir(exist_ok=True)
    restored = {name: dequantized(*in_blocks(w)) if is_fp8(name) else as_bf16(name, w) for name, w in weights.items()}
    save_file(restored, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(published))
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(torch.tensor([prompt]), use_cache=False).logits[0, start:].numpy()
    return found, f"transformers {transformers.__version__}, {type(model).__name__}"


def dequantized(weight, scales):
    """A matrix stored in blocks, in float32."""
    spread = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)
    return weight.astype(np.float32) * spread[: weight.shape[0], : weight.shape[1]]


def as_bf16(name, weight):
    """What a tensor that is not FP8 is after storing, in float32."""
    return weight if ".mlp.gate." in name else weight.astype(ml_dtypes.bfloat16).astype(np.float32)


expected, note = transformers_logits()
print(note)
answer, of = (logits["fp32"], "our own with an fp32 cache") if expected is None else (expected, "transformers")
size = np.sqrt((answer**2).mean())
for name, found in logits.items():
    worst = np.abs(found - answer).max()
    same = np.mean(found.argmax(-1) == answer.argmax(-1))
    print(f"cache in {name:<11} off by at most {worst:.1e}, most likely token equal in {same:.0%} of {NEW} places")

# %%
fig, ax = plt.subplots(figsize=(9, 3.4))
places = np.arange(start, len(prompt))
for name, found in logits.items():
    if found is not answer:
        ax.plot(places, 100 * np.sqrt(((found - answer) ** 2).mean(-1)) / size, marker="o", markersize=3, label=name)
ax.set(yscale="log", xlabel="position of the decoded token", ylabel="error of its logits\n(RMS, % of the logits)")
ax.set_title(f"against {of}")
ax.legend(title="cache", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# With an fp32 cache the two programs agree to float32's rounding, so the loader, YaRN, the experts and the absorbed
# form are right for this folder. What the other caches add is their own rounding, which random weights make much more
# of than trained ones ([notebook 4](4_fp8_latents.ipynb)). For a real model, with commands:
#
# ```
# python -m mla_jax generate --model DIR "A prompt"
# python -m mla_jax evaluate --model DIR FILE
# ```
