import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode.evaluate import SCORED, WINDOW, Score, evaluate
from mla_jax.model.transformer import forward, lm_logits
from tests.tiny import TINY, tiny_params

PARAMS = tiny_params()
TEXT = np.random.default_rng(3).integers(0, TINY.vocab_size, 5 * SCORED + 100).tolist()


def by_hand(text: list[int]) -> tuple[float, np.ndarray]:
    """Whole forward passes over each window: bits per token of the last 256, and what is most likely in their place."""
    whole = jax.jit(lambda ids: jax.nn.log_softmax(lm_logits(PARAMS, forward(PARAMS, TINY, ids)))[0])
    starts = range(0, len(text) - WINDOW + 1, SCORED)
    nats, best = 0.0, []
    for start in starts:
        ids = np.asarray(text[start : start + WINDOW], np.int32)
        logprobs = np.asarray(whole(jnp.asarray(ids[None])))
        nats -= sum(float(logprobs[i - 1, ids[i]]) for i in range(WINDOW - SCORED, WINDOW))
        best.append(logprobs[WINDOW - SCORED - 1 : WINDOW - 1].argmax(-1))
    return nats / np.log(2) / (len(starts) * SCORED), np.stack(best)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_score_equals_whole_forward_passes(implementation: str) -> None:
    expected, best = by_hand(TEXT)
    windows = len(best)
    score = evaluate(PARAMS, TINY, TEXT, kv_format="fp32", implementation=implementation)
    assert (score.windows, score.scored_tokens, score.implementation) == (windows, windows * SCORED, implementation)
    assert score.bits_per_token == pytest.approx(expected, abs=2e-5)
    np.testing.assert_array_equal(score.predictions, best)


def test_score_sees_the_cache_format() -> None:
    exact, rounded = (evaluate(PARAMS, TINY, TEXT[:WINDOW], kv_format=f) for f in ("fp32", "bf16"))
    assert exact.bits_per_token != rounded.bits_per_token
    assert rounded.bits_per_token == pytest.approx(exact.bits_per_token, rel=2e-2)
    assert 0.9 < rounded.top1_agreement(exact) < 1 == exact.top1_agreement(exact)


def test_scores_of_other_texts_are_not_compared() -> None:
    one, two = (Score(1.0, 1.0, n * SCORED, n, "xla", np.zeros((n, SCORED), np.int32)) for n in (1, 2))
    with pytest.raises(ValueError, match="1 and 2 windows"):
        one.top1_agreement(two)


def test_bytes_per_token_scales_the_score() -> None:
    score = evaluate(PARAMS, TINY, TEXT[:WINDOW], 4.0)
    assert score.bits_per_byte == score.bits_per_token / 4


@pytest.mark.parametrize(("text", "sentence"), [(TEXT[:511], "at least 512"), ([61] * 512, "outside the vocabulary")])
def test_bad_text_is_one_sentence(text: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(PARAMS, TINY, text)
