"""The multi-token-prediction module against NumPy in float64, and against transformers' use_mtp."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import hf_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from paged_run import QUICK
from safetensors.torch import load_file, save_file
from tiny import Tiny

from mla_jax import MLAConfig, PagedKVCache, PagePool, load_checkpoint
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model.attend import attend_decode, attend_prefill, attend_self
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import forward, lm_logits, mtp_forward

LENGTH = 40  # tokens
MOE_TOLERANCE = 2e-5


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Complex pairs: x[t, ..., 2i] + i·x[t, ..., 2i + 1] turned by t · theta^(−2i / width)."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = pairs * np.exp(1j * angles).reshape(len(x), *[1] * (x.ndim - 2), -1)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def oracle(config: MLAConfig, w: dict[str, np.ndarray], hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Logits [S, vocab] from the states h[i] and the tokens i + 1, from the checkpoint's tensors by name."""
    layer = SimpleNamespace(
        **{
            name.split("layers.4.")[1].replace(".weight", "").replace(".", "_"): tensor
            for name, tensor in w.items()
            if "layers.4." in name
        }
    )
    embedded = rms_norm(w["model.embed_tokens.weight"][tokens], layer.enorm)
    x = np.concatenate([embedded, rms_norm(hidden, layer.hnorm)], -1) @ layer.eh_proj.T

    normed = rms_norm(x, layer.input_layernorm)
    q = (normed @ layer.self_attn_q_proj.T).reshape(len(x), config.num_heads, -1)
    q_nope, q_rope = np.split(q, [config.qk_nope_head_dim], axis=-1)
    latent, k_rope = np.split(normed @ layer.self_attn_kv_a_proj_with_mqa.T, [config.kv_lora_rank], axis=-1)
    kv = rms_norm(latent, layer.self_attn_kv_a_layernorm) @ layer.self_attn_kv_b_proj.T
    k_nope, values = np.split(kv.reshape(len(x), config.num_heads, -1), [config.qk_nope_head_dim], axis=-1)
    q_rope, k_rope = rotate(q_rope, config.rope_theta), rotate(k_rope, config.rope_theta)
    scores = np.einsum("shd,thd->hst", q_nope, k_nope) + np.einsum("shr,tr->hst", q_rope, k_rope)
    scores = np.where(np.tri(len(x), dtype=bool), scores / np.sqrt(config.qk_head_dim), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = np.einsum("hst,thw->shw", weights / weights.sum(-1, keepdims=True), values)
    x = x + heads.reshape(len(x), -1) @ layer.self_attn_o_proj.T

    normed = rms_norm(x, layer.post_attention_layernorm)
    gated = silu(normed @ layer.mlp_gate_proj.T) * (normed @ layer.mlp_up_proj.T)
    x = rms_norm(x + gated @ layer.mlp_down_proj.T, layer.shared_head_norm)
    return x @ w["lm_head.weight"].T


@pytest.fixture(scope="module")
def demo():
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    tensors = load_file(CHECKPOINT / "model.safetensors")
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    tokens = np.frombuffer(HELDOUT.read_bytes()[:LENGTH], np.uint8).astype(np.int32)
    hidden = np.asarray(forward(params, config, jnp.asarray(tokens[None])))[0]
    return config, params, w, hidden, tokens


def module_logits(config: MLAConfig, params: ModelParams, hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Ours, for one sequence without a cache: states h[i] and tokens i + 1."""
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    out, _ = mtp_forward(
        params.mtp[0],
        params,
        config,
        config.num_layers,
        jnp.asarray(hidden[None]),
        jnp.asarray(tokens[None]),
        positions,
        None,
        attend_self(config),
    )
    return np.asarray(lm_logits(params, out))[0]


def test_module_equals_numpy(demo):
    config, params, w, hidden, tokens = demo
    expected = oracle(config, w, hidden[:-1].astype(np.float64), tokens[1:])
    ours = module_logits(config, params, hidden[:-1], tokens[1:])
    worst = np.abs(ours - expected).max()
    print(f"MTP module: max |Δ| {worst:.1e} to float64, logits up to {np.abs(expected).max():.0f}")
    assert worst < 1e-4


def test_the_trained_module_takes_the_embedding_first(demo):
    """The oracle and ours could share a mistake; the training could not: one order predicts byte i + 2 well."""
    config, _, w, hidden, tokens = demo
    eh = w["model.layers.4.eh_proj.weight"]
    swapped = {**w, "model.layers.4.eh_proj.weight": np.concatenate([eh[:, 256:], eh[:, :256]], axis=1)}

    def bits(weights: dict[str, np.ndarray]) -> float:
        logits = oracle(config, weights, hidden[:-2].astype(np.float64), tokens[1:-1])
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return -log_probs[np.arange(len(logits)), tokens[2:]].mean() / np.log(2)

    print(f"bits per byte: {bits(w):.2f}, halves swapped {bits(swapped):.2f}")
    assert bits(w) < 3 < bits(swapped)


def test_module_over_a_paged_cache_equals_the_whole_sequence(demo):
    config, params, _, hidden, tokens = demo
    expected = module_logits(config, params, hidden[:-1], tokens[1:])
    count, prompt = LENGTH - 1, 30
    pool, _ = PagePool.create(4, 1, 2).extend(jnp.asarray([count], jnp.int32))
    cache = PagedKVCache.create(config.num_cache_layers, 4, config.latent_dim, "fp32")
    cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)

    @partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def run(is_prefill, states, next_tokens, start, cache):
        size = next_tokens.shape[1]
        positions = start + jnp.arange(size, dtype=jnp.int32)[None]
        if is_prefill:
            attend = attend_prefill(config, pool.block_table, start[None], positions, jnp.ones((1, size), bool))
        else:
            attend = attend_decode(config, pool.block_table, start[None] + size, positions, implementation="xla")
        layer = config.num_layers
        out, cache = mtp_forward(params.mtp[0], params, config, layer, states, next_tokens, positions, cache, attend)
        return lm_logits(params, out)[0], cache

    for start, stop in ((0, prompt), (prompt, prompt + 1), (prompt + 1, count)):
        states, next_tokens = jnp.asarray(hidden[None, start:stop]), jnp.asarray(tokens[None, start + 1 : stop + 1])
        logits, cache = run(start == 0, states, next_tokens, jnp.int32(start), cache)
        np.testing.assert_allclose(np.asarray(logits), expected[start:stop], atol=1e-4)


def with_mtp_module(folder) -> None:
    """Adds the tensors of an MTP module, which transformers does not save, to its tiny V3."""
    torch.manual_seed(1)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if name.startswith("model.layers.1."):
            mean = 1.0 if tensor.ndim == 1 and "norm" in name else 0.0
            scale = 0.2 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
            tensors[name.replace("layers.1.", "layers.2.")] = torch.randn(tensor.shape) * scale + mean
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.2.{name}.weight"] = 1 + 0.2 * torch.randn(64)
    tensors["model.layers.2.eh_proj.weight"] = torch.randn(64, 128) * 128**-0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_drafts_equal_those_of_transformers_use_mtp(tmp_path, monkeypatch):
    Tiny(3, yarn=True, moe=True, mtp=True).make(tmp_path)
    with_mtp_module(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    config, params = load_checkpoint(tmp_path, jnp.float32)
    prompt = np.random.default_rng(0).integers(0, 256, 20)
    drafts = hf_oracle.record_drafts(tmp_path, prompt, new_tokens=8, layer=2, monkeypatch=monkeypatch)
    assert len(drafts) >= 4
    assert len({len(tokens) for tokens, _ in drafts}) == len(drafts)

    worst = max(largest_difference(params, config, *draft) for draft in drafts)
    print(f"{len(drafts)} drafts of use_mtp: max |Δ| {worst:.1e}")
    assert worst < MOE_TOLERANCE

    module, width = params.mtp[0], config.hidden_size
    halves = jnp.concatenate([module.eh_proj[:, width:], module.eh_proj[:, :width]], axis=1)
    swapped = dataclasses.replace(params, mtp=(dataclasses.replace(module, eh_proj=halves),))
    before_norm = dataclasses.replace(params, norm=jnp.ones_like(params.norm))
    for what, mistaken in (("halves swapped", swapped), ("state before the final norm", before_norm)):
        assert largest_difference(mistaken, config, *drafts[0]) > 1000 * MOE_TOLERANCE, what


def largest_difference(params: ModelParams, config: MLAConfig, tokens: np.ndarray, expected: np.ndarray) -> float:
    """Of the module's logits after the last token but one from the expected ones."""
    padded = np.zeros((1, 32), np.int32)
    padded[0, : len(tokens)] = tokens
    return float(np.abs(np.asarray(draft_logits(params, config, padded))[len(tokens) - 2] - expected).max())


@partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def draft_logits(params: ModelParams, config: MLAConfig, tokens: jax.Array) -> jax.Array:
    hidden = forward(params, config, tokens)
    positions = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[None]
    out, _ = mtp_forward(
        params.mtp[0],
        params,
        config,
        config.num_layers,
        hidden[:, :-1],
        tokens[:, 1:],
        positions,
        None,
        attend_self(config),
    )
    return lm_logits(params, out)[0]
