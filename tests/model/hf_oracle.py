"""transformers' DeepSeek models in float32 on the CPU: the independent implementation that ours must equal."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


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
