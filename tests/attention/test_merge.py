"""Merging parts equals the whole, however the keys are split."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_problems import assert_one_sentence, errors, oracle, small

from mla_jax import merge_states

B, S, H, V, KEYS = 2, 3, 4, 8, 40
ACCURACY = 2e-6  # float32, a few parts


def attend(logits, values):
    """out [B, S, H, V], lse [B, H, S] over the keys given, in float64; no keys are a legal part."""
    if not logits.shape[-1]:
        return np.zeros((B, S, H, V)), np.full((B, H, S), -np.inf)
    lse = np.logaddexp.reduce(logits, axis=-1)
    weights = np.exp(logits - np.where(np.isneginf(lse), 0, lse)[..., None])
    return np.einsum("bhst,btv->bshv", weights, values), lse


def split(cuts, seed, spread=1.0, hide=None):
    """Parts between the cuts, and the whole."""
    rng = np.random.default_rng(seed)
    logits, values = spread * rng.standard_normal((B, H, S, KEYS)), rng.standard_normal((B, KEYS, V))
    if hide is not None:
        logits[hide] = -np.inf
    edges = [0, *cuts, KEYS]
    parts = [attend(logits[..., a:b], values[:, a:b]) for a, b in pairwise(edges)]
    outs, lses = ([jnp.asarray(x, jnp.float32) for x in xs] for xs in zip(*parts, strict=True))
    return outs, lses, *attend(logits, values)


def assert_equals(merged, want, want_lse, accuracy=ACCURACY):
    out, lse = np.asarray(merged[0], np.float64), np.asarray(merged[1], np.float64)
    assert (np.abs(out - want) <= accuracy).all(), errors(out, want)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[seen], want_lse[seen], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "cuts", ((), (20,), (1,), (0,), (KEYS,), (7, 7), (0, 0, 0), (5, 6, 30), (10, 20, 20, 39, KEYS)), ids=str
)
@pytest.mark.parametrize("spread", (1.0, 30.0))
def test_parts_make_the_whole(cuts, spread):
    outs, lses, out, lse = split(cuts, seed=len(cuts), spread=spread)
    assert_equals(merge_states(outs, lses), out, lse, accuracy=spread * ACCURACY)


def test_random_splits():
    rng = np.random.default_rng(4)
    for seed in range(20):
        outs, lses, out, lse = split(sorted(rng.integers(0, KEYS + 1, 3)), seed)
        assert_equals(merge_states(outs, lses), out, lse)


def test_rows_that_a_part_does_not_see():
    hide = np.random.default_rng(5).random((B, H, S, KEYS)) < 0.9
    hide[0, 0, 0], hide[1, 2, 1, :20] = True, True
    outs, lses, out, lse = split((10, 20), seed=6, hide=hide)
    assert np.isneginf(lse[0, 0, 0]) and np.isneginf(np.asarray(lses)).sum() > 3
    assert_equals(merge_states(outs, lses), out, lse)


@pytest.mark.parametrize("filler", (np.nan, np.inf, 1e38))
def test_out_of_an_empty_part_counts_for_nothing(filler):
    outs, lses, out, lse = split((0, 20), seed=7)
    outs[0] = jnp.full_like(outs[0], filler)
    assert_equals(merge_states(outs, lses), out, lse)
    assert_equals(merge_states(outs[::-1], lses[::-1]), out, lse)


@pytest.mark.parametrize("parts", (1, 2, 3))
def test_all_parts_empty(parts):
    outs, lses = [jnp.full((B, S, H, V), jnp.nan)] * parts, [jnp.full((B, H, S), -jnp.inf)] * parts
    out, lse = merge_states(outs, lses)
    assert not out.any() and jnp.isneginf(lse).all()


def test_one_part_is_itself():
    outs, lses, *_ = split((), seed=8)
    out, lse = merge_states(outs, lses)
    np.testing.assert_array_equal(out, outs[0])
    np.testing.assert_array_equal(lse, lses[0])


@pytest.mark.parametrize("level", (-3e38, -1e5, 1e5, 3e38))
def test_extreme_levels_neither_overflow_nor_vanish(level):
    outs, lses, *_ = split((20,), seed=9)
    merged, lse = merge_states(outs, [jnp.full_like(x, level) for x in lses])
    np.testing.assert_allclose(merged, (np.asarray(outs[0]) + np.asarray(outs[1])) / 2, atol=1e-6)
    np.testing.assert_allclose(lse, np.float32(level) + np.float32(np.log(2)), rtol=1e-6)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_keeps_the_dtype_and_rounds_once(dtype):
    outs, lses, *_ = split((10, 30), seed=10)
    outs = [x.astype(dtype) for x in outs]
    out, lse = merge_states(outs, lses)
    want, _ = merge_states([x.astype(jnp.float32) for x in outs], lses)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(out), np.asarray(want.astype(dtype)))


def test_merges_decodes_of_two_halves_of_a_cache():
    """As in chunked prefill: attention over the prefix and over the rest, each by `mla_decode`."""
    problem = small(640, 130, 64, 3, 0, causal=False)
    arrays = problem.arrays()
    lens = np.asarray(arrays["kv_lens"])
    first = np.minimum(lens, 128)
    heads = problem.run("xla", arrays | {"kv_lens": jnp.asarray(first)})
    tails = problem.run("xla", arrays | {"block_table": arrays["block_table"][:, 2:], "kv_lens": lens - first})
    out, lse = merge_states([heads[0], tails[0]], [heads[1], tails[1]])
    want, want_lse, _ = oracle(**arrays, **problem.options)
    assert_equals((out, lse), want, want_lse, accuracy=1e-5)


def test_arrays_of_stacked_parts_and_jit():
    outs, lses, out, lse = split((10, 30), seed=11)
    assert_equals(merge_states(jnp.stack(outs), jnp.stack(lses)), out, lse)
    assert_equals(jax.jit(merge_states)(outs, lses), out, lse)
    assert_equals(merge_states([np.asarray(x) for x in outs], [np.asarray(x) for x in lses]), out, lse)


OUT, LSE = jnp.zeros((B, S, H, V)), jnp.zeros((B, H, S))


@pytest.mark.parametrize(
    ("outs", "lses"),
    (
        ([], []),
        ([OUT], []),
        ([OUT, OUT], [LSE]),
        ([OUT, OUT[:1]], [LSE, LSE[:1]]),
        ([OUT], [LSE.transpose(0, 2, 1)]),
        ([OUT], [LSE[0]]),
        ([OUT[0]], [LSE[0]]),
        ([OUT, OUT[..., :4]], [LSE, LSE]),
        (OUT, LSE),
        ([OUT, OUT.astype(jnp.bfloat16)], [LSE, LSE]),
        ([OUT.astype(jnp.int32)], [LSE]),
        ([OUT], [LSE.astype(jnp.int32)]),
        ([OUT], [[0.0]]),
        ([None], [LSE]),
        (None, None),
        (OUT[0, 0, 0, 0], LSE[0, 0, 0]),
    ),
    ids=(
        "nothing", "no lse", "one lse for two outs", "batches differ", "lse not transposed", "lse without batch",
        "out without batch", "value widths differ", "arrays in place of lists", "dtypes differ", "integer out",
        "integer lse", "lists", "None in a list", "None", "numbers",
    ),
)  # fmt: skip
def test_bad_calls_are_one_sentence(outs, lses):
    with pytest.raises(ValueError, match="merge_states") as error:
        merge_states(outs, lses)
    assert_one_sentence(str(error.value))
    print(error.value)
