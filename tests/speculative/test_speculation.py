import dataclasses

import pytest

from mla_jax.speculative.config import Speculation
from tests.cache.pool_model import assert_one_sentence
from tests.tiny import TINY


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((0, 1, 2), "steps must be an integer of at least 1, got 0"),
        ((3, 0, 4), "topk must be an integer of at least 1, got 0"),
        ((1, 1, 1), "draft_tokens must be an integer of at least 2, got 1"),
        ((3, 1, 3), "chain .topk 1. of 3 steps has draft_tokens 4"),
        ((3, 1, 8), "chain .topk 1. of 3 steps has draft_tokens 4"),
        ((2, 3, 14), "at most 13 nodes"),
        ((64, 1, 65), "draft_tokens must be at most 64, got 65"),
        ((1, 10**9, 8), "topk must be at most 64"),
        ((10**9, 8, 16), "steps must be at most 64"),
        ((2.0, 3, 4), "steps must be an integer"),
        (("2", 3, 4), "steps must be an integer"),
        ((True, 3, 4), "steps must be an integer"),
    ],
)
def test_bad_sizes_are_one_sentence(sizes, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        Speculation(*sizes)
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [((3, 1, 4), 4), ((5, 1, 6), 6), ((3, 4, 8), 4), ((5, 8, 16), 6), ((5, 8, 4), 4), ((2, 3, 13), 3)],
)
def test_most_kept_is_the_longest_path(sizes, kept):
    assert Speculation(*sizes).most_kept == kept


def test_chain_counts_its_root():
    assert Speculation.chain(3) == Speculation(3, 1, 4)
    assert Speculation.chain(3).is_chain and not Speculation(3, 2, 4).is_chain
    with pytest.raises(ValueError, match="steps must be an integer"):
        Speculation.chain("3")


def test_a_model_must_be_able_to_draft_so():
    Speculation(1, 61, 8).check_model(TINY)
    with pytest.raises(ValueError, match="no multi-token-prediction module") as error:
        Speculation.chain(1).check_model(dataclasses.replace(TINY, num_mtp_layers=0))
    assert_one_sentence(str(error.value))
    with pytest.raises(ValueError, match="topk must be at most the vocabulary, 61, got 62") as error:
        Speculation(1, 62, 8).check_model(TINY)
    assert_one_sentence(str(error.value))
