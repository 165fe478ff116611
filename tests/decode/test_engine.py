"""Requests that come, wait, share, end and are cancelled, against each of them alone."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode.engine import Engine
from mla_jax.decode.request import Request
from mla_jax.decode.sampling import Sampling, kept_logits
from mla_jax.decode.state import enter
from mla_jax.model.transformer import forward, lm_logits
from mla_jax.speculative.config import Speculation
from tests.tiny import TINY, prompts, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")
PARAMS = tiny_params()
LONGEST = 320


def make(**options: object) -> Engine:
    """Of few shapes, so that this file compiles little."""
    defaults = {"num_slots": 4, "num_pages": 1 + 12, "max_seq_len": LONGEST, "kv_format": "fp32", "prefill_chunk": 32}
    options = defaults | options
    return Engine(PARAMS, TINY, **({"buckets": (options["num_slots"],)} | options))


@dataclass
class Seen:
    """Of one request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None


def drain(engine: Engine) -> dict[int, Seen]:
    seen: dict[int, Seen] = defaultdict(Seen)
    for update in engine.run():
        assert seen[update.request].reason is None  # nothing comes after the last update
        seen[update.request].tokens += update.tokens
        seen[update.request].reason = update.finish_reason
    return seen


@jax.jit
def _choices(ids: jax.Array, first: jax.Array, stream: jax.Array, sampling: Sampling) -> jax.Array:
    """What each position's draw compares, `[LONGEST, vocab]`: logits, or those of sampling with the request's noise."""
    logits = lm_logits(PARAMS, forward(PARAMS, TINY, ids[None]))[0]
    key = jax.random.fold_in(jax.random.key(0), stream)
    keys = jax.vmap(partial(jax.random.fold_in, key))(1 + jnp.arange(LONGEST, dtype=jnp.int32))
    noise = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:]))(keys)
    return jnp.where(sampling.temperature > 0, kept_logits(logits, sampling) + noise, logits)


def is_its_own_text(request: Request, stream: int, tokens: list[int]) -> bool:
    """Whether the text is what whole forward passes give for it alone, near ties apart (Equality, CONTRIBUTING)."""
    ids = [*request.prompt, *tokens]
    s = request.sampling
    sampling = Sampling(np.float32(s.temperature), np.int32(s.top_k), np.float32(s.top_p))
    padded = np.asarray(ids + [0] * (LONGEST - len(ids)), np.int32)
    rows = np.asarray(_choices(padded, np.int32(0), np.uint32(stream), sampling))
    at = len(request.prompt) - 1 + np.arange(len(tokens))
    return bool(np.all(rows[at, tokens] >= rows[at].max(axis=1) - 1e-3))


def check_all(requests: list[Request], seen: dict[int, Seen], cancelled: set[int]) -> None:
    for i, request in enumerate(requests):
        tokens = seen[i].tokens
        assert is_its_own_text(request, i, tokens), i
        if i in cancelled:
            assert seen[i].reason is None
            continue
        stops = [t in request.stop_tokens for t in tokens]
        assert not any(stops[:-1])
        if seen[i].reason == "stop":
            assert stops[-1]
        else:
            assert (seen[i].reason, len(tokens)) == ("length", request.max_new_tokens), i


