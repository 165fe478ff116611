"""transformers' DeepSeek models in float32 on the CPU: the independent implementation that ours must equal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_layers import MtpModel

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # these models are too small to share


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one request: logits [tokens, vocab], cached latents [layers, tokens, D]."""

    logits: np.ndarray
    latents: np.ndarray


def load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def run(model: Any, tokens: np.ndarray, pieces: tuple[int, ...] = ()) -> Reference:
    """One request through the model, pieces[0] tokens at first, then pieces[1], … on a cache, then the rest."""
    cache = transformers.DynamicCache(config=model.config)
    logits, done = [], 0
    for size in (*pieces, len(tokens) - sum(pieces)):
        if not size:
            continue
        piece = torch.tensor(tokens[None, done : done + size])
        done += size
        out = model(piece, attention_mask=torch.ones((1, done), dtype=torch.long), cache=cache, use_cache=True)
        logits.append(out.logits[0].numpy())
    latents = [np.concatenate([c.keys[0, 0], c.values[0, 0]], axis=-1) for c in cache.layers]
    return Reference(np.concatenate(logits), np.stack(latents))


def record_drafts(
    folder: Path, prompt: np.ndarray, new_tokens: int, layer: int, monkeypatch: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Greedy generation with use_mtp: for every draft, the tokens known by then and the module's logits."""
    # The class looks for MTP weights where the 61 layers of the real model end.
    ignored = [rf"model\.layers\.{layer}.*"]
    monkeypatch.setattr(transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", ignored)
    drafts, forward = [], MtpModel.forward

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        drafts.append((kwargs["full_input_ids"][0].numpy().copy(), result[1][0, 0].float().numpy()))
        return result

    monkeypatch.setattr(MtpModel, "forward", recording)
    ids = torch.tensor(prompt[None])
    load(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_mtp=True
    )
    return drafts
