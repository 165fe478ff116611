"""transformers loads the demo checkpoint as it is, and every way through our model equals it."""

import hf_oracle
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import compare
from paged_run import JITTED

from mla_jax import load_checkpoint
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model import attend

TOLERANCE = 1e-4  # of logits up to 25; float32 rounds 2e-5 off between transformers' own ways


@pytest.fixture(scope="module")
def demo():
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    return hf_oracle.load(CHECKPOINT), config, params


def text(start: int, length: int) -> np.ndarray:
    return np.frombuffer(HELDOUT.read_bytes()[start : start + length], np.uint8).astype(np.int32)


def test_one_request_equals_transformers(demo):
    worst = compare(*demo, [text(0, 73)], 64, TOLERANCE)
    print(f"demo checkpoint, one request: max |Δ| {worst:.1e}")


def test_ragged_batch_equals_transformers(demo, monkeypatch):
    monkeypatch.setattr(attend, "PREFIX_CHUNK", 64)  # so that prefixes break into several chunks without long texts
    lengths = (12, 10, 73, 201, 140)  # pages, prompt chunks and prefix chunks all break here
    worst = compare(*demo, [text(1000 * i, n) for i, n in enumerate(lengths)], 80, TOLERANCE)
    print(f"demo checkpoint, ragged batch: max |Δ| {worst:.1e}")


@pytest.mark.full
def test_prefixes_longer_than_a_prefix_chunk_equal_transformers(demo):
    worst = compare(*demo, [text(0, attend.PREFIX_CHUNK + 150), text(1000, 20)], 96, TOLERANCE)
    print(f"demo checkpoint, long prefix: max |Δ| {worst:.1e}")


def test_held_out_text_is_predicted(demo):
    _, config, params = demo
    tokens = text(0, 513)
    logits = np.asarray(JITTED.forward(params, config, jnp.asarray(tokens[None, :-1])))[0, 256:]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    bits = -np.take_along_axis(log_probs, tokens[257:, None].astype(np.int64), 1).mean() / np.log(2)
    assert bits < 2.2  # 1.8 over the whole sample; an untrained or scrambled model needs 8
