"""Attention of tree nodes as prefix and own rows: `without_mask` over an implementation that refuses masks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_problems import FLOAT32_OUT, Problem, assert_close, oracle, small

from mla_jax import mla_decode, quantize_kv
from mla_jax.attention import xla
from mla_jax.attention.tree import add_nodes, without_mask

HALF = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
PROBLEMS = {
    "tree": Problem((70, 66, 7, 131, 0), queries=7, tree=True),
    "tree, bf16": Problem((70, 66, 7, 131, 0), queries=7, tree=True, **HALF),
    "larger than the request": Problem((0, 1, 3, 6, 131), queries=7, tree=True),
    "across a chunk": small(513, 514, 515, 516, 130, tree=True),
    "negative lengths are empty": small(-1, 5, -(2**31), tree=True),
    "fills the table": small(640, 639, 640, 64, 3, tree=True),
    "no mask: causal": small(),
    "no mask: not causal": small(causal=False),
}


@partial(without_mask)
def maskless(*arrays, tree_mask, **options):
    assert tree_mask is None
    return xla.decode(*arrays, tree_mask=None, **options)


def run(problem: Problem, arrays, **options):
    scale = problem.d**-0.5 if problem.sm_scale is None else problem.sm_scale
    options = {"logit_scale": jnp.float32(scale), "value_scale": None} | options
    return jax.jit(partial(maskless, d_v=problem.d_v, causal=problem.causal))(**arrays, **options)


@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_the_oracle(name):
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    out, lse = run(problem, arrays)
    wide = problem.q_dtype == "float32"
    assert_close(out, lse, *oracle(**arrays, **problem.options), rounded_weights=not wide)


def test_a_scale_of_the_cache_reaches_both_parts():
    problem = PROBLEMS["tree"]
    arrays = problem.arrays()
    rows = quantize_kv(jnp.nan_to_num(arrays["kv_cache"]), "fp8_e4m3", 0.03125)
    arrays["kv_cache"] = jnp.where(jnp.isnan(arrays["kv_cache"]), jnp.nan, rows.astype(jnp.float32)).astype(rows.dtype)
    scale = jnp.float32(0.03125)
    out, lse = run(problem, arrays, logit_scale=scale * problem.d**-0.5, value_scale=scale)
    want, want_lse = mla_decode(**arrays, kv_scale=0.03125, implementation="reference")
    np.testing.assert_allclose(out, want, atol=FLOAT32_OUT)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_a_schedule_made_for_other_lengths_is_not_passed_on():
    seen = []

    def decode(q, *_, schedule, **options):
        seen.append(schedule)
        return q[..., :16], jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))

    arrays = small(tree=True).arrays()
    options = {"logit_scale": jnp.float32(1), "value_scale": None, "d_v": 16, "causal": True}
    for changes in ({}, {"tree_mask": None}):
        jax.eval_shape(partial(without_mask(decode), **arrays | changes, schedule="of kv_lens", **options))
    assert seen == [None, "of kv_lens"]


def test_rows_that_nobody_sees_may_hold_nan_and_a_node_that_sees_nothing_is_empty():
    rng = np.random.default_rng(0)
    q, rows = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 2, 8), (2, 4, 8)))
    seen = np.asarray(rng.random((2, 3, 4)) < 0.6)
    seen[:, :, 1] = False
    seen[:, 2] = False
    nothing = jnp.zeros((2, 3, 2, 5)), jnp.full((2, 2, 3), -jnp.inf)
    out, lse = add_nodes(nothing, q, rows.at[:, 1].set(jnp.nan), jnp.asarray(seen), logit_scale=0.3)
    again, _ = add_nodes(nothing, q, rows, jnp.asarray(seen), logit_scale=0.3)
    np.testing.assert_array_equal(out, again)
    assert not np.asarray(out[:, 2]).any() and np.isneginf(lse[:, :, 2]).all()
    np.testing.assert_array_equal(np.isfinite(lse), np.repeat(seen.any(axis=2)[:, None], 2, axis=1))
