"""The whole way from JAX through the callback into torch operators and back, with a stand-in that runs on a CPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_problems import Problem, assert_close, oracle
from malformed import WRONG, fp8_call, right_call, sparse_call

import flash_mla_jax
from flash_mla_jax import InputError, UnavailableError, call, flash_mla_with_kvcache, get_mla_metadata
from mla_jax import tile_schedule
from mla_jax.attention import flash_mla
from mla_jax.attention.tree import without_mask

LENS = (0, 65, 130, 1)
SCALE = 576**-0.5


def decode(problem: Problem, **options: Any) -> tuple[jax.Array, jax.Array]:
    """mla_jax's side, which a CPU cannot choose."""
    arrays = problem.arrays()
    order = [arrays.pop(n) for n in ("q", "kv_cache", "block_table", "kv_lens")]
    scale = options.pop("logit_scale", SCALE)
    run = without_mask(flash_mla.decode)
    options = {"value_scale": None, "d_v": 512, "causal": problem.causal} | options
    return run(*order, logit_scale=scale, **arrays, **options)


@pytest.mark.parametrize(
    "queries, causal, tree", [(1, True, False), (3, True, False), (2, False, False), (2, True, True)]
)
def test_dense_equals_float64(stand_in: Any, queries: int, causal: bool, tree: bool) -> None:
    problem = Problem(LENS, queries, 4, causal=causal, tree=tree, q_dtype="bfloat16", kv_dtype="bfloat16")
    out, lse = decode(problem)
    assert_close(out, lse, *oracle(**problem.arrays(), **problem.options), rounded_weights=True)


