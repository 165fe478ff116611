import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode import generate as generate_module
from mla_jax.decode.generate import Generation, Settings, generate
from mla_jax.decode.sampling import Sampling
from mla_jax.decode.state import Status, empty_state
from mla_jax.decode.step import decode_step
from mla_jax.model.transformer import forward, lm_logits
from tests.tiny import TINY, prompts, tiny_params

PARAMS = tiny_params()
LENGTHS = (1, 2, 63, 64, 65, 128, 129, 300)  # page and prefill-chunk borders
NEW = 24


def run(wanted: list[list[int]], **settings: object) -> Generation:
    return generate(PARAMS, TINY, wanted, Settings(**{"max_new_tokens": NEW, "kv_format": "fp32"} | settings))


def tokens(result: Generation) -> list[list[int]]:
    return [s.tokens for s in result.sequences]


@pytest.fixture(scope="module")
def plain() -> Generation:
    return run(prompts(LENGTHS))


def test_greedy_text_is_that_of_whole_forward_passes(plain: Generation) -> None:
    whole = jax.jit(lambda ids: lm_logits(PARAMS, forward(PARAMS, TINY, ids))[0])
    longest = max(LENGTHS) + NEW
    for prompt, sequence in zip(prompts(LENGTHS), plain.sequences, strict=True):
        ids = prompt + sequence.tokens
        logits = np.asarray(whole(jnp.asarray([ids + [0] * (longest - len(ids))], jnp.int32)))
        for i, token in enumerate(sequence.tokens):
            row = logits[len(prompt) + i - 1]
            # Rounding may decide a near tie either way: see "Equality" in CONTRIBUTING.
            assert row[token] >= row.max() - 1e-4


def test_a_request_is_the_same_alone_and_among_others(plain: Generation) -> None:
    for index in (0, 3, 7):
        assert tokens(run([prompts(LENGTHS)[index]])) == [plain.sequences[index].tokens]


def test_reference_and_xla_write_the_same(plain: Generation) -> None:
    assert tokens(run(prompts(LENGTHS), implementation="reference")) == tokens(plain)