def random_request(rng: np.random.Generator, prefixes: list[list[int]]) -> Request:
    prompt = rng.integers(0, TINY.vocab_size, int(rng.choice([1, 2, 20, 63, 64, 65, 100, 129]))).tolist()
    if rng.random() < 0.4:
        prompt = prefixes[rng.integers(len(prefixes))] + prompt[: int(rng.integers(1, 30))]
    sampling = Sampling.create(*((0.8, 20, 0.9) if rng.random() < 0.3 else (0.0,)))
    stops = tuple(rng.integers(0, TINY.vocab_size, 2).tolist()) if rng.random() < 0.5 else ()
    return Request(prompt, int(rng.choice([1, 2, 7, 20, 70])), sampling, stops)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_soak(request: pytest.FixtureRequest) -> None:
    """Random requests through 16 slots over a pool too small for all of them, with random cancels."""
    number = 2000 if request.config.getoption("--full") else 45
    rng = np.random.default_rng(0)
    prefixes = prompts((64, 130, 200))
    requests = [random_request(rng, prefixes) for _ in range(number)]
    engine = make(num_slots=16, num_pages=1 + 20, buckets=(1, 4, 16) if number >= 2000 else (16,))
    before = enter._cache_size()
    seen: dict[int, Seen] = defaultdict(Seen)
    cancelled: set[int] = set()
    sent, memory, refused = 0, [], 0
    while engine.busy or sent < number:
        while sent < number and rng.random() < 0.6:
            assert engine.submit(requests[sent]) == sent
            sent += 1
            with pytest.raises(ValueError, match="would exceed the engine's max_seq_len"):
                engine.submit(Request([1] * 300, 300))
            refused += 1
        open_ones = [i for i in range(sent) if seen[i].reason is None and i not in cancelled]
        if open_ones and rng.random() < 0.05:
            target = int(rng.choice(open_ones))
            assert engine.cancel(target)
            cancelled.add(target)
        for update in engine.step():
            assert update.request not in cancelled and seen[update.request].reason is None
            seen[update.request].tokens += update.tokens
            seen[update.request].reason = update.finish_reason
        if engine.stats.decode_steps % 100 == 0:
            memory.append(resident_bytes())
            assert engine._state.pool.check()
    assert cancelled and refused == number
    assert engine.pages_free == engine.pages_total == 20
    assert engine.stats.shared_tokens > 0 and engine.stats.most_pages <= 20
    assert enter._cache_size() <= before + 1
    check_all(requests, seen, cancelled)
    if number >= 2000:
        assert memory[-1] - memory[len(memory) // 3] < 64 * 2**20


def test_each_bucket_compiles_once_ahead_of_time() -> None:
    engine = make(buckets=(1, 4))
    assert engine.compile(sampled=True) > 0
    compiled = dict(engine._graphs.compiled)
    kinds = [("decode", b, g) for b in (1, 4) for g in (True, False)] + [("prefill", b, 32) for b in (1, 4)]
    assert set(compiled) == set(kinds)
    for i, prompt in enumerate(prompts((3, 70, 130, 9, 40, 1))):
        engine.submit(Request(prompt, 5 + 9 * i, Sampling.create(0.5 * (i % 2))))
    drain(engine)
    assert engine._graphs.compiled == compiled
    assert engine.compile(sampled=True) == 0
    assert engine.pages_free == engine.pages_total


def test_requests_join_while_others_run_and_leave_when_done() -> None:
    first, second, third = (Request(p, n) for p, n in zip(prompts((10, 64, 5)), (30, 3, 10), strict=True))
    engine = make()
    a = engine.submit(first)
    seen: dict[int, Seen] = defaultdict(Seen)
    order = []

    def take(steps: int) -> None:
        for _ in range(steps):
            for update in engine.step():
                seen[update.request].tokens += update.tokens
                order.append(update.request)

    take(6)
    b, c = engine.submit(second), engine.submit(third)
    take(60)
    assert not engine.busy
    assert order.index(b) < len(order) - 1 - order[::-1].index(a)  # joined before the first had ended
    for number, request in ((a, first), (b, second), (c, third)):
        assert is_its_own_text(request, number, seen[number].tokens)
        assert len(seen[number].tokens) == request.max_new_tokens


def test_whoever_stops_iterating_loses_nothing() -> None:
    wanted = [Request(p, 6) for p in prompts((3, 5, 1))]
    texts = []
    for stops_often in (False, True):
        engine = make()
        got: dict[int, list[int]] = defaultdict(list)
        ended = {}
        for request in wanted:
            engine.submit(request)
        while engine.busy:
            for update in engine.run():
                got[update.request] += update.tokens
                if update.finish_reason:
                    ended[update.request] = update.finish_reason
                if stops_often:
                    break
        texts.append((got, ended))
    assert texts[0] == texts[1] and len(texts[0][1]) == 3


def test_nothing_comes_after_a_cancel_inside_run() -> None:
    engine = make()
    first, second = (engine.submit(Request(p, 6)) for p in prompts((3, 5)))
    after = [u for u in engine.run() if u.request == second or not engine.cancel(second)]
    assert not after or all(u.request != second for u in after)
    assert engine.pages_free == engine.pages_total and not engine.cancel(first)


def test_a_prompt_is_copied() -> None:
    texts = []
    for spoil in (False, True):
        prompt = np.arange(100) % 61
        engine = make()
        engine.submit(Request(prompt, 3))
        engine.step()
        if spoil:
            prompt[:] = 0
        texts.append([t for u in engine.run() for t in u.tokens])
    assert texts[0] == texts[1]


def test_several_steps_between_visits_give_the_same_texts() -> None:
    wanted = [
        Request(p, n, stop_tokens=(7, 9)) for p, n in zip(prompts((3, 64, 100, 9, 1)), (1, 30, 9, 17, 8), strict=True)
    ]
    texts = []
    for steps in (1, 5):
        engine = make(steps_per_visit=steps)
        for request in wanted:
            engine.submit(request)
        texts.append({i: (seen.tokens, seen.reason) for i, seen in drain(engine).items()})
        assert engine.pages_free == engine.pages_total
    assert texts[0] == texts[1]


@pytest.mark.parametrize("speculation", [Speculation.chain(3), Speculation(3, 4, 8)], ids=["chain", "tree"])
def test_drafts_change_no_greedy_text(speculation: Speculation) -> None:
    """With prompts of one token, shared prefixes, stop tokens, slots used again, and several steps per visit."""
    common = prompts((100,))[0]
    wanted = [
        Request(p, n, stop_tokens=(7, 9))
        for p, n in zip(
            [*prompts((3, 64, 1, 2)), [*common, 1, 2], [*common, 3], common], (1, 30, 9, 17, 8, 20, 3), strict=True
        )
    ]
    texts = []
    for options in ({}, {"speculation": speculation, "steps_per_visit": 2}):
        engine = make(**options)
        for request in wanted:
            engine.submit(request)
        texts.append({i: (seen.tokens, seen.reason) for i, seen in drain(engine).items()})
        assert engine.pages_free == engine.pages_total and engine.stats.shared_tokens > 0
    for i, request in enumerate(wanted):
        assert is_its_own_text(request, i, texts[1][i][0])
    assert texts[0] == texts[1]
    assert max(engine.stats.accept_histogram) <= speculation.most_kept
    assert sum(n * t for n, t in engine.stats.accept_histogram.items()) == sum(len(t) for t, _ in texts[1].values())


def test_a_model_without_a_draft_module_cannot_speculate() -> None:
    config = replace(TINY, num_mtp_layers=0)
    with pytest.raises(ValueError, match="no multi-token-prediction module"):
        Engine(tiny_params(config=config), config, speculation=Speculation.chain(1))


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    engine = make(num_pages=1 + 4)
    small = [Request(p, 20) for p in prompts((5,) * 6)]
    first = engine.submit(small[0])
    large = engine.submit(Request(prompts((200,))[0], 40))  # needs the whole pool
    rest = [engine.submit(r) for r in small[1:]]
    ended = [u.request for u in engine.run() if u.finish_reason]
    assert ended[:2] == [first, large] and sorted(ended) == sorted([first, large, *rest])


def test_equal_prompts_are_computed_once_and_differ_when_sampled() -> None:
    prompt = prompts((150,))[0]
    engine = make()
    ids = [engine.submit(Request(prompt, 12, Sampling.create(1.0))) for _ in range(3)]
    seen = drain(engine)
    assert engine.stats.shared_tokens == 2 * 149
    assert len({tuple(seen[i].tokens) for i in ids}) == 3
    for i in ids:
        assert is_its_own_text(Request(prompt, 12, Sampling.create(1.0)), i, seen[i].tokens)
    assert engine.stats.most_pages <= 2 + 3 < 3 * 3  # two full pages shared, one each beside them
    assert engine.pages_free == engine.pages_total


def test_a_prefix_whose_owner_is_cancelled_during_prefill_is_computed() -> None:
    common = prompts((160,))[0]
    engine = make()
    first = engine.submit(Request([*common, 1], 5))
    second = engine.submit(Request([*common, 2], 5))
    engine.step()  # 32 of 160 tokens; the second waits for them
    assert engine.cancel(first)
    seen = drain(engine)
    assert is_its_own_text(Request([*common, 2], 5), second, seen[second].tokens)
    assert engine.stats.shared_tokens == 0 and engine.pages_free == engine.pages_total


def test_cancel_at_any_time() -> None:
    wanted = [Request(p, 20) for p in prompts((150, 10, 40, 30, 1))]
    for steps in range(9):
        engine = make()
        ids = [engine.submit(r) for r in wanted]
        seen: dict[int, Seen] = defaultdict(Seen)
        for _ in range(steps):
            for update in engine.step():
                seen[update.request].tokens += update.tokens
        target = ids[steps % 5]
        assert engine.cancel(target) and not engine.cancel(target)
        for update in engine.run():
            assert update.request != target
            seen[update.request].tokens += update.tokens
        for i, request in zip(ids, wanted, strict=True):
            assert is_its_own_text(request, i, seen[i].tokens)
            assert i == target or len(seen[i].tokens) == 20
        assert engine.pages_free == engine.pages_total
    assert not engine.cancel(99)


def test_seed_and_stream_make_a_text_reproducible() -> None:
    prompt = prompts((20,))[0]
    request = Request(prompt, 10, Sampling.create(1.0), seed=7, stream=3)
    texts = []
    for others in (0, 2):
        engine = make()
        for _ in range(others):
            engine.submit(Request(prompts((9,))[0], 10, Sampling.create(1.0)))
        number = engine.submit(request)
        texts.append(drain(engine)[number].tokens)
    assert texts[0] == texts[1]
    engine = make()
    assert drain_one(engine, replace(request, seed=8)) != texts[0]


def drain_one(engine: Engine, request: Request) -> list[int]:
    number = engine.submit(request)
    return drain(engine)[number].tokens


@pytest.mark.parametrize(
    ("options", "request_", "sentence"),
    [
        ({}, Request([]), "The prompt is empty"),
        ({}, Request("text"), "pass token ids"),
        ({}, Request([61]), "outside the vocabulary of 61"),
        ({}, Request([1], 0), "max_new_tokens"),
        ({}, Request([1], 320), "max_seq_len of 320"),
        ({"num_pages": 3}, Request([1] * 100, 100), "may need 4 pages of 64 tokens, but the pool has 2"),
        ({}, Request([1], 5, stop_tokens=tuple(range(9))), "9 stop tokens; the engine's max_stop_tokens is 8"),
        ({}, Request([1], 5, Sampling(-1.0)), "temperature"),
        ({}, Request([1], 5, Sampling(jnp.ones(1))), "Sampling of three numbers"),
        ({}, Request([1], 5, None), "Sampling of three numbers"),
        ({}, Request([1], 5, Sampling("1")), "temperature must be a number"),
        ({}, Request([1], True), "max_new_tokens"),
        ({}, Request([1], 5, stream=2**32), "stream must be a whole number from 0"),
        ({}, Request([1], 5, stream="x"), "stream must be"),
        ({}, Request([1], 5, seed=None), "seed must be"),
        ({}, Request([1], 5, stop_tokens=5), "stop_tokens is int"),
        ({}, Request([1], 5, stop_tokens=(1.5,)), "stop_tokens holds 1.5; token ids are whole"),
        ({}, Request([1.7], 5), "holds 1.7; token ids are whole"),
        ({}, Request(["a"], 5), "holds 'a'; token ids are whole"),
        ({}, Request(np.ones((2, 2), int), 5), "token ids are whole"),
        ({}, Request(3, 5), "pass a sequence of token ids"),
        ({}, [1, 2], "must be a Request, got list"),
        ({"num_slots": 0}, None, "num_slots must be an integer of at least 1"),
        ({"num_pages": 1}, None, "num_pages must be at least 2"),
        ({"buckets": (1, 2)}, None, "largest is num_slots = 4"),
        ({"max_seq_len": 9999}, None, "max_seq_len must be from 1 to the model's 4096"),
        ({"prefill_chunk": 0}, None, "prefill_chunk must be an integer of at least 1"),
        ({"steps_per_visit": 0}, None, "steps_per_visit must be an integer of at least 1"),
        ({"kv_format": "int4"}, None, "'int4' is not known"),
    ],
)
def test_bad_input_is_one_sentence_and_queues_nothing(options: dict, request_: Request, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        make(**options).submit(request_)
    assert "\n" not in str(error.value)


def test_a_refused_request_leaves_the_others_alone() -> None:
    engine = make()
    number = engine.submit(Request(prompts((10,))[0], 5))
    with pytest.raises(ValueError, match="max_seq_len"):
        engine.submit(Request([1] * 400, 5))
    assert len(drain(engine)[number].tokens) == 5
    assert engine.step() == [] and not engine.busy
