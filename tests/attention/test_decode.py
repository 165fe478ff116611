"""Both implementations of `mla_decode` against float64 NumPy, with NaN wherever nobody owns a byte."""

import re
from functools import partial
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_problems import IMPLEMENTATIONS, TAIL, Problem, assert_one_sentence, errors, small

from mla_jax import mla_decode
from mla_jax.attention import xla

EDGES = (0, 1, 63, 64, 65, 127, 128, 129)  # around the ends of pages
HALF = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}

PROBLEMS = {
    "edges of pages, float32": Problem(EDGES),
    "edges of pages, bf16": Problem(EDGES, **HALF),
    "edges of pages, fp16": Problem(EDGES, q_dtype="float16", kv_dtype="float16"),
    "one head": Problem((70, 3), heads=1, **HALF),
    "16 heads": Problem((70, 3), heads=16, **HALF),
    "63 heads": Problem((70, 3), heads=63, queries=2, **HALF),
    "126 heads": Problem((70, 3), heads=126, **HALF),
    "attends only to itself": Problem((1,), width=1, **HALF),
    "several chunks, bf16": Problem((1500, 40, 0, 1030), queries=2, **HALF),
    "several chunks, float32": Problem((1500, 40, 0, 1030), queries=4),
    "two queries across a page": Problem((64, 65, 66, 128, 129), queries=2, width=4, **HALF),
    "two queries across a page, not causal": Problem((64, 65, 1, 128, 0), queries=2, width=4, causal=False, **HALF),
    "four queries across a page": Problem((64, 65, 66, 67, 68, 130), queries=4, width=4),
    "fewer tokens than queries": Problem((0, 1, 2, 3, 4, 64), queries=4, width=4),
    "fewer tokens than queries, not causal": small(0, 1, 2, 3, 4, causal=False),
    "tree": Problem((70, 66, 7, 131, 0), queries=7, tree=True, **HALF),
    "tree larger than the request": Problem((0, 1, 3, 6, 131), queries=7, tree=True, **HALF),
    "tree across a chunk": small(513, 514, 515, 516, 130, tree=True),
    "tree, causal has no say": small(2, causal=False, tree=True),
    "values narrower than the latent": Problem((100, 30), d_v=100, **HALF),
    "values as wide as keys": Problem((100, 30), d_v=576),
    "latent of one number": Problem((100, 3), d=1, d_v=1),
    "no requests": Problem((), queries=2),
    "all requests empty": small(0, 0, 0, 0, 0),
    "a chunk and around it": small(511, 512, 513, 514, 640),
    "negative lengths are empty": small(-1, 5, -(2**31)),
    "negative lengths are empty, not causal": small(-1, 5, -(2**31), causal=False),
    "negative lengths are empty, tree": small(-1, 5, -(2**31), tree=True),
    "negative scale": small(sm_scale=-0.1),
    "scale 0 averages": small(sm_scale=0.0),
    "scale that leaves one key": small(sm_scale=1e4),
    "scale of q": small(sm_scale=0.1, q_scale=2.5),
    "scale of q alone": small(q_scale=0.5),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_the_oracle(name, implementation):
    PROBLEMS[name].check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), list(permutations(("bfloat16", "float16", "float32"), 2)))
def test_mixed_dtypes(q_dtype, kv_dtype, implementation):
    small(q_dtype=q_dtype, kv_dtype=kv_dtype).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("width", (1, 3, 5))
