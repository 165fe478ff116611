"""Speculative steps against transformers' generate(use_mtp=True): tokens, and drafts accepted in each step."""

import hf_oracle
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_mtp import with_mtp_module
from tiny import Tiny
from transformers.generation import candidate_generator

from mla_jax import load_checkpoint
from mla_jax.speculative.config import Speculation
from tests.speculative.slots import Slots

QUIET = 0.25  # of what layers add, so that the module agrees with the model now and then
NEW = 48


def make_agreeable(folder) -> None:
    """Lets the module start from the embedding of the next token, as the model does a step later."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= QUIET
    tensors["model.embed_tokens.weight"] *= 8  # as large as the module's norm makes it
    width = tensors["model.norm.weight"].shape[0]
    tensors["model.layers.2.eh_proj.weight"] *= 0.05
    tensors["model.layers.2.eh_proj.weight"][:, :width] = torch.eye(width)
    tensors["model.layers.2.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def generate(folder, prompt: np.ndarray, monkeypatch) -> tuple[list[int], list[int]]:
    """transformers' new tokens, and the drafts that it accepts in each step (none in its first, the prefill)."""
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"]
    )
    accepted = []
    monkeypatch.setattr(
        candidate_generator.MTPCandidateGenerator,
        "update_candidate_strategy",
        lambda self, ids, scores, num_matches: accepted.append(int(num_matches)),
    )
    ids = torch.tensor(prompt[None])
    out = hf_oracle.load(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, use_mtp=True
    )
    return out[0, len(prompt) :].tolist(), accepted


def test_tokens_and_accepted_drafts_are_those_of_use_mtp(tmp_path, monkeypatch):
    Tiny(3, yarn=True, moe=True, mtp=True).make(tmp_path)
    with_mtp_module(tmp_path)
    make_agreeable(tmp_path)
    config, params = load_checkpoint(tmp_path, jnp.float32)
    prompt = np.random.default_rng(0).integers(0, 256, 20)
    expected, accepted = generate(tmp_path, prompt, monkeypatch)
    assert len(expected) == NEW and accepted[0] == 0

    # Its first step is the prefill of the whole prompt, which yields a token and drafts nothing.
    slots = Slots(config, params, 1, Speculation.chain(1), width=2)
    slots.enter(0, [*prompt.tolist(), expected[0]], new=NEW - 1, chunk=32)
    texts, runs = slots.run(NEW - 1)
    print(f"accepted {sum(accepted)} of {len(accepted) - 1} drafts")
    assert [expected[0], *texts[0]] == expected
    assert [n - 1 for n in runs[0]] == accepted[1:]
    assert 5 < sum(accepted) < len(accepted) - 5
