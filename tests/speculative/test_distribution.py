"""Samplers keep the target distribution: χ² over all texts of three tokens from a vocabulary of five.

What a step commits is a random number of tokens; the rest of three is drawn from the target itself, so that the joint
distribution of all three is known. Wrong samplers must fail the same test.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from mla_jax.decode.sampling import Sampling, kept_logits
from mla_jax.speculative import accept
from mla_jax.speculative.accept import Accepted, accept_rejection, accept_walk, keeps
from mla_jax.speculative.draft import drawing
from mla_jax.speculative.tree import Draft, chain

VOCAB, DRAWS, LENGTH = 5, 200_000, 3
SIGNIFICANCE = 1e-4
SETTINGS = {
    "temperature 0.5": Sampling(0.5),
    "temperature 1.5": Sampling(1.5),
    "top-p 0.8": Sampling(1.0, 0, 0.8),
    "top-k 3 at 1.5": Sampling(1.5, 3),
}


class Language:
    """Logits of the next token after 0, 1 and 2 tokens: a table for each."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.logits = [jnp.asarray(rng.normal(0, 1.2, (VOCAB,) * (n + 1)), jnp.float32) for n in range(LENGTH)]

    def distribution(self, before: jax.Array, sampling: Sampling) -> jax.Array:
        """[N, vocab] after tokens before [N, n]."""
        table = probabilities(self.logits[before.shape[1]].reshape(-1, VOCAB), sampling)
        row = jnp.zeros((len(before),), jnp.int32)
        for token in before.T:
            row = row * VOCAB + token
        return table[row]

    def joint(self, sampling: Sampling) -> np.ndarray:
        """Probability of each of the vocab³ texts, float64."""
        result = np.ones((1,) * LENGTH)
        for n, table in enumerate(self.logits):
            p = np.asarray(probabilities(table.reshape(-1, VOCAB), sampling), np.float64)
            p = p / p.sum(axis=-1, keepdims=True)
            result = result * p.reshape((VOCAB,) * (n + 1) + (1,) * (LENGTH - 1 - n))
        return result


TARGET, DRAFT = Language(0), Language(1)


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    return jax.nn.softmax(kept_logits(logits, sampling), axis=-1)


@lru_cache
def keys(seed: int) -> jax.Array:
    """[draws, 3]: of each request's next positions."""
    return jax.random.split(jax.random.key(seed), (DRAWS, LENGTH))


@jax.jit
def complete(accepted: Accepted, sampling: Sampling, more: jax.Array) -> jax.Array:
    """[draws, 3]: the committed tokens, and behind them tokens drawn from the target."""
    tokens = jnp.zeros((DRAWS, 0), jnp.int32)
    for n, key in enumerate(jax.random.split(more, LENGTH)):
        drawn = jax.random.categorical(key, jnp.log(TARGET.distribution(tokens, sampling))).astype(jnp.int32)
        token = jnp.where(n < accepted.count, accepted.tokens[:, n], drawn)
        tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
    return tokens


def p_value(accepted: Accepted, sampling: Sampling) -> float:
    """Of χ² against the target; a text that the target excludes gives 0."""
    texts = np.asarray(complete(accepted, sampling, jax.random.key(99)))
    expected = TARGET.joint(sampling).reshape(-1) * DRAWS
    counts = np.bincount(np.ravel_multi_index(tuple(texts.T), (VOCAB,) * LENGTH), minlength=VOCAB**LENGTH)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(expected) - 1))


def targets(draft: Draft, sampling: Sampling) -> jax.Array:
    """[draws, 3, vocab]: of the model behind each node of a chain."""
    return jnp.stack([TARGET.distribution(draft.tokens[:, 1 : n + 1], sampling) for n in range(LENGTH)], axis=1)


@jax.jit
def drafts(all_keys: jax.Array, sampling: Sampling, believed: Sampling) -> Draft:
    """Chains of two tokens drafted at `sampling`, whose distribution is said to be that at `believed`."""
    before, claimed = jnp.zeros((DRAWS, 0), jnp.int32), []
    choose = drawing(all_keys, lambda q: q)
    for i in range(2):
        token, _ = choose(DRAFT.distribution(before, sampling), i)
        claimed.append(DRAFT.distribution(before, believed))
        before = jnp.concatenate([before, token[:, None]], axis=1)
    root = jnp.zeros((DRAWS, 1), jnp.int32)
    return chain(jnp.concatenate([root, before], axis=1), jnp.stack(claimed, axis=1))


def verified(draft: Draft, all_keys: jax.Array, sampling: Sampling, room: jax.Array | None = None) -> Accepted:
    return accept_rejection(
        draft, targets(draft, sampling), all_keys, jnp.full((DRAWS,), 3, jnp.int32) if room is None else room
    )


right = jax.jit(verified)


@pytest.mark.parametrize("name", SETTINGS)
def test_rejection_sampling_keeps_the_target_distribution(name):
    sampling = SETTINGS[name]
    accepted = right(drafts(keys(1), sampling, sampling), keys(1), sampling)
    p = p_value(accepted, sampling)
    counts = np.bincount(np.asarray(accepted.count), minlength=4) / DRAWS
    print(f"{name}: p = {p:.3f}, committed 1, 2, 3: {counts[1:]}")
    assert (counts[1:] > 0.1).all()  # every branch is taken
    assert p > SIGNIFICANCE


