"""One walk through a model that meets transformers at every step: whole sequences, prompt chunks, decode steps."""

from collections.abc import Sequence
from typing import Any

import hf_oracle
import jax.numpy as jnp
import numpy as np
from paged_run import JITTED, PagedRun

from mla_jax import MLAConfig
from mla_jax.model.params import ModelParams

CHUNK = 7  # tokens of the step that looks like the verification of a draft
SINGLES = 2  # single decode steps before it


def assert_close(ours: np.ndarray, reference: np.ndarray, tolerance: float, what: str) -> float:
    """Largest difference, which must be within tolerance; says where and how large otherwise."""
    assert ours.shape == reference.shape, (what, ours.shape, reference.shape)
    difference = np.abs(ours - reference)
    worst = float(difference.max())
    at = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
    rms = float(np.sqrt(np.mean(difference**2) / np.mean(reference**2)))
    assert worst <= tolerance, f"{what}: max |Δ| {worst:.2e} at {at} (relative RMS {rms:.1e}), allowed {tolerance:.0e}"
    return worst


def compare(
    model: Any, config: MLAConfig, params: ModelParams, prompts: Sequence[np.ndarray], width: int, tolerance: float
) -> float:
    """Forward, chunked prefill, single steps and a chunk of CHUNK tokens against `model`. Returns the largest |Δ|.

    prompts: tokens of each request; all but the last SINGLES + CHUNK are prefilled, width at a time.
    """
    worst, tail = [], SINGLES + CHUNK
    references = [hf_oracle.run(model, prompt, (len(prompt) - tail, *[1] * SINGLES, CHUNK)) for prompt in prompts]

    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    whole_batch = JITTED.forward(params, config, jnp.asarray(padded))
    for ours, reference, prompt in zip(whole_batch, references, prompts, strict=True):
        whole = hf_oracle.run(model, prompt)
        worst.append(assert_close(np.asarray(ours[: len(prompt)]), whole.logits, tolerance, "forward"))
        worst.append(assert_close(whole.logits, reference.logits, tolerance, "transformers with itself"))

    run = PagedRun(config, params, len(prompts))
    heads = [prompt[: len(prompt) - tail] for prompt in prompts]

    def check(logits: list[np.ndarray], start: np.ndarray, what: str) -> None:
        for ours, reference, begin in zip(logits, references, start, strict=True):
            if len(ours):
                worst.append(assert_close(ours, reference.logits[begin : begin + len(ours)], tolerance, what))

    for begin in range(0, max(map(len, heads)), width):
        start = run.lens
        check(run.prefill([head[begin : begin + width] for head in heads], width), start, f"prefill from {begin}")
    for size in (*[1] * SINGLES, CHUNK):
        start = run.lens
        pieces = [prompt[at : at + size] for prompt, at in zip(prompts, start, strict=True)]
        check(run.decode(pieces), start, f"decode of {size}")
    for request, reference in enumerate(references):
        worst.append(assert_close(run.latents(request), reference.latents, tolerance, f"latents of {request}"))
    return max(worst)
