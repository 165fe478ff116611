"""Selection, masks and walks against plain Python, on random trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.speculative.accept import Accepted, accept_walk, cut, last_of
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.tree import Candidates, Draft, ancestors, candidate_depths, chain, select
from tests.speculative import plain

SIZES = [(1, 4, 5), (2, 2, 4), (3, 4, 8), (5, 8, 16), (4, 3, 31), (5, 8, 4), (3, 2, 11)]
TREES = 40


def random_language(rng: np.random.Generator, topk: int, ties: bool):
    """path → its topk best next tokens; with ties, log-probabilities are 0 or −1, so that many paths are equal."""
    known: dict = {}

    def language(path):
        if path not in known:
            log_probs = -rng.integers(0, 2, topk).astype(float) if ties else -rng.exponential(1, topk)
            tokens = rng.choice(3 * topk, topk, replace=False)
            known[path] = [(int(t), float(np.float32(p))) for t, p in zip(tokens, sorted(-log_probs), strict=True)]
            known[path] = [(t, -p) for t, p in known[path]]
        return known[path]

    return language


def candidates_of(found: list[list[plain.Node]]) -> Candidates:
    """Lists of candidates, one list per request, as arrays; a parent is the candidate with the path but the last."""
    tokens, log_probs, parents = [], [], []
    for nodes in found:
        index = {node.path: node.index for node in nodes}
        tokens.append([node.path[-1] for node in nodes])
        log_probs.append([node.log_prob for node in nodes])
        parents.append([index.get(node.path[:-1], -1) for node in nodes])
    return Candidates(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(log_probs, jnp.float32), jnp.asarray(parents, jnp.int32)
    )


def paths_of(draft: Draft, request: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each node, by following parents."""
    tokens, parents = np.asarray(draft.tokens)[request], np.asarray(draft.parents)[request]
    paths = [()]
    for node in range(1, len(tokens)):
        assert parents[node] < node, "a parent stands behind its child"
        paths.append((*paths[parents[node]], int(tokens[node])))
    return paths


def drawn(sizes, ties: bool, seed: int = 0) -> tuple[Speculation, list[list[plain.Node]], Draft]:
    speculation = Speculation(*sizes)
    rng = np.random.default_rng(seed)
    found = [
        plain.propose(random_language(rng, speculation.topk, ties), speculation.steps, speculation.topk)
        for _ in range(TREES)
    ]
    root = jnp.asarray(rng.integers(0, 9, TREES), jnp.int32)
    return speculation, found, jax.jit(select, static_argnums=0)(speculation, root, candidates_of(found))


@pytest.mark.parametrize("ties", [False, True], ids=["all differ", "many equal"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_draft_is_the_most_probable_candidates(sizes, ties):
    speculation, found, draft = drawn(sizes, ties)
    assert draft.tokens.shape == (TREES, speculation.draft_tokens)
    assert candidate_depths(speculation).shape == (1, speculation.num_candidates)
    for request, nodes in enumerate(found):
        expected = [node.path for node in plain.choose(nodes, speculation.draft_tokens - 1)]
        paths = paths_of(draft, request)
        assert paths == [(), *expected]
        assert draft.depths[request].tolist() == [len(path) for path in paths]
        assert len(set(paths)) == len(paths)
        assert max(len(path) for path in paths) < speculation.most_kept


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_node_sees_its_ancestors_and_itself(sizes):
    speculation, _, draft = drawn(sizes, ties=False, seed=1)
    masks = np.asarray(ancestors(draft, speculation.steps))
    for request in range(TREES):
        paths = paths_of(draft, request)
        expected = [[node == path[: len(node)] for node in paths] for path in paths]
        np.testing.assert_array_equal(masks[request], expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_walk_equals_plain_python(sizes):
    speculation, _, draft = drawn(sizes, ties=False, seed=2)
    rng = np.random.default_rng(3)
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    choices = rng.integers(100, 200, tokens.shape)
    for node in rng.permuted(np.tile(np.arange(1, tokens.shape[1]), (TREES, 1)), axis=1).T:  # children, mostly
        here = rng.random(TREES) < 0.8
        rows = np.flatnonzero(here)
        choices[rows, parents[rows, node[here]]] = tokens[rows, node[here]]
    room = rng.integers(1, tokens.shape[1] + 1, TREES)
    accepted = accept_walk(draft, jnp.asarray(choices, jnp.int32), jnp.asarray(room, jnp.int32), speculation.most_kept)
    counts = []
    for request in range(TREES):
        nodes, new = plain.walk(paths_of(draft, request), choices[request].tolist(), int(room[request]))
        count = int(accepted.count[request])
        assert accepted.path[request, :count].tolist() == nodes
        assert accepted.tokens[request].tolist() == new + [-1] * (speculation.most_kept - count)
        assert sorted(nodes) == nodes
        counts.append(count)
    assert len(set(counts)) > 1


def test_a_chain_is_the_tree_of_one_branch():
    tokens = jnp.asarray([[5, 7, 7, 2]], jnp.int32)
    draft = chain(tokens)
    assert paths_of(draft, 0) == [(), (7,), (7, 7), (7, 7, 2)]
    assert draft.depths.tolist() == [[0, 1, 2, 3]]
    np.testing.assert_array_equal(ancestors(draft, 3)[0], np.tri(4, dtype=bool))


def test_two_requests_that_accept_one_and_three_tokens_in_the_same_step():
    draft = chain(jnp.asarray([[1, 2, 3, 4], [1, 2, 3, 4]], jnp.int32))
    choices = jnp.asarray([[9, 3, 4, 5], [2, 3, 8, 5]], jnp.int32)
    accepted = accept_walk(draft, choices, jnp.asarray([4, 4], jnp.int32), 4)
    assert accepted.count.tolist() == [1, 3]
    assert accepted.tokens.tolist() == [[9, -1, -1, -1], [2, 3, 8, -1]]


A, EOS, B = 10, 11, 12
RUN = [A, EOS, B]


@pytest.mark.parametrize(
    ("run", "remaining", "stops", "expected", "stopped"),
    [
        (RUN, 9, [EOS, -1], [A, EOS], True),
        (RUN, 9, [-1, -1], RUN, False),
        (RUN, 9, [B, A], [A], True),
        (RUN, 1, [EOS, -1], [A], False),
        (RUN, 2, [EOS, -1], [A, EOS], True),
        (RUN, 2, [B, -1], [A, EOS], False),
        (RUN, 3, [B, -1], RUN, True),
        ([EOS], 9, [EOS, EOS], [EOS], True),
        ([A, EOS, EOS, B], 9, [EOS, -1], [A, EOS], True),
        (RUN, 0, [EOS, -1], [], False),
    ],
)
def test_a_run_ends_with_its_first_stop_token_or_at_its_limit(run, remaining, stops, expected, stopped):
    tokens = jnp.asarray([run + [-1] * (5 - len(run))], jnp.int32)
    accepted = Accepted(jnp.arange(5, dtype=jnp.int32)[None], tokens, jnp.asarray([len(run)], jnp.int32))
    left, ends = cut(accepted, jnp.asarray([remaining], jnp.int32), jnp.asarray([stops], jnp.int32))
    assert left.tokens.tolist() == [expected + [-1] * (5 - len(expected))]
    assert left.count.tolist() == [len(expected)]
    assert ends.tolist() == [stopped]
    if expected:
        assert last_of(left.tokens, left.count).tolist() == expected[-1:]
