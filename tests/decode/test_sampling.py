import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode.sampling import Sampling, restrict, sample


def kept_by_hand(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    order = np.argsort(-logits)
    order = order[:top_k] if top_k else order
    p = np.exp(logits[order] - logits.max())
    p /= p.sum()
    return set(order[: int(np.searchsorted(np.cumsum(p), top_p)) + 1].tolist())


@pytest.mark.parametrize("top_k", [0, 1, 3, 17, 100])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_restrict_keeps_what_a_plain_loop_keeps(top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(top_k).normal(0, 2, (6, 17)).astype(np.float32)
    kept = np.isfinite(restrict(jnp.asarray(logits), Sampling.create(1.0, top_k, top_p)))
    for row, mask in zip(logits, kept, strict=True):
        expected = set(range(17)) if top_p == 1.0 and top_k in (0, 17, 100) else kept_by_hand(row, top_k, top_p)
        assert set(np.flatnonzero(mask).tolist()) == expected


@pytest.mark.parametrize("greedy", [False, True])
def test_temperature_zero_takes_the_best(greedy: bool) -> None:
    logits = jnp.asarray([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert sample(logits, keys, Sampling.create(), greedy=greedy).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    draws = 40_000
    logits = jnp.asarray([1.0, 0.2, -0.5, 2.0, -3.0])
    keys = jax.random.split(jax.random.key(7), draws)
    tokens = sample(jnp.broadcast_to(logits, (draws, 5)), keys, Sampling.create(temperature))
    expected = np.asarray(jax.nn.softmax(logits / temperature)) * draws
    chi2 = np.sum((np.bincount(tokens, minlength=5) - expected) ** 2 / expected)
    assert chi2 < 23.5  # χ², 4 degrees of freedom, p = 1e-4


def test_a_top_p_that_rounds_to_0_keeps_the_best_token() -> None:
    logits = jnp.asarray([[0.0, 3.0, 1.0]])
    assert np.isfinite(restrict(logits, Sampling.create(1.0, 0, 1e-46))).tolist() == [[False, True, False]]


def test_each_row_has_its_own_numbers() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (4, 17)).astype(np.float32))
    rows = [(0.0, 0, 1.0), (0.7, 3, 1.0), (1e-30, 0, 0.5), (2.0, 0, 0.6)]
    keys = jax.random.split(jax.random.key(1), 4)
    together = sample(logits, keys, Sampling(*(jnp.asarray(x) for x in zip(*rows, strict=True))))
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], keys[i : i + 1], Sampling.create(*row)).tolist() == [int(together[i])]
    assert together[0] == jnp.argmax(logits[0]) and together[2] == jnp.argmax(logits[2])


@pytest.mark.parametrize(
    "bad", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}]
)
def test_values_out_of_range_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Sampling.create(**bad)
