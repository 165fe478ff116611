"""`mla_decode` under JAX's transformations: vmap, scan, donation, derivatives, 64-bit mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_problems import IMPLEMENTATIONS, errors, small

from mla_jax import mla_decode

PROBLEM = small(0, 70, 2, tree=True)


def close(got, want, limit=2e-6):
    assert (np.abs(np.asarray(got, np.float64) - np.asarray(want)) <= limit).all(), errors(got, np.asarray(want))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_lengths_and_tables(implementation):
    """One of the two has no request at all, so that its loop would have ended before the other's."""
    arrays = PROBLEM.arrays()
    lens = jnp.stack([arrays["kv_lens"], jnp.zeros_like(arrays["kv_lens"])])
    tables = jnp.stack([arrays["block_table"], jnp.full_like(arrays["block_table"], -1)])
    run = jax.vmap(lambda n, t: PROBLEM.run(implementation, arrays | {"kv_lens": n, "block_table": t}))
    out, lse = run(lens, tables)
    want, want_lse = PROBLEM.run(implementation, arrays)
    close(out[0], want)
    np.testing.assert_allclose(lse[0], want_lse, atol=1e-6)
    assert not out[1].any() and jnp.isneginf(lse[1]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scan_over_layers(implementation):
    arrays = PROBLEM.arrays()
    caches = jnp.stack([arrays["kv_cache"], 2 * arrays["kv_cache"]])

    def layer(carry, cache):
        return carry, PROBLEM.run(implementation, arrays | {"kv_cache": cache})[0]

    _, outs = jax.lax.scan(layer, 0, caches)
    for out, cache in zip(outs, caches, strict=True):
        close(out, PROBLEM.run(implementation, arrays | {"kv_cache": cache})[0], limit=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_reads_a_donated_cache_before_it_is_overwritten(implementation):
    arrays = PROBLEM.arrays()
    want, _ = PROBLEM.run(implementation, arrays)

    def step(cache):
        return PROBLEM.run(implementation, arrays | {"kv_cache": cache})[0], jnp.zeros_like(cache)

    given = arrays["kv_cache"] + 0
    out, _ = jax.jit(step, donate_argnums=0)(given)
    assert given.is_deleted()
    close(out, want)


def test_derivatives():
    """Backward through the reference, forward through both: one directional derivative. NaN nowhere, and no
    gradient for bytes that nobody owns."""
    arrays = PROBLEM.arrays()
    owned = ~jnp.isnan(arrays["kv_cache"])
    rng = np.random.default_rng(2)
    point = (arrays["q"], arrays["kv_cache"])
    direction = tuple(jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in point)
    direction = (direction[0], jnp.where(owned, direction[1], 0))

    def loss(implementation, q, cache):
        out, lse = PROBLEM.run(implementation, arrays | {"q": q, "kv_cache": cache})
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse))

    gradient = jax.grad(lambda *x: loss("reference", *x), argnums=(0, 1))(*point)
    assert all(jnp.isfinite(g).all() for g in gradient)
    assert not jnp.where(owned, 0, gradient[1]).any()
    backward = sum(float(jnp.vdot(g, d)) for g, d in zip(gradient, direction, strict=True))
    assert abs(backward) > 0.1
    for implementation in IMPLEMENTATIONS:
        _, forward = jax.jvp(lambda *x, i=implementation: loss(i, *x), point, direction)
        assert abs(float(forward) - backward) < 1e-4, f"{implementation}: {forward} and {backward}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_64_bit_mode_changes_nothing(implementation):
    want, want_lse = PROBLEM.run(implementation)
    with jax.enable_x64(True):
        out, lse = PROBLEM.run(implementation)
        with pytest.raises(ValueError, match="block_table must be int32, got int64"):
            PROBLEM.run(implementation, PROBLEM.arrays() | {"block_table": jnp.zeros((5, 10), int)})
    assert out.dtype == lse.dtype == jnp.float32
    close(out, want)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads_only", [True, False])
def test_shard_map(implementation, heads_only):
    """Over heads, or over requests; tables long enough that "xla" walks them in a loop."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    q, cache = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 1, 4, 72), (20, 64, 72)))
    table = jnp.asarray(rng.permutation(20).reshape(2, 10), jnp.int32)
    args = (q, cache, table, jnp.asarray([600, 70], jnp.int32))
    over = jax.sharding.PartitionSpec
    heads, requests, whole = over(None, None, "x"), over("x"), over()
    inputs = (heads, whole, whole, whole) if heads_only else (requests, whole, requests, requests)
    outputs = (heads, over(None, "x")) if heads_only else (requests, requests)

    def decode(*args):
        return mla_decode(*args, d_v=64, implementation=implementation)

    got = jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=inputs, out_specs=outputs))(*args)
    for a, b in zip(got, decode(*args), strict=True):
        close(a, b)