def test_report_adds_up(plain: Generation) -> None:
    assert plain.steps == NEW
    assert {s.finish_reason for s in plain.sequences} == {"length"}
    assert plain.pages_total == plain.pages_free_before == plain.pages_free_after
    assert plain.pages_used == sum(-(-(n - 1 + NEW) // 64) for n in LENGTHS)
    assert plain.implementation == "xla"


@pytest.mark.parametrize("kv_format", ["bf16", "fp16"])
def test_narrow_formats_mostly_agree(plain: Generation, kv_format: str) -> None:
    got = np.array(tokens(run(prompts(LENGTHS), kv_format=kv_format)))
    assert np.mean(got[:, 0] == np.array(tokens(plain))[:, 0]) >= 0.75


def test_sampling_depends_on_seed_and_request_and_on_nothing_else() -> None:
    settings = {"sampling": Sampling.create(1.0), "seed": 5}
    both = tokens(run(prompts((40, 70)), **settings))
    assert tokens(run(prompts((40, 70)), **settings)) == both
    assert tokens(run(prompts((40,)), **settings)) == both[:1]
    assert tokens(run(prompts((40, 70)), **settings | {"seed": 6})) != both
    same_prompt = tokens(run([prompts((40,))[0]] * 2, **settings))
    assert same_prompt[0] != same_prompt[1]


def test_a_stop_token_ends_its_sequence_alone(plain: Generation) -> None:
    stop = plain.sequences[2].tokens[3]
    result = run(prompts(LENGTHS), stop_tokens=(stop,))
    for before, after in zip(plain.sequences, result.sequences, strict=True):
        if stop in before.tokens:
            assert after.tokens == before.tokens[: before.tokens.index(stop) + 1]
            assert after.finish_reason == "stop"
        else:
            assert (after.tokens, after.finish_reason) == (before.tokens, "length")
    assert result.pages_free_after == result.pages_total


def test_a_full_pool_ends_sequences_and_loses_nothing(plain: Generation) -> None:
    needed = sum(-(-(n - 1) // 64) for n in LENGTHS)
    result = run(prompts(LENGTHS), num_pages=1 + needed + 2)
    reasons = [s.finish_reason for s in result.sequences]
    assert "pages" in reasons and "length" in reasons
    for before, after in zip(plain.sequences, result.sequences, strict=True):
        assert after.tokens == before.tokens[: len(after.tokens)]
        assert (after.finish_reason == "length") == (len(after.tokens) == NEW)
    assert result.pages_free_after == result.pages_total


def test_what_ends_gives_its_pages_to_what_goes_on(plain: Generation) -> None:
    """Two sequences of which each needs two pages at last, in a pool of three: the stop of one feeds the other."""
    two = prompts((60, 60))
    alone = run(two, max_new_tokens=60)
    first, second = (s.tokens for s in alone.sequences)
    stop = next(t for t in first[:20] if t not in second)
    crowded = run(two, max_new_tokens=60, num_pages=1 + 3)
    assert sorted(s.finish_reason for s in crowded.sequences) == ["length", "pages"]
    result = run(two, max_new_tokens=60, num_pages=1 + 3, stop_tokens=(stop,))
    assert [s.finish_reason for s in result.sequences] == ["stop", "length"]
    assert result.sequences[1].tokens == second
    assert result.pages_free_after == result.pages_total == 3 >= result.pages_used


def test_tokens_arrive_in_order_through_the_callback() -> None:
    seen: list[list[int]] = [[], []]
    result = generate(
        PARAMS, TINY, prompts((5, 9)), Settings(max_new_tokens=6, kv_format="fp32"), lambda i, new: seen[i].extend(new)
    )
    assert seen == tokens(result)


@pytest.mark.parametrize(
    ("wanted", "settings", "sentence"),
    [
        ([], {}, "at least one prompt"),
        ([[1], []], {}, "Prompt 2 of 2 is empty"),
        ([[1, 61]], {}, "token 61, outside the vocabulary of 61"),
        ([[-1]], {}, "token -1, outside"),
        (["text"], {}, "Prompt 1 of 1 is text"),
        ([[1]], {"seed": 2**32}, "seed must be"),
        ([[1]], {"num_pages": 1}, "num_pages must be at least 2"),
        ([[1]], {"stop_tokens": (61,)}, "stop_tokens holds 61"),
        ([[1]], {"max_new_tokens": 4096}, "4096 positions"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([[1] * 200], {"num_pages": 3}, "need 4 pages of 64 tokens, but the pool has 2"),
        ([[1]], {"kv_format": "int4"}, "'int4' is not known"),
        ([[1]], {"implementation": "cuda"}, "'cuda' is not known"),
    ],
)
def test_bad_input_is_one_sentence(wanted: list, settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        run(wanted, **settings)
    assert "\n" not in str(error.value)


def _state(lengths: tuple[int, ...]) -> object:
    settings = Settings(max_new_tokens=200, kv_format="fp32")
    state = generate_module._admit(TINY, prompts(lengths), settings)
    state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, state)
    return generate_module._prefill(PARAMS, TINY, state, prompts(lengths))


def test_step_compiles_once_never_leaves_the_device_and_reads_no_foreign_byte() -> None:
    """Every cache byte is NaN before the prompts are written, and lengths cross pages."""
    lengths = (3, 60, 127)
    state = _state(lengths)
    stops = jnp.zeros((TINY.vocab_size,), bool)
    jaxpr = str(jax.make_jaxpr(lambda p, s: decode_step(p, s, Sampling(), stops, config=TINY))(PARAMS, state))
    assert "callback" not in jaxpr
    expected = tokens(run(prompts(lengths), max_new_tokens=80))
    before = decode_step._cache_size()
    rows = []
    for _ in range(80):
        state, emitted = decode_step(PARAMS, state, Sampling(), stops, config=TINY)
        rows.append(np.asarray(emitted.tokens))
    assert decode_step._cache_size() == before + 1
    assert np.stack(rows, axis=1).tolist() == expected
    assert state.pool.check()


def test_empty_slots_are_padding() -> None:
    state = empty_state(TINY, 4, 8, 2, "fp32", 0)
    state, emitted = decode_step(PARAMS, state, Sampling(), jnp.zeros((TINY.vocab_size,), bool), config=TINY)
    assert emitted.tokens.tolist() == [-1] * 4
    assert emitted.status.tolist() == [Status.EMPTY] * 4
    assert int(state.pool.num_live) == 0
    for layer in state.cache.layers:
        assert not np.asarray(layer[1:]).any()  # only the reserved page was written
