import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode.generate import Generation, Settings, generate
from mla_jax.decode.sampling import Sampling
from mla_jax.model.transformer import forward, lm_logits
from tests.tiny import TINY, prompts, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")
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
    for index in (0, 7):
        assert tokens(run([prompts(LENGTHS)[index]])) == [plain.sequences[index].tokens]


def test_reference_and_xla_write_the_same(plain: Generation) -> None:
    assert tokens(run(prompts(LENGTHS), implementation="reference")) == tokens(plain)


def test_report_adds_up(plain: Generation) -> None:
    assert plain.steps >= NEW  # the long prompts' prefill lets the short ones begin
    assert {s.finish_reason for s in plain.sequences} == {"length"}
    assert plain.pages_total == plain.pages_free_before == plain.pages_free_after
    most = sum(-(-(n - 1 + NEW) // 64) for n in LENGTHS)
    assert plain.pages_total == most >= plain.pages_used > most // 2
    assert plain.implementation == "xla"


@pytest.mark.parametrize("kv_format", ["bf16", "fp16"])
def test_narrow_formats_mostly_agree(plain: Generation, kv_format: str) -> None:
    got = np.array(tokens(run(prompts(LENGTHS), kv_format=kv_format)))
    assert np.mean(got[:, 0] == np.array(tokens(plain))[:, 0]) >= 0.75


def test_sampling_depends_on_seed_and_request_and_on_nothing_else() -> None:
    # Slots, pages and the longest prompt are the same each time, so that little is compiled.
    settings = {"sampling": Sampling.create(1.0), "seed": 5, "num_slots": 2, "num_pages": 5}
    both = tokens(run(prompts((70, 40)), **settings))
    assert tokens(run(prompts((70, 40)), **settings)) == both
    assert tokens(run(prompts((70,)), **settings)) == both[:1]
    assert tokens(run(prompts((70, 40)), **settings | {"seed": 6})) != both
    same_prompt = tokens(run([prompts((70,))[0]] * 2, **settings))
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


def test_a_small_pool_makes_requests_wait_and_loses_nothing(plain: Generation) -> None:
    most = max(-(-(n - 1 + NEW) // 64) for n in LENGTHS)
    result = run(prompts(LENGTHS), num_pages=1 + most)
    assert tokens(result) == tokens(plain)
    assert {s.finish_reason for s in result.sequences} == {"length"}
    assert result.pages_free_after == result.pages_total == most >= result.pages_used
    assert result.steps > plain.steps


def test_more_prompts_than_slots(plain: Generation) -> None:
    result = run(prompts(LENGTHS), num_slots=3)
    assert tokens(result) == tokens(plain)
    assert result.pages_free_after == result.pages_total


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
        ([[1]], {"stop_tokens": (61,)}, "stop_tokens holds token 61"),
        ([[1]], {"max_new_tokens": 4096}, "4096 positions"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ([[1] * 200], {"num_pages": 3}, "may need 4 pages of 64 tokens, but the pool has 2"),
        ([[1]], {"kv_format": "int4"}, "'int4' is not known"),
        ([[1]], {"implementation": "cuda"}, "'cuda' is not known"),
    ],
)
def test_bad_input_is_one_sentence(wanted: list, settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        run(wanted, **settings)
    assert "\n" not in str(error.value)
