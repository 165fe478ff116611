"""`PagedKVCache`: every row goes to its own place, and what nobody owns reaches nothing."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pool_model import assert_one_sentence

from mla_jax import PagedKVCache, PagePool, dequantize_kv, kv_format, mla_decode, quantize_kv

FORMATS = ("bf16", "fp16", "fp32")
D = 6
TAIL = 2147480000  # FlashMLA's filler of a table past a request's length


def nan_cache(num_pages: int, name: str = "fp32", layers: int = 2, d: int = D) -> PagedKVCache:
    """Every byte is 0xFF, which is NaN in every format."""
    chosen = kv_format(name)
    layer = np.full(num_pages * 64 * chosen.bytes_per_token(d), 0xFF, np.uint8).view(chosen.dtype)
    layer = layer.reshape(num_pages, 64, d)
    assert np.isnan(layer).all()
    return PagedKVCache(tuple(jnp.array(layer) for _ in range(layers)), chosen)


def int32(*values):
    return jnp.array(values, jnp.int32)


def latents_for(positions, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*positions.shape, D)), jnp.float32)


def same_bytes(a, b) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_write_then_gather(name):
    cache = nan_cache(6, name)
    table = int32([3, 5, -1], [1, TAIL, TAIL])
    positions = int32([0, 63, 64, 127], [5, 0, 63, 1])
    latents = latents_for(positions)
    cache = cache.write(0, table, positions + 1, latents_for(positions, seed=1))
    written = cache.write(1, table, positions, latents)
    expected = latents.astype(cache.format.dtype)
    np.testing.assert_array_equal(written.gather(1, table, positions), expected.astype(jnp.float32))
    assert written.gather(1, table, positions, jnp.bfloat16).dtype == jnp.bfloat16
    # exactly those rows, in that layer, and nothing else changed
    by_hand = np.array(cache.layers[1])
    places = (((3, 0), (3, 63), (5, 0), (5, 63)), ((1, 5), (1, 0), (1, 63), (1, 1)))
    for request, rows in enumerate(places):
        for token, place in enumerate(rows):
            by_hand[place] = expected[request, token]
    assert same_bytes(written.layers[1], by_hand) and same_bytes(written.layers[0], cache.layers[0])


def test_what_has_no_place_goes_to_page_0():
    cache = nan_cache(4)
    table = int32([2, -1, TAIL, 4, 1])
    positions = int32([0, 64, 128, 192, -1, 5 * 64, 2**31 - 1, -(2**31), 7, 9, 256])
    valid = jnp.array([[True] * 8 + [False, False, True]])
    written = cache.write(0, table, positions, latents_for(positions), valid)
    changed = np.argwhere(~np.isnan(np.asarray(written.layers[0])).all(axis=-1))
    assert {tuple(place) for place in changed if place[0] > 0} == {(2, 0), (1, 0)}
    assert same_bytes(written.layers[0][3], cache.layers[0][3])
    # reading there gives page 0, never the last page (index −1) or a page somebody owns
    marked = PagedKVCache((jnp.zeros((4, 64, D)).at[1:].set(7.0),), cache.format)
    read = marked.gather(0, table, positions)[0]
    np.testing.assert_array_equal(read[:, 0], np.float32([7, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7]))


@pytest.mark.parametrize("name", FORMATS)
def test_tree_acceptance_moves_scattered_rows_side_by_side(name):
    """Nodes {0, 2, 5} of 7 drafted at 62 … 68 (two pages) become rows 62, 63, 64."""
    cache, pool = nan_cache(5, name), PagePool.create(5, 2, 2)
    pool, ok = pool.extend(int32(69, 3))
    positions = jnp.broadcast_to(jnp.arange(69, dtype=jnp.int32), (2, 69))
    latents = latents_for(positions)
    valid = positions < pool.kv_lens[:, None]
    cache = cache.write(0, pool.block_table, positions, latents, valid)
    cache = cache.write(1, pool.block_table, positions, 2 * latents, valid)
    source, destination = int32([62, 64, 67], [0, 0, 0]), int32([62, 63, 64], [1, 1, 1])
    moved = cache.move_rows(pool.block_table, source, destination, jnp.array([[True] * 3, [False] * 3]))
    pool = pool.truncate(int32(65, 3))
    expected = latents.astype(cache.format.dtype).astype(jnp.float32)
    for layer, factor in ((0, 1), (1, 2)):
        read = moved.gather(layer, pool.block_table, positions)
        np.testing.assert_array_equal(read[0, :62], factor * expected[0, :62])
        np.testing.assert_array_equal(read[0, 62:65], factor * expected[0, jnp.array([62, 64, 67])])
        np.testing.assert_array_equal(read[1, :3], factor * expected[1, :3])
    assert ok.all() and pool.check()


def test_two_requests_keep_one_and_three_of_their_nodes_in_one_step():
    cache, table = nan_cache(5), int32([1, 2], [3, 4])
    positions = int32([62, 63, 64, 65], [62, 63, 64, 65])
    latents = latents_for(positions)
    cache = cache.write(0, table, positions, latents)
    valid = jnp.array([[True, False, False], [True, True, True]])
    moved = cache.move_rows(table, int32([65, 0, 0], [62, 64, 65]), int32([62, 62, 62], [62, 63, 64]), valid)
    read = moved.gather(0, table, positions)
    np.testing.assert_array_equal(read[0], latents[0, jnp.array([3, 1, 2, 3])])
    np.testing.assert_array_equal(read[1, :3], latents[1, jnp.array([0, 2, 3])])


def test_moves_read_every_row_before_they_write_one():
    cache, table, positions = nan_cache(3), int32([2]), jnp.arange(8, dtype=jnp.int32)[None]
    latents = latents_for(positions)
    cache = cache.write(0, table, positions, latents)
    moved = cache.move_rows(table, positions, (positions + 3) % 8)
    np.testing.assert_array_equal(moved.gather(0, table, positions), jnp.roll(latents, 3, axis=1))


@pytest.mark.parametrize("name", FORMATS)
def test_fork_copies_the_partial_page_and_shares_the_rest(name):
    cache, pool = nan_cache(6, name), PagePool.create(6, 3, 3)
    pool, _ = pool.extend(int32(100, 0, 0))
    positions = jnp.broadcast_to(jnp.arange(100, dtype=jnp.int32), (3, 100))
    latents = latents_for(positions)
    valid = positions < pool.kv_lens[:, None]
    for layer in (0, 1):
        cache = cache.write(layer, pool.block_table, positions, latents, valid)
    pool, ok = pool.fork(0, 2, 70)
    cache = cache.fork(pool, 0, 2, 70, ok)
    pool, _ = pool.extend(int32(100, 0, 75))
    later = jnp.arange(70, 75, dtype=jnp.int32)[None]
    cache = cache.write(1, pool.block_table[2:], later, latents_for(later, seed=1))
    expected = latents.astype(cache.format.dtype).astype(jnp.float32)
    for layer in (0, 1):
        read = cache.gather(layer, pool.block_table, positions)
        np.testing.assert_array_equal(read[2, :70], expected[0, :70])
        np.testing.assert_array_equal(read[0], expected[0])  # what dst writes, src does not see
    assert ok and pool.block_table[0, 0] == pool.block_table[2, 0] and pool.check()


def test_refused_fork_overwrites_nothing():
    """Slot 1 already holds 70 tokens of its own: forking 70 tokens onto it is refused, and copies nothing."""
    cache, pool = nan_cache(5, layers=1), PagePool.create(5, 2, 2)
    pool, _ = pool.extend(int32(100, 70))
    positions = jnp.broadcast_to(jnp.arange(70, dtype=jnp.int32), (2, 70))
    cache = cache.write(0, pool.block_table, positions, latents_for(positions))
    pool, ok = pool.fork(0, 1, 70)
    assert not ok
    assert same_bytes(cache.fork(pool, 0, 1, 70, ok).layers[0][1:], cache.layers[0][1:])


@pytest.mark.parametrize("name", FORMATS)
def test_a_sequence_cut_inside_a_shared_page_keeps_its_rows_when_it_grows(name):
    cache, pool = nan_cache(8, name, layers=1), PagePool.create(8, 3, 3)
    pool, _ = pool.extend(int32(128, 0, 0))
    positions = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), (3, 128))
    latents = latents_for(positions)
    cache = cache.write(0, pool.block_table, positions, latents, positions < pool.kv_lens[:, None])
    for dst in (1, 2):
        pool, ok = pool.fork(0, dst, 128)
        assert ok
    pool = pool.truncate(int32(128, 70, 90))
    after, ok = pool.extend(int32(128, 72, 91))
    cache = cache.copy_on_write(pool, after)
    new = jnp.full((3, 2, D), 9.0)
    cache = cache.write(
        0,
        after.block_table,
        int32([0, 0], [70, 71], [90, 0]),
        new,
        jnp.array([[False, False], [True, True], [True, False]]),
    )
    read = cache.gather(0, after.block_table, positions)
    expected = latents.astype(cache.format.dtype).astype(jnp.float32)
    np.testing.assert_array_equal(read[0], expected[0])
    np.testing.assert_array_equal(read[1, :70], expected[0, :70])
    np.testing.assert_array_equal(read[2, :90], expected[0, :90])
    assert (read[1, 70:72] == 9).all() and (read[2, 90] == 9).all()
    assert ok.all() and after.check() and after.num_live == 4


def test_runs_inside_jit_with_the_cache_donated():
    @partial(jax.jit, donate_argnames="cache")
    def step(cache, pool, latents):
        before = pool.kv_lens
        pool, ok = pool.extend(before + 1)
        cache = cache.write(0, pool.block_table, before[:, None], latents, ok[:, None])
        cache = cache.move_rows(pool.block_table, before[:, None], before[:, None], ok[:, None])
        return cache, pool, cache.gather(0, pool.block_table, before[:, None])

    cache, pool = nan_cache(5, layers=1), PagePool.create(5, 2, 2)
    for i in range(70):
        given, latents = cache, jnp.full((2, 1, D), float(i))
        cache, pool, read = step(cache, pool, latents)
        np.testing.assert_array_equal(read, latents)
        assert given.layers[0].is_deleted()
    assert step._cache_size() == 1 and pool.kv_lens.tolist() == [70, 70]
    everything = jnp.broadcast_to(jnp.arange(70, dtype=jnp.int32), (2, 70))
    read = cache.gather(0, pool.block_table, everything)
    np.testing.assert_array_equal(read[..., 0], np.broadcast_to(np.arange(70), (2, 70)))


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_no_index_of_a_large_cache_is_flat():
    """60000 pages of 64 · 576 are more than 2³¹ numbers: addressed by page and row, never reshaped or copied."""
    layer = jax.ShapeDtypeStruct((60_000, 64, 576), jnp.bfloat16)
    assert np.prod(layer.shape) > 2**31
    cache = PagedKVCache((layer,), kv_format("bf16"))
    table, positions = jax.ShapeDtypeStruct((2, 30), jnp.int32), jax.ShapeDtypeStruct((2, 4), jnp.int32)
    latents = jax.ShapeDtypeStruct((2, 4, 576), jnp.float32)
    q, lens = jax.ShapeDtypeStruct((2, 4, 16, 576), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    calls = {
        "write": (lambda c, t, p, x: c.write(0, t, p, x), (cache, table, positions, latents)),
        "gather": (lambda c, t, p: c.gather(0, t, p), (cache, table, positions)),
        "move_rows": (lambda c, t, p: c.move_rows(t, p, p), (cache, table, positions)),
        "decode": (partial(mla_decode, implementation="xla"), (q, layer, table, lens)),
    }
    for name, (call, arguments) in calls.items():
        equations = list(primitives(jax.make_jaxpr(call)(*arguments).jaxpr))
        big = [e for e in equations if any(getattr(x.aval, "size", 0) > 2**31 for x in e.invars)]
        kinds = {e.primitive.name for e in big}
        assert kinds & {"gather", "scatter"}, f"{name} does not touch the layer"
        assert not kinds & {"reshape", "convert_element_type", "transpose"}, f"{name}: {kinds}"
        for equation in big:
            if equation.primitive.name in ("gather", "scatter"):
                assert equation.invars[0].aval.shape == layer.shape


@pytest.mark.full
@pytest.mark.parametrize("implementation", ("xla", "reference"))
def test_pages_past_two_to_the_31_numbers_are_read_and_written(implementation):
    """4.3 GB: page 58254 is the first whose flat index of numbers does not fit int32."""
    cache = PagedKVCache((jnp.zeros((58_300, 64, 576), jnp.bfloat16),), kv_format("bf16"))
    table, positions = int32([58_254, 58_299]), jnp.arange(128, dtype=jnp.int32)
    rng = np.random.default_rng(3)
    latents = jnp.asarray(rng.standard_normal((1, 128, 576)), jnp.bfloat16)
    write = jax.jit(lambda c, t, p, x: c.write(0, t, p, x), donate_argnums=0)
    cache = write(cache, table, positions[None], latents)
    read = jax.jit(lambda c, t, p: c.gather(0, t, p, jnp.bfloat16))(cache, table, positions[None])
    np.testing.assert_array_equal(read.astype(jnp.float32), latents.astype(jnp.float32))
    q = jnp.asarray(rng.standard_normal((1, 1, 4, 576)), jnp.bfloat16)
    small = latents.reshape(2, 64, 576)
    out, lse = mla_decode(q, cache.layers[0], table, int32(100), implementation=implementation)
    want, want_lse = mla_decode(q, small, int32([0, 1]), int32(100), implementation=implementation)
    assert same_bytes(out, want) and same_bytes(lse, want_lse)


def test_empty_cache_is_zero_in_the_format():
    cache = PagedKVCache.create(3, 4, 576, "fp16")
    assert len(cache.layers) == 3 and cache.format.bytes_per_token(576) == 1152
    assert all(x.shape == (4, 64, 576) and x.dtype == jnp.float16 and not x.any() for x in cache.layers)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 4, 576), "num_layers"), ((1, 0, 576), "num_pages"), ((1, 4, 0), "latent_dim"),
        ((1, 4, 576, "bf16", 0), "page_size"), ((1, 4.5, 576), "num_pages"), ((1, 4, 576, "int4"), "int4"),
    ],
)  # fmt: skip
def test_bad_sizes_are_one_sentence(arguments, named):
    with pytest.raises(ValueError, match=named) as error:
        PagedKVCache.create(*arguments)
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize(("name", "row", "dtype"), (("fp8", 576, "float8_e4m3fn"), ("fp8_ds_mla", 656, "uint8")))
def test_fp8_pages_hold_what_the_codec_makes(name, row, dtype):
    scales = jnp.array([0.5, 4.0]) if name == "fp8" else None
    cache = PagedKVCache.create(2, 6, 576, name, scales=scales)
    assert cache.layers[0].shape == (6, 64, row) and cache.layers[0].dtype == dtype
    assert cache.format.bytes_per_token(576) == row and cache.latent_dim == 576
    nans = tuple(jnp.asarray(np.full(x.nbytes, 0xFF, np.uint8).view(x.dtype).reshape(x.shape)) for x in cache.layers)
    cache = replace(cache, layers=nans)
    table, positions = int32([1, 2], [4, 5]), int32([62, 63, 64, 65], [0, 1, 2, 3])
    latents = jax.random.normal(jax.random.key(0), (2, 4, 576)) * 100
    for layer in (0, 1):
        scale = None if scales is None else scales[layer]
        cache = cache.write(layer, table, positions, latents)
        expected = dequantize_kv(quantize_kv(latents, name, scale), name, scale)
        np.testing.assert_array_equal(cache.gather(layer, table, positions), expected)
    moved = cache.move_rows(table, positions, positions + 1)
    np.testing.assert_array_equal(moved.gather(1, table, positions + 1), expected)


def test_a_format_refuses_what_it_cannot_hold():
    for call, named in (
        (lambda: PagedKVCache.create(1, 4, 500, "fp8_ds_mla"), "512 . 64 values, got 500"),
        (lambda: PagedKVCache.create(2, 4, 576, "bf16", scales=jnp.ones(2)), "scales must"),
        (lambda: PagedKVCache.create(2, 4, 576, "fp8", scales=jnp.ones(3)), "scales must"),
    ):
        with pytest.raises(ValueError, match=named) as error:
            call()
        assert_one_sentence(str(error.value))


def test_bad_calls_are_one_sentence():
    cache, table, positions = nan_cache(4), int32([1, 2], [3, 0]), int32([0, 1, 2], [0, 1, 2])
    latents, valid = latents_for(positions), positions >= 0
    calls = {
        "layer must": lambda: cache.write(2, table, positions, latents),
        "layer .* got -1": lambda: cache.write(-1, table, positions, latents),
        "layer .* got 7": lambda: cache.gather(7, table, positions),
        "latents": lambda: cache.write(0, table, positions, latents[..., :1]),
        r"latents .* got \(1, 3, 6\)": lambda: cache.write(0, table, positions, latents[:1]),
        "positions": lambda: cache.write(0, table, positions[:1], latents[:1]),
        "valid": lambda: cache.write(0, table, positions, latents, valid[:, :1]),
        "source and destination": lambda: cache.move_rows(table, positions, positions[:, :1]),
        r"positions must be \[B, S\]": lambda: cache.gather(0, table, positions[0]),
        "positions must be of int32, got float32": lambda: cache.gather(0, table, positions.astype(jnp.float32)),
        "valid must be of bool, got int32": lambda: cache.write(0, table, positions, latents, positions),
        "fork: length .* float32": lambda: cache.fork(PagePool.create(4, 2, 2), 0, 1, 1.5),
    }
    for named, call in calls.items():
        with pytest.raises(ValueError, match=named) as error:
            call()
        assert_one_sentence(str(error.value))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_scales_that_are_not_positive_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="scales must be positive"):
        PagedKVCache.create(2, 3, 576, "fp8_e4m3", scales=np.array([1.0, scale], np.float32))
