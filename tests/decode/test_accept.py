"""The accept length of a text: it adds up, and on the demo model it is what drafting was built for."""

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import load_checkpoint
from mla_jax.decode.accept import accept_length
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.speculative.config import Speculation
from tests.cache.pool_model import assert_one_sentence
from tests.speculative.agreeable import agreeable_params
from tests.tiny import TINY

TEXT = np.random.default_rng(0).integers(0, TINY.vocab_size, 4 * 64 + 3).tolist()


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_histogram_adds_up(temperature):
    result = accept_length(
        agreeable_params(), TINY, TEXT, Speculation.chain(2), temperature=temperature, num_prompts=4, new_tokens=15
    )
    assert set(result.histogram) <= {1, 2, 3} and len(result.histogram) > 1
    assert sum(n * times for n, times in result.histogram.items()) == 4 * 15
    assert result.mean == pytest.approx(60 / sum(result.histogram.values()))


def test_a_text_that_is_too_short_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="has 259 tokens; an accept length needs 64 prompts of 64") as error:
        accept_length(agreeable_params(), TINY, TEXT, Speculation.chain(1))
    assert_one_sentence(str(error.value))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_demo_model_on_its_held_out_sample():
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    text = list(HELDOUT.read_bytes())
    means = {}
    for speculation in (Speculation.chain(1), Speculation.chain(3), Speculation(3, 4, 8)):
        for temperature in (0.0, 1.0):
            result = accept_length(params, config, text, speculation, temperature=temperature)
            means[speculation, temperature] = result.mean
            print(f"{speculation} at temperature {temperature}: {result.mean:.4f}, {result.histogram}")
    one, three, tree = (means[s, 0.0] for s in (Speculation.chain(1), Speculation.chain(3), Speculation(3, 4, 8)))
    assert one >= 1.75
    assert one < three < tree
    assert means[Speculation.chain(1), 1.0] > 1.5