@pytest.mark.parametrize("name", ["temperature 0.5", "temperature 1.5"])
def test_a_forgotten_draft_temperature_is_caught(name):
    sampling = SETTINGS[name]
    accepted = right(drafts(keys(1), sampling, Sampling(1.0)), keys(1), sampling)
    assert p_value(accepted, sampling) < SIGNIFICANCE


def unnormalized(p: jax.Array, q: jax.Array) -> jax.Array:
    """As an inverse CDF over the bare max(p − q, 0) would draw: what is missing to 1 goes to the last token."""
    rest = jnp.maximum(p - q, 0)
    return rest.at[:, -1].add(1 - rest.sum(axis=-1))


@pytest.mark.parametrize("wrong", [unnormalized, lambda p, q: p], ids=["not normalized", "nothing subtracted"])
def test_a_wrong_residual_is_caught(wrong, monkeypatch):
    monkeypatch.setattr(accept, "residual", wrong)
    wrongly = jax.jit(lambda *args: verified(*args))  # a trace of its own
    for name, sampling in SETTINGS.items():
        accepted = wrongly(drafts(keys(1), sampling, sampling), keys(1), sampling)
        assert p_value(accepted, sampling) < SIGNIFICANCE, name


def test_room_for_fewer_nodes_keeps_the_target_distribution():
    """Some requests can keep two drafted tokens, some one or none; behind them nothing is rejected."""
    sampling = SETTINGS["temperature 1.5"]
    room = jnp.asarray(np.random.default_rng(0).integers(1, 4, DRAWS), jnp.int32)
    accepted = right(drafts(keys(2), sampling, sampling), keys(2), sampling, room)
    assert bool((accepted.count <= room).all())
    assert p_value(accepted, sampling) > SIGNIFICANCE


def test_u_zero_does_not_keep_what_the_target_excludes(monkeypatch):
    assert keeps(jnp.zeros(3), jnp.asarray([0.0, 1e-30, 0.5]), jnp.asarray([0.7, 0.7, 0.7])).tolist() == [
        False,
        True,
        True,
    ]
    monkeypatch.setattr(jax.random, "uniform", lambda key, dtype: jnp.zeros((), dtype))
    draft = chain(jnp.asarray([[3, 1], [3, 2]], jnp.int32), jnp.asarray([[[0, 1.0, 0]], [[0, 0, 1.0]]]))
    target = jnp.tile(jnp.asarray([0.5, 0, 0.5]), (2, 2, 1))
    two_keys = jax.random.split(jax.random.key(0), (2, 2))
    accepted = accept_rejection(draft, target, two_keys, jnp.asarray([2, 2], jnp.int32))
    assert accepted.count.tolist() == [1, 2]
    assert 1 not in accepted.tokens[0].tolist()


def test_equal_distributions_keep_everything():
    p = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(7), (50, 3)), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 7, (50, 3)), jnp.int32)
    many = jax.random.split(jax.random.key(3), (50, 3))
    accepted = accept_rejection(chain(tokens, p[:, :2]), p, many, jnp.full((50,), 3, jnp.int32))
    assert accepted.count.tolist() == [3] * 50
    np.testing.assert_array_equal(accepted.tokens[:, :2], tokens[:, 1:])


# A tree of seven nodes: three branches at the root, of which two go on, with a token that is the same behind both.
PATHS = [(), (2,), (0,), (3,), (2, 4), (2, 3), (0, 4)]


@partial(jax.jit, static_argnums=2)
def drawn_walk(all_keys: jax.Array, sampling: Sampling, wrong: bool) -> Accepted:
    """Target-only sampling of the tree; wrong: below the root the choices are drawn from the parent's distribution."""
    choices = []
    for path in PATHS:
        before = jnp.tile(jnp.asarray(path[: len(path) - wrong], jnp.int32), (DRAWS, 1))
        p = TARGET.distribution(before, sampling)
        choices.append(jax.vmap(jax.random.categorical)(all_keys[:, len(path)], jnp.log(p)))
    nodes = [[(0, *path)[-1], PATHS.index(path[:-1]), len(path)] for path in PATHS]
    tokens, parents, depths = (
        jnp.tile(jnp.asarray(values, jnp.int32), (DRAWS, 1)) for values in zip(*nodes, strict=True)
    )
    room = jnp.full((DRAWS,), len(PATHS), jnp.int32)
    return accept_walk(Draft(tokens, parents, depths), jnp.stack(choices, 1).astype(jnp.int32), room, LENGTH)


@pytest.mark.parametrize("name", SETTINGS)
def test_tree_sampling_keeps_the_target_distribution(name):
    sampling = SETTINGS[name]
    accepted = drawn_walk(keys(4), sampling, False)
    p = p_value(accepted, sampling)
    counts = np.bincount(np.asarray(accepted.count), minlength=4) / DRAWS
    print(f"{name}: p = {p:.3f}, committed 1, 2, 3: {counts[1:]}")
    assert (counts[2:] > 0.1).all()
    assert p > SIGNIFICANCE


def test_tree_sampling_from_the_parents_distribution_is_caught():
    for name, sampling in SETTINGS.items():
        assert p_value(drawn_walk(keys(4), sampling, True), sampling) < SIGNIFICANCE, name