def test_fp8_with_traced_scales(stand_in: Any) -> None:
    problem = Problem(LENS, 2, 4, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    run = jax.jit(lambda s, v: decode(problem, logit_scale=s * v, value_scale=v))
    out, lse = run(jnp.float32(SCALE / 2), jnp.float32(0.25))
    want, want_lse, spread = oracle(**problem.arrays(), **problem.options | {"q_scale": 0.125})
    assert_close(out, lse, want / 4, want_lse, spread / 4, rounded_weights=True)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_schedule_of_mla_jax_is_used(stand_in: Any, fp8: bool) -> None:
    dtype = "float8_e4m3fn" if fp8 else "bfloat16"
    problem = Problem((700, 0, 500), 1, 4, q_dtype=dtype, kv_dtype=dtype)
    q, lens = problem.arrays()["q"], problem.arrays()["kv_lens"]
    schedule = flash_mla.schedule_for(q, lens)
    wanted = tile_schedule(jnp.maximum(lens, int(fp8)), 132, order="2025-02" if fp8 else "2026-01")
    assert schedule.check(lens)
    np.testing.assert_array_equal(schedule.metadata, wanted.metadata)
    assert schedule.num_splits[-1] > 10  # the longer requests are cut
    for a, b in zip(decode(problem, schedule=schedule), decode(problem), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert q.dtype.name == dtype


def test_jit_eager_and_shapes_agree(stand_in: Any) -> None:
    arguments = right_call()
    fixed = {n: arguments.pop(n) for n in ("head_dim_v", "causal")}
    run = functools.partial(flash_mla_with_kvcache, **fixed)
    shapes = jax.eval_shape(run, **arguments)
    eager, jitted = run(**arguments), jax.jit(run)(**arguments)
    for shape, a, b in zip(shapes, eager, jitted, strict=True):
        assert (shape.shape, shape.dtype) == (a.shape, a.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    out, lse = eager
    assert np.isposinf(np.asarray(lse)[1]).all() and not np.asarray(out[1], np.float32).any()


def test_changed_values_compile_nothing(stand_in: Any) -> None:
    arguments = right_call()
    fixed = {n: arguments.pop(n) for n in ("head_dim_v", "causal")}
    run = jax.jit(functools.partial(flash_mla_with_kvcache, **fixed))
    before = call.runs.total
    for length in (1, 100, 192):
        changed = arguments | {"cache_seqlens": jnp.full(3, length, jnp.int32)}
        jax.block_until_ready(run(**changed))
    assert run._cache_size() == 1 and call.runs.total == before + 3


@pytest.mark.parametrize("base", [right_call, fp8_call, sparse_call])
def test_shapes_without_a_gpu(base: Any) -> None:
    arguments = base()
    fixed = {n: arguments.pop(n) for n in ("head_dim_v", "causal", "block_table", "cache_seqlens") if n in arguments
             and not isinstance(arguments[n], jax.Array)}  # fmt: skip
    out, lse = jax.eval_shape(functools.partial(flash_mla_with_kvcache, **fixed), **arguments)
    batch, queries, heads, _ = arguments["q"].shape
    assert (out.shape, out.dtype) == ((batch, queries, heads, 512), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((batch, heads, queries), jnp.float32)


@pytest.mark.parametrize("base", [right_call, fp8_call, sparse_call])
def test_lowers_for_cuda_into_callbacks_that_a_graph_captures(base: Any) -> None:
    arguments = base()
    fixed = {n: arguments.pop(n) for n in tuple(arguments) if not isinstance(arguments[n], jax.Array)}
    run = functools.partial(flash_mla_with_kvcache, **fixed)
    lowered = jax.jit(run).trace(**arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@xla_buffer_python_gpu_callback_cmd_buffer") == (2 if base is fp8_call else 1)
    spec = call.Spec("sparse" if base is sparse_call else "dense", 132 // (2 if base is sparse_call else 1))
    if base is fp8_call:
        spec = call.Spec("dense_fp8", 132, with_metadata=True)
    batch, queries, heads, _ = arguments["q"].shape
    assert f"tensor<{call.scratch_bytes(spec, batch, queries * heads)}xui8>" in lowered


def test_layers_lower_once(stand_in: Any) -> None:
    arguments = right_call()

    def layers(q: jax.Array) -> jax.Array:
        for _ in range(4):
            out, _ = flash_mla_with_kvcache(**arguments | {"q": q})
            q = q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 64)))
        return q

    text = jax.jit(layers).lower(arguments["q"]).as_text()
    assert text.count("xla_buffer_python") == 1


@pytest.mark.parametrize(
    "transform, says",
    [
        (lambda f: jax.vmap(f, in_axes=0), "pass all requests as one batch"),
        (jax.grad, "implementation='reference'"),
        (lambda f: lambda q: jax.jvp(f, (q,), (q,)), "has no gradient"),
    ],
)
def test_vmap_and_gradients_say_what_to_use(transform: Any, says: str) -> None:
    arguments = right_call()

    def run(q: jax.Array) -> jax.Array:
        return flash_mla_with_kvcache(**arguments | {"q": q})[1].sum()

    q = arguments["q"]
    with pytest.raises(UnavailableError, match=says):
        transform(run)(q[None] if "batch" in says else q)


@pytest.mark.parametrize("what, says", [
    ("allocate", "the operator called aten.zeros.default, whose memory would be torch's"),
    ("more", "bytes of scratch and"),
    ("elsewhere", "did not write into XLA's buffers"),
])  # fmt: skip
def test_an_operator_that_takes_other_memory_fails(stand_in: Any, what: str, says: str) -> None:
    stand_in.misbehave = what
    with pytest.raises((ValueError, RuntimeError), match=says):  # the type is JAX's affair
        jax.block_until_ready(flash_mla_with_kvcache(**right_call()))


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.says], ids=lambda w: w.name)
def test_wrong_calls_say_what_came(wrong: Any) -> None:
    with pytest.raises(InputError) as error:
        flash_mla_with_kvcache(**wrong.call())
    message = str(error.value)
    assert wrong.says in message and message[-1] in ".?" and "\n" not in message


def test_there_are_forty_wrong_calls() -> None:
    assert sum(w.says is not None for w in WRONG) >= 40 and sum(w.means is not None for w in WRONG) >= 7


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.means and w.base is not sparse_call], ids=lambda w: w.name)
def test_wrong_values_give_a_defined_result(stand_in: Any, wrong: Any) -> None:
    got, want = flash_mla_with_kvcache(**wrong.call()), flash_mla_with_kvcache(**wrong.same_as())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=2e-6, rtol=2.0**-7)


