"""Queries in e4m3 with a factor for each row: what rounding keeps, and `mla_decode` with such factors."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from decode_problems import IMPLEMENTATIONS, Problem, assert_close, assert_one_sentence, oracle, small

from mla_jax import InputError, mla_decode, quantize_queries

E4M3 = ml_dtypes.float8_e4m3fn
ALL_E4M3 = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
FINITE = ALL_E4M3[np.isfinite(ALL_E4M3)]
RNG = np.random.default_rng(np.random.SeedSequence().entropy)  # other numbers in every run


def meaning(q: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What was stored, the factors, and their product, in float64."""
    stored, scale = quantize_queries(q)
    assert (stored.dtype, stored.shape) == (jnp.float8_e4m3fn, q.shape)
    assert (scale.dtype, scale.shape) == (jnp.float32, q.shape[:3])
    stored, scale = np.asarray(stored).astype(np.float64), np.asarray(scale, np.float64)
    return stored, scale, stored * scale[..., None]


def rows(dtype: str = "float32", sizes: tuple[float, float] = (-30, 30)) -> jax.Array:
    """Of sizes that differ by powers of ten."""
    size = 10.0 ** RNG.uniform(*sizes, (4, 3, 5, 1))
    return jnp.asarray(RNG.standard_normal((4, 3, 5, 96)) * size, dtype)


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", (-30, 30)), ("bfloat16", (-30, 30)), ("float16", (-1, 3))])
def test_a_number_errs_by_a_sixteenth_of_itself_or_little_of_the_largest(dtype, sizes):
    q = rows(dtype, sizes)
    _, scale, found = meaning(q)
    wanted = np.asarray(q, np.float64)
    largest = np.abs(wanted).max(axis=-1, keepdims=True)
    error = np.abs(found - wanted)
    assert (error <= np.maximum(2.0**-4 * np.abs(wanted), 2.0**-17 * largest)).all()
    assert (error > 0).mean() > 0.8  # or it rounds nothing
    top = largest[..., 0] / scale
    assert (np.frexp(scale)[0] == 0.5).all() and (top > 224).all() and (top <= 448).all()


def test_the_ends_of_the_range():
    """448 fills it and takes factor 1; the next number above it takes 2."""
    tops = np.array([224.0, np.nextafter(np.float32(224), 1e9), 256, 448, np.nextafter(np.float32(448), 1e9)])
    stored, scale, _ = meaning(jnp.asarray(tops, jnp.float32).reshape(1, 1, 5, 1))
    np.testing.assert_array_equal(scale.ravel(), [0.5, 1, 1, 1, 2])
    np.testing.assert_array_equal(stored.ravel(), [448, 224, 256, 448, 224])


