"""What `evaluate` adds when drafts are asked for."""

import json

import numpy as np
import pytest

from mla_jax.__main__ import main
from mla_jax.cli import evaluate
from mla_jax.decode.accept import AcceptLength
from mla_jax.decode.evaluate import Score
from mla_jax.speculative.config import Speculation
from tests.cache.pool_model import assert_one_sentence


def test_accept_lengths_greedy_and_at_temperature_1(monkeypatch, capsys):
    """The measurement itself has tests of its own, and takes minutes."""
    asked = []

    def measured(params, config, tokens, speculation, *, temperature, kv_format, fp8_queries, implementation):
        asked.append((len(tokens), speculation, temperature, kv_format, fp8_queries, implementation))
        return AcceptLength(2.5 - temperature, {1: 3, 4: 3})

    monkeypatch.setattr(evaluate, "accept_length", measured)
    score = Score(2.0, 2.0, 256, 1, "xla", np.zeros((1, 256), np.int32))
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: score)
    options = ["--mtp-steps", "3", "--mtp-topk", "4", "--mtp-draft-tokens", "8", "--kv-format", "fp32"]
    assert main(["evaluate", "--max-bytes", "512", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["accept_length"], report["accept_length_t1"], report["draft_steps"]) == (2.5, 1.5, 3)
    assert report["accept_histogram"] == report["accept_histogram_t1"] == {"1": 3, "4": 3}
    assert report["bits_per_byte"] == 2.0
    assert asked == [(512, Speculation(3, 4, 8), t, "fp32", False, None) for t in (0.0, 1.0)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mtp-steps", "1", "--max-bytes", "4095"], "has 4095 tokens; an accept length needs 64 prompts of 64"),
        (["--mtp-steps", "3", "--mtp-draft-tokens", "3"], "has draft_tokens 4"),
        (["--mtp-topk", "2"], "need --mtp-steps N"),
        (["--mtp-steps", "100"], "at most 64"),
    ],
)
def test_wrong_options_give_one_sentence(capsys, options, words):
    assert main(["evaluate", *options]) == 2
    sentence = capsys.readouterr().err.strip()
    assert words in sentence
    assert_one_sentence(sentence.removeprefix("error: "))