def test_table_widths(width, implementation):
    small(width * 64, width * 64 - 1, 1, 0, (width + 1) // 2 * 64, width=width).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_many_draws_of_one_shape(implementation):
    """Random lengths, masks and pages; one shape, so one compilation."""
    rng = np.random.default_rng(11)
    for again in range(12):
        small(*rng.integers(0, 641, 5).tolist(), tree=again % 2 == 0, again=again).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bytes_that_nobody_owns_reach_nothing(implementation):
    """The same call with zeros, and with large numbers, in place of NaN: not a bit of the output differs."""
    problem = Problem((0, 65, 130, 1, 64), queries=2, width=4, **HALF)
    arrays = problem.arrays()
    cache = np.asarray(arrays["kv_cache"])
    unowned = np.isnan(cache)
    assert unowned[0].all() and unowned.all(axis=(1, 2)).sum() >= 3  # page 0, other pages, and tails of pages
    assert unowned[..., 0].any(axis=1).sum() > unowned.all(axis=(1, 2)).sum()
    out, lse = problem.run(implementation, arrays)
    assert not np.isnan(np.asarray(out)).any() and not np.isnan(np.asarray(lse)).any()
    for filler in (0, 3e38, -np.inf):
        filled = jnp.asarray(np.where(unowned, np.asarray(filler, cache.dtype), cache))
        again, lse_again = problem.run(implementation, arrays | {"kv_cache": filled})
        np.testing.assert_array_equal(np.asarray(again), np.asarray(out))
        np.testing.assert_array_equal(lse_again, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tail", (-1, TAIL, -(2**31), 2**31 - 1, 0))
def test_table_entries_past_a_length_are_not_read(tail, implementation):
    problem = small(0, 64, 65, 570, 128)
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    past = jnp.arange(arrays["block_table"].shape[1])[None] * 64 >= arrays["kv_lens"][:, None]
    table = jnp.where(past, jnp.int32(tail), arrays["block_table"])
    again, lse_again = problem.run(implementation, arrays | {"block_table": table})
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(lse_again, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("poison", (np.nan, np.inf))
def test_another_request_cannot_poison_mine(poison, implementation):
    """Requests 0 and 2 own NaN or inf; the longest of all is among them, and the outputs of 1 stay the same."""
    problem = small(600, 70, 65, 64, 1)
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    theirs = jnp.concatenate([arrays["block_table"][0, :10], arrays["block_table"][2, :2]])
    poisoned = arrays | {"kv_cache": arrays["kv_cache"].at[theirs].set(poison)}
    again, lse_again = problem.run(implementation, poisoned)
    np.testing.assert_array_equal(again[1], out[1])
    np.testing.assert_array_equal(lse_again[1], lse[1])
    assert not np.isfinite(again[0]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("lens", ((641, 10_000, 70, 0, 64), (2**31 - 1, 2**31 - 64, 70, 0, 64)))
def test_a_length_past_the_table_stops_at_its_end(lens, implementation):
    """Not legal; no crash, and the others stay right."""
    problem = small(640, 640, 70, 0, 64, causal=False)  # causal would hide the last queries' own keys
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    again, lse_again = problem.run(implementation, arrays | {"kv_lens": jnp.array(lens, jnp.int32)})
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(lse_again, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_page_ids_out_of_range_hurt_only_their_own_request(implementation):
    problem = small(70, 600, 65, 1, 0)
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    table = arrays["block_table"].at[1, :4].set(jnp.array([-1, TAIL, -(2**31), 2**31 - 1], jnp.int32))
    again, lse_again = problem.run(implementation, arrays | {"block_table": table})
    for mine in (0, 2, 3, 4):
        np.testing.assert_array_equal(again[mine], out[mine])
        np.testing.assert_array_equal(lse_again[mine], lse[mine])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtypes", ({}, HALF), ids=("float32", "bf16"))
def test_alone_and_in_a_batch_of_eight(dtypes, implementation):
    """Another batch is another executable, so rounding may differ, and no more."""
    problem = Problem((70, 1, 129, 0, 64, 700, 63, 128), queries=2, **dtypes)
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    for b in range(8):
        mine = {k: x if k == "kv_cache" or x is None else x[b : b + 1] for k, x in arrays.items()}
        alone, lse_alone = problem.run(implementation, mine)
        ours, theirs = np.asarray(alone[0], np.float64), np.asarray(out[b], np.float64)
        limit = 4e-6 if not dtypes else 2.0**-7 * np.abs(theirs) + 1e-5  # bf16: one step of its grid
        assert (np.abs(ours - theirs) <= limit).all(), f"request {b}: {errors(ours, theirs)}"
        np.testing.assert_allclose(lse_alone[0], lse[b], atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pad_length", (0, 1))
def test_three_requests_in_a_bucket_of_five(pad_length, implementation):
    """Padded rows have length 0 or 1 and page 0, which holds NaN: they may read it, the three may not."""
    problem = small(70, 1, 600)
    arrays = problem.arrays()
    real = {k: x if k == "kv_cache" or x is None else x[:3] for k, x in arrays.items()}
    want, want_lse = problem.run(implementation, real)
    padded = arrays | {
        "kv_lens": arrays["kv_lens"].at[3:].set(pad_length),
        "block_table": arrays["block_table"].at[3:].set(0),
    }
    out, lse = problem.run(implementation, padded)
    assert (np.abs(np.asarray(out[:3]) - want) <= 1e-5).all(), errors(out[:3], np.asarray(want))
    np.testing.assert_allclose(lse[:3], want_lse, atol=1e-5)


@pytest.mark.parametrize("name", ("several chunks, float32", "tree", "edges of pages, bf16"))
def test_xla_equals_the_reference(name):
    problem = PROBLEMS[name]
    arrays = problem.arrays()
    (out, lse), (want, want_lse) = (problem.run(i, arrays) for i in ("xla", "reference"))
    ours, theirs = np.asarray(out, np.float64), np.asarray(want, np.float64)
    limit = 1e-5 if out.dtype == jnp.float32 else 2.0**-7 * np.abs(theirs) + 1e-3
    assert (np.abs(ours - theirs) <= limit).all(), errors(ours, theirs)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scales_may_be_traced(implementation):
    problem = small()
    arrays = problem.arrays()

    @jax.jit
    def call(sm_scale, q_scale):
        return mla_decode(**arrays, d_v=16, sm_scale=sm_scale, q_scale=q_scale, implementation=implementation)

    for sm_scale, q_scale in ((0.2, 1.0), (0.1, 2.0), (-0.3, 0.5)):
        out, lse = call(jnp.float32(sm_scale), jnp.float32(q_scale))
        want, want_lse = problem.but(sm_scale=sm_scale, q_scale=q_scale).run(implementation, arrays)
        np.testing.assert_allclose(out, want, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    assert call._cache_size() == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_default_scale_is_the_root_of_the_width(implementation):
    problem = small()
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    want, want_lse = problem.but(sm_scale=24**-0.5).run(implementation, arrays)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_lengths_that_change_compile_once(implementation):
    problem = small(640, 640, 3)
    arrays = problem.arrays()
    step = jax.jit(lambda kv_lens: mla_decode(**(arrays | {"kv_lens": kv_lens}), d_v=16,
                                              implementation=implementation))  # fmt: skip
    for lens in ((64, 64, 0, 1, 2), (640, 1, 3, 0, 0), (1, 2, 3, 5, 4), (0,) * 5, (513, 640, 2, 0, 0)):
        out, lse = step(jnp.array(lens, jnp.int32))
        want, want_lse = problem.run(implementation, arrays | {"kv_lens": jnp.array(lens, jnp.int32)})
        np.testing.assert_allclose(out, want, atol=1e-6)
        np.testing.assert_allclose(lse, want_lse, atol=1e-6)
    assert step._cache_size() == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numpy_arrays_are_as_good(implementation):
    problem = small(tree=True)
    arrays = problem.arrays()
    out, lse = problem.run(implementation, arrays)
    again, lse_again = problem.run(implementation, {name: np.asarray(x) for name, x in arrays.items()})
    np.testing.assert_array_equal(np.asarray(again), np.asarray(out))
    np.testing.assert_array_equal(lse_again, lse)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_seventy_times_1024_query_rows(implementation):
    """Shapes and lowering alone: no dimension of a launch may be one of query rows."""
    s = jax.ShapeDtypeStruct
    q, cache = s((1, 560, 128, 576), jnp.bfloat16), s((30, 64, 576), jnp.bfloat16)
    call = partial(mla_decode, implementation=implementation)
    arguments = (q, cache, s((1, 20), jnp.int32), s((1,), jnp.int32))
    out, lse = jax.eval_shape(call, *arguments)
    assert out.shape == (1, 560, 128, 512) and out.dtype == jnp.bfloat16
    assert lse.shape == (1, 128, 560) and lse.dtype == jnp.float32
    jax.jit(call).lower(*arguments)


def test_seventy_times_1024_query_rows_run():
    problem = Problem((90,), queries=70, heads=1024, d=8, d_v=8)
    arrays = problem.arrays()
    (out, lse), (want, want_lse) = (problem.run(i, arrays) for i in ("xla", "reference"))
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_temporary_memory_does_not_grow_with_the_context(dtype):
    def memory(tokens: int):
        s, pages = jax.ShapeDtypeStruct, tokens // 64
        arguments = (s((2, 2, 16, 576), dtype), s((2 * pages + 1, 64, 576), dtype),
                     s((2, pages), jnp.int32), s((2,), jnp.int32))  # fmt: skip
        return jax.jit(partial(mla_decode, implementation="xla")).lower(*arguments).compile().memory_analysis()

    short, long = memory(1024), memory(65_536)
    table = 2 * 4 * (1024 - 16)  # bytes by which the block table alone is larger
    assert 0 <= long.temp_size_in_bytes - short.temp_size_in_bytes <= table
    # what is held is of the order that the docstring promises: B · 512 · (D + S·H) numbers, a few times
    assert short.temp_size_in_bytes < 8 * 2 * 512 * (576 + 2 * 16) * 4


def test_xla_reads_no_page_that_nobody_owns(monkeypatch):
    """Not only clears what it read there: a page that nobody owns may be another process's, or not be there."""
    problem = Problem((0, 65, 700, 5), d=8, d_v=8)
    arrays = problem.arrays()
    table = np.asarray(arrays["block_table"])
    owned = {int(page) for row, n in zip(table, problem.lens, strict=True) for page in row[: -(-n // 64)]}
    read, take = set(), jnp.take

    def recording_take(array, indices, **options):
        if array.shape == arrays["kv_cache"].shape:
            read.update(np.asarray(indices).ravel().tolist())
        return take(array, indices, **options)

    monkeypatch.setattr(jnp, "take", recording_take)

    def python_loop(start, end, step, state):
        for chunk in range(start, int(end)):
            state = step(jnp.int32(chunk), state)
        return state

    monkeypatch.setattr(jax.lax, "fori_loop", python_loop)
    with jax.disable_jit():
        problem.run("xla", arrays)
    assert read == owned


def test_xla_stops_at_the_longest_request():
    """One loop, whose bound comes from the lengths: nothing but the table is as wide as the context."""
    jaxpr = jax.make_jaxpr(partial(mla_decode, implementation="xla"))(
        jnp.zeros((1, 1, 1, 576)), jnp.zeros((2, 64, 576)), jnp.zeros((1, 1024), jnp.int32), jnp.array([5])
    )
    text = str(jaxpr)
    assert text.count("while[") == 1 and "scan[" not in text
    shapes = {tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"[fibu]\d+\[([\d,]+)\]", text)}
    assert any(xla.CHUNK_PAGES * 64 in shape for shape in shapes)
    assert {shape for shape in shapes if max(shape) > 576} == {(1, 1024)}


def test_implementation_names():
    problem = small()
    arrays = problem.arrays()
    want = problem.run("reference", arrays)
    for chosen in (["reference"], ("reference", "xla"), ["mosaic_gpu", "reference", "xla"]):
        if jax.default_backend() == "gpu" and chosen[0] == "mosaic_gpu":
            continue
        for got, expected in zip(problem.run(chosen, arrays), want, strict=True):
            np.testing.assert_array_equal(got, expected)  # the first that can run, not the fastest
    for got, expected in zip(problem.run(None, arrays), problem.run("xla", arrays), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("implementation", ("nope", ["xla", "nope"], ("nope", "xla"), "", "XLA", 3, [3], []))
def test_implementations_that_do_not_exist(implementation):
    with pytest.raises(ValueError, match="implementation") as error:
        small().run(implementation)
    assert_one_sentence(str(error.value))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there they are available")
@pytest.mark.parametrize("implementation", ("mosaic_gpu", "flash_mla", ["flash_mla", "mosaic_gpu"]))
def test_implementations_that_cannot_run_here_say_why(implementation):
    with pytest.raises(NotImplementedError) as error:
        Problem((3,), **HALF).run(implementation)
    names = [implementation] if isinstance(implementation, str) else implementation
    for name in names:
        reason = str(error.value).split(f"{name}: ")[1].split(";")[0]
        assert len(reason.split()) >= 4, f"no reason for {name} in: {error.value}"


def test_seventy_thousand_query_rows():
    """560 tokens of 128 heads [FlashMLA 182]: the last of them get what they get in a call of their own."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 70 * 1024 // 128, 128, 16)), jnp.float32)
    cache = jnp.asarray(rng.normal(size=(11, 64, 16)), jnp.float32)
    table, lens = jnp.arange(10, dtype=jnp.int32)[None] + 1, jnp.array([600], jnp.int32)
    out, lse = mla_decode(q, cache, table, lens, d_v=8, implementation="xla")
    few_out, few_lse = mla_decode(q[:, -3:], cache, table, lens, d_v=8, implementation="reference")
    np.testing.assert_allclose(out[:, -3:], few_out, atol=1e-5)
    np.testing.assert_allclose(lse[:, :, -3:], few_lse, atol=1e-5)
