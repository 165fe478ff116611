"""The speculative step: the text of the plain one, whatever ends it, whatever the pool allows."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from mla_jax import load_checkpoint
from mla_jax.attention import api, xla
from mla_jax.attention.tree import without_mask
from mla_jax.decode.sampling import Sampling, probabilities
from mla_jax.decode.speculative_step import speculative_step
from mla_jax.decode.state import Status
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model.transformer import forward, lm_logits
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.draft import drawing
from tests.speculative.agreeable import agreeable_params
from tests.speculative.slots import Slots
from tests.tiny import TINY, prompts

PARAMS = agreeable_params()
CHAIN, TREE = Speculation.chain(3), Speculation(3, 4, 8)
LENGTHS = (1, 2, 62, 64, 65, 129)  # page borders, and a prompt of which nothing is prefilled
NEW = 70
WARM = Sampling.create(0.8, top_p=0.95)
BOTH = pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])


def slots_of(speculation: Speculation | None, **options) -> Slots:
    """Always of one shape, so that this file compiles little."""
    return Slots(TINY, PARAMS, len(LENGTHS), speculation, pages=17, **options)


@pytest.fixture(scope="module", autouse=True)
def tables_must_reach_as_far_as_lengths():
    """xla reads nothing past the end of a table; kernels do. So its output is NaN where one would."""
    decode = api.IMPLEMENTATIONS["xla"].decode

    def strict(q, kv_cache, block_table, kv_lens, **options):
        out, lse = decode(q, kv_cache, block_table, kv_lens, **options)
        too_long = (kv_lens > block_table.shape[1] * kv_cache.shape[1])[:, None, None, None]
        return jnp.where(too_long, jnp.nan, out), lse

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(api.IMPLEMENTATIONS, "xla", replace(api.IMPLEMENTATIONS["xla"], decode=strict))
        yield


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return slots_of(None).enter_all(prompts(LENGTHS)).run(NEW)[0]


@pytest.fixture(scope="module")
def warm() -> list[list[int]]:
    return slots_of(None).enter_all(prompts(LENGTHS), sampling=WARM).run(NEW, greedy=False)[0]


@BOTH
def test_greedy_text_is_the_plain_one(plain, speculation):
    slots = slots_of(speculation).enter_all(prompts(LENGTHS))
    texts, runs = slots.run(NEW)
    assert texts == plain
    counts = np.bincount(np.concatenate(runs), minlength=5)
    assert (counts[1:] > 0).all(), f"accepted runs {counts}: not every length occurs"
    assert slots.state.pool.check()
    held = -(-np.asarray(slots.state.pool.kv_lens) // 64)
    assert int(slots.state.pool.num_live) == held.sum()


@BOTH
def test_rows_of_accepted_tokens_are_those_of_a_plain_run(speculation):
    slots = slots_of(speculation).enter_all(prompts(LENGTHS))
    texts, _ = slots.run(20)
    lens = np.asarray(slots.state.pool.kv_lens)
    wanted = [[*p, *t] for p, t in zip(prompts(LENGTHS), texts, strict=True)]
    fresh = slots_of(speculation).enter_all(wanted)
    for slot, length in enumerate(np.minimum(lens, [len(w) - 1 for w in wanted])):
        for layer in range(TINY.num_layers):
            np.testing.assert_allclose(slots.rows(slot, layer, length), fresh.rows(slot, layer, length), atol=1e-5)


@pytest.mark.full
def test_an_fp8_cache_takes_part():
    """Rows that differ by rounding may fall to another side in e4m3, so not every text has to be the same."""
    texts = [slots_of(s, kv_format="fp8_e4m3").enter_all(prompts(LENGTHS)).run(30)[0] for s in (None, TREE)]
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= len(LENGTHS) - 1


def test_a_tree_samples_the_text_of_the_plain_step(warm):
    """Target-only sampling draws with the keys of the plain step, so not only the distribution is the same."""
    texts, runs = slots_of(TREE).enter_all(prompts(LENGTHS), sampling=WARM).run(NEW, greedy=False)
    assert texts == warm
    assert np.mean(np.concatenate(runs)) > 1.2


def test_a_chain_samples_texts_that_depend_on_the_request_alone():
    def run(greedy_slots=()):
        slots = slots_of(CHAIN)
        for slot, prompt in enumerate(prompts(LENGTHS)):
            slots.enter(slot, prompt, sampling=Sampling.create() if slot in greedy_slots else WARM)
        return slots.run(30, greedy=False)

    texts, runs = run()
    assert run()[0] == texts
    assert np.mean(np.concatenate(runs)) > 1.2
    mixed, _ = run(greedy_slots=(0, 3))
    assert [mixed[i] == texts[i] for i in range(len(LENGTHS))] == [False, True, True, False, True, True]


PAIRS = 1600  # texts of two tokens, drawn in groups of ROWS
ROWS = 64


COOL = Sampling.create(0.5)


@lru_cache
def pair_probabilities(prompt: tuple[int, ...]) -> np.ndarray:
    """[vocab, vocab] of the first two tokens behind a prompt, from whole forward passes."""
    vocab = TINY.vocab_size
    texts = jnp.asarray([[*prompt, token] for token in range(vocab)], jnp.int32)
    logits = jax.jit(lambda t: lm_logits(PARAMS, forward(PARAMS, TINY, t)))(texts)
    first = np.asarray(probabilities(logits[:1, -2], COOL), np.float64)[0]
    return first[:, None] * np.asarray(probabilities(logits[:, -1], COOL), np.float64)


@pytest.mark.full  # its parts are tested by default, in test_distribution
@pytest.mark.parametrize("forgets", [False, True], ids=["right", "draft temperature forgotten"])
def test_the_step_samples_the_models_distribution(forgets, monkeypatch):
    """χ² of the first two tokens, which come from one step or two. More draws test the samplers alone, elsewhere."""
    step = partial(speculative_step, config=TINY, speculation=CHAIN)
    if forgets:
        monkeypatch.setattr(
            "mla_jax.decode.speculative_step.drawing",
            lambda keys, distribution: (
                lambda logits, i: (
                    drawing(keys, distribution)(logits, i)[0],
                    jax.nn.softmax(logits, axis=-1),
                )
            ),
        )
        step = jax.jit(partial(speculative_step.__wrapped__, config=TINY, speculation=CHAIN))
    prompt, slots = tuple(prompts((9,))[0]), jnp.arange(len(LENGTHS), dtype=jnp.int32)
    master = slots_of(CHAIN).enter_all([prompt] * len(LENGTHS), sampling=COOL)
    counts, expected = np.zeros((TINY.vocab_size,) * 2), pair_probabilities(prompt) * PAIRS
    for keys in jax.random.split(jax.random.key(5), (PAIRS // len(LENGTHS), len(LENGTHS))):
        state, first = step(PARAMS, replace(jax.tree.map(jnp.copy, master.state), keys=keys), slots)
        _, second = step(PARAMS, state, slots)
        for tokens in np.concatenate([first.tokens, second.tokens], axis=1).tolist():
            counts[tuple([t for t in tokens if t >= 0][:2])] += 1
    assert not counts[expected == 0].any()
    often = expected >= 5
    observed, wanted = (np.append(x[often], x[~often].sum()) for x in (counts, expected))
    p = chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1)
    print(f"{len(wanted)} cells, p = {p:.2g}")
    assert (p < 1e-4) if forgets else (p > 1e-4)


@BOTH
def test_greedy_requests_among_sampling_ones_stay_greedy(plain, warm, speculation):
    slots = slots_of(speculation)
    for slot, prompt in enumerate(prompts(LENGTHS)):
        slots.enter(slot, prompt, sampling=Sampling.create() if slot % 2 else WARM)
    texts, _ = slots.run(30, greedy=False)
    for slot in range(1, len(LENGTHS), 2):
        assert texts[slot] == plain[slot][:30]
    if speculation is TREE:
        assert texts[0] == warm[0][:30]


@BOTH
def test_a_stop_token_inside_an_accepted_run_ends_it_there(plain, speculation):
    _, runs = slots_of(speculation).enter_all(prompts(LENGTHS)).run(NEW)
    stops, inside = [], 0
    for text, lengths in zip(plain, runs, strict=True):
        ends = np.cumsum(lengths) - 1  # the last token of each run
        firsts = sorted({text.index(token) for token in text})
        chosen = [at for at in firsts if at not in ends] or firsts
        inside += chosen[0] not in ends
        stops.append(chosen[-1])
    assert inside >= 3
    slots = slots_of(speculation)
    for slot, prompt in enumerate(prompts(LENGTHS)):
        slots.enter(slot, prompt, stops=[plain[slot][stops[slot]], -1])
    texts, _ = slots.run(NEW)
    assert texts == [text[: at + 1] for text, at in zip(plain, stops, strict=True)]
    assert slots.state.status.tolist() == [Status.STOP] * len(LENGTHS)
    assert int(slots.state.pool.num_live) == 0 and slots.state.pool.check()


@BOTH
def test_a_length_limit_inside_an_accepted_run_ends_it_there(plain, speculation):
    slots = slots_of(speculation)
    for slot, prompt in enumerate(prompts(LENGTHS)):
        slots.enter(slot, prompt, new=slot + 5)
    texts, _ = slots.run(NEW)
    assert texts == [text[: slot + 5] for slot, text in enumerate(plain)]
    assert slots.state.status.tolist() == [Status.LENGTH] * len(LENGTHS)
    assert slots.state.remaining.tolist() == [0] * len(LENGTHS)
    assert int(slots.state.pool.num_live) == 0


@BOTH
def test_a_full_table_narrows_drafts_and_then_ends_a_request(speculation):
    """Six pages each: the text ends where the plain one does, after drafts that had less and less room."""
    texts = []
    for which in (None, speculation):
        slots = slots_of(which)
        for slot, length in enumerate((372, 383)):
            slots.enter(slot, prompts((length,))[0])
        texts.append(slots.run(NEW)[0])
        assert slots.state.status.tolist()[:2] == [Status.PAGES] * 2
        assert int(slots.state.pool.num_live) == 0
    assert texts[1] == texts[0]
    assert [len(text) for text in texts[0]] == [13, 2, 0, 0, 0, 0]


@BOTH
def test_a_pool_that_runs_dry_in_a_step_ends_one_request_and_nothing_else(plain, speculation):
    """Slots 4 and 5 need a page at once, and one is free; slot 3 drafts in the room that its page has."""
    wanted = prompts(LENGTHS)
    slots = slots_of(speculation)
    slots.hold(4, slots=(0, 1, 2))
    for slot in (3, 4, 5):
        slots.enter(slot, wanted[slot][:65])
    emitted = slots.step()
    assert emitted.status.tolist()[3:] == [Status.RUNNING, Status.RUNNING, Status.PAGES]
    assert int(emitted.pages) == 17
    assert emitted.tokens[5].tolist() == [-1] * emitted.tokens.shape[1]
    assert slots.state.pool.check()
    texts = [[t for t in row if t >= 0] for row in emitted.tokens.tolist()]
    for _ in range(4):
        for text, row in zip(texts, slots.step().tokens.tolist(), strict=True):
            text += [t for t in row if t >= 0]
    for slot in (3, 4):
        assert len(texts[slot]) >= 5 and texts[slot] == plain[slot][: len(texts[slot])]


@BOTH
def test_drafts_with_a_page_short_give_the_plain_text(plain, speculation):
    """Slot 2 stands before the end of its page, and every other page is taken: it drafts within its own."""
    slots = slots_of(speculation)
    slots.hold(1, slots=(0, 1, 3, 4, 5))
    slots.enter(2, prompts(LENGTHS)[2])
    assert int(slots.state.pool.kv_lens[2]) == 61
    text = []
    while int(slots.state.status[2]) == Status.RUNNING:
        text += [t for t in slots.step().tokens[2].tolist() if t >= 0]
    assert text == plain[2][:3]
    assert int(slots.state.pool.num_free) == 1


@BOTH
def test_padding_changes_nothing_and_unnamed_slots_rest(plain, speculation):
    slots = slots_of(speculation).enter_all(prompts(LENGTHS))
    nobody = len(LENGTHS)
    before = slots.state.pool.kv_lens.tolist()
    emitted = slots.step(slots=[nobody, 4, nobody, 2, nobody, nobody])
    assert emitted.status.tolist() == [0, Status.RUNNING, 0, Status.RUNNING, 0, 0]
    for row, slot in ((1, 4), (3, 2)):
        new = [t for t in emitted.tokens[row].tolist() if t >= 0]
        assert new == plain[slot][: len(new)]
        before[slot] += len(new)
    assert (np.asarray(emitted.tokens)[[0, 2, 4, 5]] == -1).all()
    assert slots.state.pool.kv_lens.tolist() == before
    assert slots.state.pool.check()


def test_a_slot_that_is_used_again_does_not_draft_from_its_last_request(plain):
    slots = slots_of(CHAIN).enter_all([prompts((70,))[0]] * len(LENGTHS), new=6)
    slots.run(6)
    for slot, prompt in enumerate(prompts(LENGTHS)):
        slots.enter(slot, prompt)
    assert slots.state.mtp.count.tolist() == [0, 1, 1, 1, 1, 1]
    assert slots.run(NEW)[0] == plain


def test_one_compilation_for_all_lengths_and_no_host_callback():
    slots = slots_of(CHAIN).enter_all(prompts(LENGTHS))
    slots.step()
    before = speculative_step._cache_size()
    for i in range(20):
        slots.step()
        if i == 10:
            slots.state = replace(slots.state, status=slots.state.status.at[3].set(Status.LENGTH))
    assert speculative_step._cache_size() == before
    chosen = jnp.arange(len(LENGTHS), dtype=jnp.int32)
    for speculation in (CHAIN, TREE):
        state = slots_of(speculation).state
        for greedy in (True, False):
            jaxpr = jax.make_jaxpr(
                lambda p, s, sp=speculation, g=greedy: speculative_step(
                    p, s, chosen, config=TINY, speculation=sp, greedy=g
                )
            )(PARAMS, state)
            assert "callback" not in str(jaxpr)


def test_an_implementation_without_a_mask_serves_trees(plain, monkeypatch):
    decode = jax.jit(xla.decode, static_argnames=("d_v", "causal"))

    def maskless(*arrays, tree_mask, **options):
        assert tree_mask is None
        return decode(*arrays, tree_mask=None, **options)

    named = replace(api.IMPLEMENTATIONS["xla"], name="maskless", decode=without_mask(maskless))
    monkeypatch.setitem(api.IMPLEMENTATIONS, "maskless", named)
    texts, _ = slots_of(TREE).enter_all(prompts(LENGTHS)).run(20, implementation="maskless")
    assert texts == [text[:20] for text in plain]


SIZES = [(8, 64), (64, 256)]  # prompts, new tokens of each
DEMO = [Speculation.chain(1), Speculation.chain(3), Speculation.chain(5), TREE, Speculation(5, 8, 16)]


def demo_texts(speculation: Speculation | None, count: int, new: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of prompts of 64 bytes cut evenly from the held-out sample."""
    config, params = load_checkpoint(CHECKPOINT, jnp.float32)
    data = HELDOUT.read_bytes()
    cut = [list(data[at : at + 64]) for at in np.arange(count) * (len(data) // count)]
    return Slots(config, params, count, speculation).enter_all(cut).run(new)


@pytest.fixture(scope="module")
def demo_plain() -> dict[tuple[int, int], list[list[int]]]:
    return {}


LONG = [pytest.mark.full, pytest.mark.timeout(3600)]
# In the short version, where compiling takes most of the time; a chain's greedy text is a test of the commands.
SHORT = (Speculation(5, 8, 16),)


@pytest.mark.parametrize(
    ("speculation", "size"),
    [pytest.param(s, size, marks=LONG if size == (64, 256) or s not in SHORT else []) for s in DEMO for size in SIZES],
    ids=str,
)
def test_the_demo_model_writes_its_greedy_text(demo_plain, speculation, size):
    if size not in demo_plain:
        demo_plain[size] = demo_texts(None, *size)[0]
    texts, runs = demo_texts(speculation, *size)
    assert texts == demo_plain[size]
    print(f"{speculation}: {np.mean(np.concatenate(runs)):.3f} tokens a step")
    assert np.mean(np.concatenate(runs)) > 1.5
