"""The same attention and the same layers in PyTorch and transformers, to compare with. NumPy in, NumPy out."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

# DeepSeek's latent dims, so that every kernel can take part, and little else.
LAYERS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,  # experts have no attention
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "max_position_embeddings": 1024,
}


def torch_reason() -> str | None:
    """Why PyTorch cannot take part, in one sentence; None if it can."""
    return None if importlib.util.find_spec("torch") else "PyTorch is not installed."


def transformers_reason() -> str | None:
    """Why transformers cannot take part, in one sentence; None if it can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed."
    return torch_reason()


def torch_attention(
    q: np.ndarray, keys: list[np.ndarray], masks: list[np.ndarray], d_v: int
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(q kᵀ / √d) v in float32, one request at a time, on a GPU if torch has one.

    Args:
        q: `[b, s, h, d]`.
        keys: `[length, d]` per request; a value is a key's first d_v numbers.
        masks: bool `[s, length]` per request, True where a query sees a key.
        d_v: width of a value.

    Returns out `[b, s, h, d_v]` and lse `[b, h, s]`; 0 and −inf for a query that sees nothing.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, queries, heads, d = q.shape
    outs, lses = np.zeros((batch, queries, heads, d_v)), np.zeros((batch, heads, queries))
    for b in range(batch):
        query, key, mask = (torch.from_numpy(x).to(device) for x in (q[b], keys[b], masks[b]))
        logits = torch.einsum("shd,td->hst", query, key) * d**-0.5
        logits = logits.masked_fill(~mask[None], -torch.inf)
        lse = torch.logsumexp(logits, dim=-1) if key.shape[0] else torch.full((heads, queries), -torch.inf)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)  # a softmax over nothing is NaN
        outs[b] = torch.einsum("hst,tv->shv", weights, key[:, :d_v]).cpu().numpy()
        lses[b] = lse.cpu().numpy()
    return outs, lses


def save_random_model(folder: Path, version: int) -> None:
    """A small DeepSeek V2 or V3 checkpoint with random weights, as transformers writes it."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.DeepseekV2Config if version == 2 else transformers.DeepseekV3Config
    varying: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    if version == 3:
        varying["num_nextn_predict_layers"] = 0
    torch.manual_seed(version)
    model = transformers.AutoModelForCausalLM.from_config(kind(**LAYERS, **varying), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if not name.endswith("norm.weight"):
                weight.normal_(0, weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def transformers_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits `[b, tokens, vocab]` of that checkpoint in float32 on the CPU; tokens int `[b, tokens]`."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.tensor(tokens.astype(np.int64))
        logits: np.ndarray = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.numpy()
    return logits
