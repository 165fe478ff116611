"""How a sequence is cut into steps changes nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from paged_run import JITTED, PagedRun
from tiny import Tiny

from mla_jax import load_checkpoint
from mla_jax.model import attend

TOLERANCE = 2e-5
RARE_ROUNDING = 2e-4  # of logits of size 0.5; rounding all latents to bf16 in one way and not in the other: 1e-3
TOKENS = np.random.default_rng(0).integers(0, 256, 150).astype(np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    Tiny(3, yarn=True, moe=True).make(folder)
    return load_checkpoint(folder, jnp.float32)


@pytest.fixture
def short_prefix_chunks(monkeypatch):
    """Prefixes of 150 tokens break into several, without a model of thousands of tokens."""
    monkeypatch.setattr(attend, "PREFIX_CHUNK", 32)


def prefill(model, widths: list[int], kv_format: str, padded: int | None = None) -> np.ndarray:
    run, logits, done = PagedRun(*model, 1, kv_format), [], 0
    for width in widths:
        piece = TOKENS[done : done + width]
        logits += run.prefill([piece], padded or max(widths))
        done += width
    return np.concatenate(logits)


def test_borders_of_prompt_chunks_change_nothing(model, short_prefix_chunks):
    whole = prefill(model, [150], "fp32")
    for widths in ([75, 75], [64, 64, 22]):
        np.testing.assert_allclose(
            prefill(model, widths, "fp32", padded=75), whole, atol=TOLERANCE, err_msg=str(widths)
        )


def test_a_chunk_sees_its_own_latents_as_a_rounding_cache_gives_them_back(model, short_prefix_chunks):
    """So borders change nothing there either, but for the few latents that lie on the edge between two bf16 numbers."""
    difference = prefill(model, [75, 75], "bf16") - prefill(model, [150], "bf16")
    rms = float(np.sqrt(np.mean(difference**2)))
    print(f"RMS of the difference {rms:.1e}")
    assert rms < RARE_ROUNDING


def test_decode_in_the_absorbed_form_equals_prefill_in_the_plain_form(model):
    whole = prefill(model, [150], "bf16")
    run = PagedRun(*model, 1, "bf16")
    run.prefill([TOKENS[:60]], 75)
    decoded = [run.decode([TOKENS[at : at + 6]])[0] for at in range(60, 150, 6)]
    rms = float(np.sqrt(np.mean((np.concatenate(decoded) - whole[60:]) ** 2)))
    print(f"RMS of the difference {rms:.1e}")
    assert rms < RARE_ROUNDING


def test_requests_shorter_than_a_decode_step(model):
    """The first columns of a step lie before the start of such a request: they write nothing and are not read."""
    config, params = model
    run = PagedRun(config, params, 2)
    run.prefill([TOKENS[:70], TOKENS[:0]], 75)
    run.pool, ok = run.pool.extend(jnp.asarray([76, 4], jnp.int32))
    assert bool(ok.all())
    steps = jnp.asarray(np.stack([TOKENS[70:76], np.concatenate([[9, 9], TOKENS[:4]])]), jnp.int32)
    logits, run.cache = JITTED.decode(params, config, steps, run.pool.kv_lens, run.pool.block_table, run.cache)
    whole = np.asarray(JITTED.forward(params, config, jnp.asarray(TOKENS[None, :76])))[0]
    np.testing.assert_allclose(np.asarray(logits[0]), whole[70:76], atol=TOLERANCE)
    np.testing.assert_allclose(np.asarray(logits[1, 2:]), whole[:4], atol=TOLERANCE)
    clean = PagedRun(config, params, 1)
    clean.decode([TOKENS[:4]])
    np.testing.assert_allclose(run.latents(1), clean.latents(0), atol=TOLERANCE)


def test_a_request_alone_and_in_a_batch(model):
    alone = PagedRun(*model, 1)
    expected = alone.prefill([TOKENS[:40]], 75)[0]
    batch = PagedRun(*model, 3)
    together = batch.prefill([TOKENS[100:175], TOKENS[:40], TOKENS[:0]], 75)[1]
    np.testing.assert_allclose(together, expected, atol=TOLERANCE)
