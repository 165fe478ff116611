import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode.evaluate import SCORED, WINDOW, evaluate
from mla_jax.model.transformer import forward, lm_logits
from tests.tiny import TINY, tiny_params

PARAMS = tiny_params()
TEXT = np.random.default_rng(3).integers(0, TINY.vocab_size, 5 * SCORED + 100).tolist()


def bits_by_hand(text: list[int]) -> tuple[float, int]:
    """Whole forward passes over each window, the last 256 tokens scored."""
    whole = jax.jit(lambda ids: jax.nn.log_softmax(lm_logits(PARAMS, forward(PARAMS, TINY, ids)))[0])
    starts = range(0, len(text) - WINDOW + 1, SCORED)
    nats = 0.0
    for start in starts:
        ids = np.asarray(text[start : start + WINDOW], np.int32)
        logprobs = np.asarray(whole(jnp.asarray(ids[None])))
        nats -= sum(float(logprobs[i - 1, ids[i]]) for i in range(WINDOW - SCORED, WINDOW))
    return nats / np.log(2) / (len(starts) * SCORED), len(starts)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_score_equals_whole_forward_passes(implementation: str) -> None:
    expected, windows = bits_by_hand(TEXT)
    score = evaluate(PARAMS, TINY, TEXT, kv_format="fp32", implementation=implementation)
    assert (score.windows, score.scored_tokens, score.implementation) == (windows, windows * SCORED, implementation)
    assert score.bits_per_token == pytest.approx(expected, abs=2e-5)


def test_score_sees_the_cache_format() -> None:
    exact, rounded = (evaluate(PARAMS, TINY, TEXT[:WINDOW], kv_format=f).bits_per_token for f in ("fp32", "bf16"))
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=2e-2)


def test_bytes_per_token_scales_the_score() -> None:
    score = evaluate(PARAMS, TINY, TEXT[:WINDOW], 4.0)
    assert score.bits_per_byte == score.bits_per_token / 4


@pytest.mark.parametrize(("text", "sentence"), [(TEXT[:511], "at least 512"), ([61] * 512, "outside the vocabulary")])
def test_bad_text_is_one_sentence(text: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(PARAMS, TINY, text)