@pytest.mark.parametrize("exponent", [-60, -1, 0, 7, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_e4m3_holds_is_kept(exponent, dtype):
    """Every finite number of e4m3 in one row, times a power of two."""
    q = jnp.asarray((FINITE.astype(np.float64) * 2.0**exponent).reshape(1, 1, 1, -1), dtype)
    stored, scale, found = meaning(q)
    np.testing.assert_array_equal(found, np.asarray(q, np.float64))
    np.testing.assert_array_equal(stored.ravel(), FINITE)
    assert scale == 2.0**exponent


def test_every_bf16_number_rounds_to_the_nearest_ties_to_even():
    """Beside 448, which makes the factor 1: as ml_dtypes rounds it."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    numbers = numbers[np.abs(numbers) <= 448]
    numbers = np.stack([numbers, np.full_like(numbers, 448)], axis=-1)[None, None]
    stored, scale, _ = meaning(jnp.asarray(numbers))
    assert (scale == 1).all()
    np.testing.assert_array_equal(stored, numbers.astype(E4M3).astype(np.float64))


def test_zeros_infinities_and_nan():
    q = np.asarray(rows(sizes=(0, 1))).copy()
    q[0, 0, 0] = 0
    q[0, 0, 1, 3], q[0, 0, 2, 3], q[0, 0, 3, 3] = np.nan, np.inf, -np.inf
    q[0, 0, 2, 4] = 1e9
    stored, scale, _ = meaning(jnp.asarray(q))
    assert not stored[0, 0, 0].any() and (scale[0, 0, :4] == 1).all()
    for row in (1, 2, 3):
        np.testing.assert_array_equal(np.isnan(stored[0, 0, row]), np.arange(96) == 3)
    assert stored[0, 0, 2, 4] == 448
    assert np.isfinite(stored[0, 1:]).all() and np.isfinite(stored[1:]).all()  # other rows see nothing of it


def test_the_smallest_numbers_of_float32():
    _, scale, found = meaning(jnp.full((1, 1, 1, 4), 3e-38, jnp.float32))
    assert scale == 2.0**-126
    np.testing.assert_allclose(found, 3e-38, rtol=2**-4)


def test_jit_changes_nothing_though_the_bytes_are_read_back_at_once():
    """XLA may leave out a cast to fewer bits and back; nothing is left for it to keep."""
    q = rows("bfloat16", (-3, 3))
    stored, scale = quantize_queries(q)
    again, scale_again = jax.jit(quantize_queries)(q)
    wide = jax.jit(lambda q: quantize_queries(q)[0].astype(jnp.bfloat16))(q)
    np.testing.assert_array_equal(np.asarray(again).view(np.uint8), np.asarray(stored).view(np.uint8))
    np.testing.assert_array_equal(scale_again, scale)
    np.testing.assert_array_equal(np.asarray(wide, np.float32), np.asarray(stored, np.float32))


@pytest.mark.parametrize(
    ("q", "words"),
    [
        ([1.0], ("JAX or NumPy array", "list")),
        (jnp.zeros((2, 576)), ("[B, S, H, D]", "(2, 576)")),
        (jnp.zeros((1, 1, 1, 8), jnp.float8_e4m3fn), ("bfloat16, float16, float32", "float8_e4m3fn")),
        (np.zeros((1, 1, 1, 8)), ("float64",)),
    ],
)
def test_other_queries_are_refused(q, words):
    with pytest.raises(InputError) as error:
        quantize_queries(q)
    assert_one_sentence(str(error.value))
    for word in words:
        assert word in str(error.value)


PROBLEMS = {
    "one chunk": Problem((70, 0, 1, 64, 129), queries=2, heads=5),
    "several chunks": Problem((1500, 40, 0, 1030), queries=2),
    "tree": Problem((70, 66, 7, 131, 0), queries=7, tree=True),
    "narrow values": small(),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_factor_for_each_row_equals_the_oracle(name, q_dtype, kv_dtype, implementation):
    """Of either sign, and 0."""
    problem = PROBLEMS[name].but(q_dtype=q_dtype, kv_dtype=kv_dtype)
    arrays = problem.arrays()
    shape = arrays["q"].shape[:3]
    q_scale = RNG.choice([-1, 1], shape) * 2.0 ** RNG.uniform(-3, 1, shape)
    q_scale[0, 0, 0] = 0
    options = problem.options | {"q_scale": jnp.asarray(q_scale, jnp.float32)}
    out, lse = mla_decode(**arrays, **options, implementation=implementation)
    wide = "float32" in (q_dtype, kv_dtype)
    assert_close(out, lse, *oracle(**arrays, **options), rounded_weights=not wide)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_factor_for_all_is_the_same_for_each_row(implementation):
    problem = small(sm_scale=0.1)
    arrays = problem.arrays()
    rows = np.full(arrays["q"].shape[:3], 2.5, np.float32)  # a NumPy array will do
    options = problem.options | {"implementation": implementation}
    out, lse = mla_decode(**arrays, **options | {"q_scale": rows})
    want, want_lse = mla_decode(**arrays, **options | {"q_scale": 2.5})
    np.testing.assert_allclose(out, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_quantized_queries_mean_the_queries(implementation):
    """With rows of very different sizes, which one factor for all would flush to zero."""
    problem = Problem((70, 0, 1, 64, 129, 600), queries=2, heads=5, kv_dtype="float8_e4m3fn")
    arrays = problem.arrays()
    size = jnp.asarray(10.0 ** RNG.uniform(-4, 0, (*arrays["q"].shape[:3], 1)), jnp.float32)
    q = (arrays["q"] * size).astype(jnp.bfloat16)
    meant = arrays | {"q": q.astype(jnp.float32)}
    options = {"sm_scale": 0.3, "implementation": implementation}

    @jax.jit
    def step(q):
        stored, q_scale = quantize_queries(q)
        return mla_decode(**arrays | {"q": stored}, q_scale=q_scale, **options)

    out, lse = step(q)
    exact, exact_lse = mla_decode(**meant, **options | {"implementation": "reference"})
    seen = ~np.isneginf(exact_lse)
    error = np.asarray(out, np.float64) - np.asarray(exact, np.float64)
    assert 1e-4 < np.sqrt((error**2).mean() / (np.asarray(exact, np.float64) ** 2).mean()) < 0.15  # 60 draws: < 0.06
    # Rounding moves the logits of a row by 0.026 * sm_scale * |q| (RMS), its lse in 60 draws by 4 times that at most.
    length = np.linalg.norm(np.asarray(q, np.float64), axis=-1).swapaxes(1, 2)
    moved = np.abs(np.asarray(lse)[seen] - np.asarray(exact_lse)[seen])
    assert (moved <= 1e-3 + 8 * 0.026 * options["sm_scale"] * length[seen]).all()
    assert out.dtype == jnp.bfloat16