@pytest.mark.parametrize("change, says", [
    ({"cache_seqlens": [150, 193, 500]}, "request 1 has cache_seqlens 193; 3 entries of block_table hold 0 to 192"),
    ({"cache_seqlens": [150, 0, -1]}, "request 2 has cache_seqlens -1"),
    ({"block_table": [[1, 2, 3], [-1, -1, -1], [7, 8, 1]]}, r"request 2 has block_table\[1\] = 8; k_cache has"),
])  # fmt: skip
def test_check_names_the_first_wrong_request(change: dict[str, Any], says: str) -> None:
    arguments = right_call() | {n: jnp.asarray(v, jnp.int32) for n, v in change.items()}
    with pytest.raises(InputError, match=says):
        flash_mla_with_kvcache(**arguments, check=True)


def test_check_of_indices_and_under_jit(stand_in: Any) -> None:
    arguments = sparse_call()
    arguments["indices"] = arguments["indices"].at[0, 1, 3].set(512)
    with pytest.raises(InputError, match=r"request 0 has indices\[1, 3\] = 512; k_cache holds tokens 0 to 511"):
        flash_mla_with_kvcache(**arguments, check=True)
    with pytest.raises(InputError, match="cannot be used under jit"):
        jax.jit(lambda n: flash_mla_with_kvcache(**right_call() | {"cache_seqlens": n}, check=True))(
            jnp.zeros(3, jnp.int32)
        )
    right = right_call()
    right["block_table"] = right["block_table"].at[1].set(-1)  # of an empty request: never read
    assert np.isfinite(np.asarray(flash_mla_with_kvcache(**right, check=True)[0], np.float32)).all()


def test_scales_that_cannot_be_traced() -> None:
    with pytest.raises(InputError, match="softmax_scale must be a number that is known when jit traces"):
        jax.jit(lambda s: flash_mla_with_kvcache(**right_call(), softmax_scale=s))(1.0)
    with pytest.raises(NotImplementedError, match="pass Python numbers"):
        jax.jit(lambda s: decode(Problem(LENS, 1, 4, q_dtype="bfloat16", kv_dtype="bfloat16"), logit_scale=s))(1.0)


def test_metadata_requests() -> None:
    assert get_mla_metadata() == (None, None)
    lens = jnp.zeros(5, jnp.int32)
    for arguments, parts in (
        ((lens, 128), 66),
        ((lens, 256, 1, 128, True, 2048), 33),
        ((lens, 16, 1, None, True), 132),
    ):
        metadata, num_splits = jax.eval_shape(lambda a=arguments: get_mla_metadata(*a))
        assert metadata.shape == (parts, 8) and num_splits.shape == (6,)
    for arguments, says in (
        ((lens, 0), "must be s_q · h_q"),
        ((lens, 16, 2), "num_heads_k must be 1"),
        ((lens, 16, 1, 16, True, 64), "must be 64 or 128"),
        ((lens.astype(jnp.float32), 16), "cache_seqlens must be int32"),
        ((lens[:0], 16), "at least one request"),
    ):
        with pytest.raises(InputError, match=says):
            get_mla_metadata(*arguments)


def test_a_cpu_says_why_it_cannot() -> None:
    with pytest.raises(
        UnavailableError, match=r"^FlashMLA's kernels need an NVIDIA Hopper GPU, and JAX runs on cpu here\."
    ):
        flash_mla_jax.flash_mla_with_kvcache(**right_call())


@pytest.mark.parametrize("causal", [False, True])
def test_indices_of_all_tokens_that_a_query_sees(causal: bool) -> None:
    table = jnp.asarray([[5, 2, 9], [-1, 2147480000, 7], [3, 4, 8]], jnp.int32)
    lens, queries = (130, 0, 2), 3
    indices = np.asarray(flash_mla._all_tokens(table, jnp.asarray(lens, jnp.int32), queries, causal))
    assert indices.shape == (3, queries, 192)
    for b, length in enumerate(lens):
        for j in range(queries):
            seen = [t for t in range(length) if not causal or t <= length - queries + j]
            wanted = [int(table[b, t // 64]) * 64 + t % 64 for t in seen]
            assert indices[b, j][indices[b, j] >= 0].tolist() == wanted
