"""FlashMLA's kernels through JAX on a Hopper GPU: its own outputs bit for bit, float64 NumPy, and wrong calls."""

import functools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import flash_mla_jax
from mla_jax import mla_decode, quantize_kv, tile_schedule
from mla_jax.attention.api import step_schedule

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "attention"), str(TESTS / "interop")]
from decode_problems import Problem, assert_close, oracle  # noqa: E402
from malformed import WRONG, right_call, sparse_call  # noqa: E402

REASON = flash_mla_jax.cannot_run()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
GOLDEN = np.load(TESTS / "data" / "golden_kernels.npz")
METADATA = np.load(TESTS / "data" / "golden_metadata.npz")
TAGS = sorted({key.split("/")[0] for key in GOLDEN.files})
DTYPES = {"torch.bfloat16": ml_dtypes.bfloat16, "torch.float16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn}
LENS = (0, 1, 63, 64, 65, 127, 128, 129, 1000)


def golden_call(tag: str, *, with_metadata: bool) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    row = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{tag}/")}
    dtype = DTYPES.get(str(row["dtype"]), ml_dtypes.bfloat16)
    call = {"q": jnp.asarray(row["q"].view(dtype)), "softmax_scale": float(row["scale"])}
    sparse = "indices" in row
    call["k_cache"] = jnp.asarray(row["kv"] if sparse else row["kv"].view(dtype))
    call |= {"block_table": None, "cache_seqlens": None}
    if sparse:
        call["indices"] = jnp.asarray(row["indices"])
    else:
        call |= {"block_table": jnp.asarray(row["bt"]), "cache_seqlens": jnp.asarray(row["lens"])}
        call["causal"] = bool(row["causal"])
    if "descale_q" in row:
        call |= {name: jnp.full(1, row[name], jnp.float32) for name in ("descale_q", "descale_k")}
    if with_metadata and not sparse:
        call |= {"tile_scheduler_metadata": jnp.asarray(row["meta"]), "num_splits": jnp.asarray(row["num_splits"])}
    return call, row["out"], row["lse"]


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("with_metadata", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("tag", TAGS)
def test_golden_outputs_bit_for_bit(tag: str, jitted: bool, with_metadata: bool) -> None:
    call, want, want_lse = golden_call(tag, with_metadata=with_metadata)
    arrays = {name: value for name, value in call.items() if isinstance(value, jax.Array)}
    fixed = {name: value for name, value in call.items() if name not in arrays}
    run = functools.partial(flash_mla_jax.flash_mla_with_kvcache, **fixed)
    out, lse = (jax.jit(run) if jitted else run)(**arrays)
    np.testing.assert_array_equal(bits(out), want.view(np.uint16))
    np.testing.assert_array_equal(bits(lse), want_lse.view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "heads, queries, causal",
    [(1, 1, True), (3, 2, True), (9, 2, False), (16, 1, True), (16, 4, True), (63, 1, True), (64, 2, True),
     (126, 1, True), (128, 1, True), (128, 2, True), (128, 4, False)],
)  # fmt: skip
def test_mla_decode_against_float64(heads: int, queries: int, causal: bool, dtype: str) -> None:
    Problem(LENS, queries, heads, causal=causal, q_dtype=dtype, kv_dtype=dtype).check("flash_mla")


@pytest.mark.parametrize("heads, queries", [(16, 4), (128, 2)])
def test_tree_masks(heads: int, queries: int) -> None:
    Problem(LENS, queries, heads, tree=True, q_dtype="bfloat16", kv_dtype="bfloat16").check("flash_mla")


@pytest.mark.parametrize("scales", [(None, None), (0.5, 0.25), (2.0, 3.0)])
@pytest.mark.parametrize("heads, queries", [(16, 1), (128, 2), (9, 1)])
def test_fp8_with_traced_scales(heads: int, queries: int, scales: tuple[Any, Any]) -> None:
    problem = Problem(LENS, queries, heads, q_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    arrays = problem.arrays()
    q_scale, kv_scale = (None if s is None else jnp.float32(s) for s in scales)
    run = jax.jit(functools.partial(mla_decode, implementation="flash_mla"))
    out, lse = run(**arrays, q_scale=q_scale, kv_scale=kv_scale)
    factor = float(kv_scale or 1)
    q_factor = float(q_scale or 1) * factor
    want, want_lse, spread = oracle(**arrays, **problem.options | {"q_scale": q_factor})
    # Its weights are rounded to e4m3, which has 3 bits: 2^-4 each, and independent.
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = ~np.isneginf(want_lse)
    # Hopper's FP8 products keep about 13 bits while they accumulate.
    assert np.abs(lse[seen] - want_lse[seen]).max() < 5e-3 * max(1, q_factor)
    assert (
        np.abs(out - want * factor) <= (2e-3 + 2.0**-7 * np.abs(want) + 2.0**-2 * max(1, q_factor) * spread) * factor
    ).all()


@pytest.mark.parametrize("heads, queries", [(64, 1), (128, 2)])
def test_rows_of_656_bytes(heads: int, queries: int) -> None:
    problem = Problem(LENS, queries, heads, q_dtype="bfloat16")
    arrays = problem.arrays()
    arrays["kv_cache"] = quantize_kv(jnp.nan_to_num(arrays["kv_cache"]), "fp8_ds_mla")
    out, lse = jax.jit(functools.partial(mla_decode, implementation="flash_mla"))(**arrays)
    want, want_lse = mla_decode(**arrays, implementation="reference")
    spread = np.ones_like(np.asarray(want, np.float64)) * 0.05
    assert_close(out, lse, np.asarray(want, np.float64), np.asarray(want_lse, np.float64), spread, rounded_weights=True)


def test_metadata_kernels_equal_tile_schedule_and_are_accepted() -> None:
    from flash_mla_jax.in_graph import matching_schedule

    for name in sorted({key.split("/")[0] for key in METADATA.files})[::7]:
        row = {key.split("/")[1]: METADATA[key] for key in METADATA.files if key.startswith(f"{name}/")}
        fp8 = str(row["kind"]) == "dense_fp8"
        lens = jnp.asarray(row["cache_seqlens"])
        if fp8 and not lens.all():
            continue  # get_mla_metadata counts a token for an empty request
        per_head = int(row["num_heads_q"]) * int(row["seq_len_q"])
        metadata, num_splits = flash_mla_jax.get_mla_metadata(lens, per_head, 1, is_fp8_kvcache=fp8)
        ours = tile_schedule(lens, metadata.shape[0], order="2025-02" if fp8 else "2026-01")
        active = np.asarray(metadata)[:, 0] < len(lens)
        np.testing.assert_array_equal(np.asarray(num_splits), row["num_splits"])
        columns = 5 if fp8 else 7
        np.testing.assert_array_equal(
            np.asarray(metadata)[active, :columns], np.asarray(ours.metadata)[active, :columns]
        )
        kept, _ = matching_schedule(metadata, num_splits, lens, tokens=fp8)
        assert np.array_equal(kept, metadata), "the device's own schedule was not recognised"


def test_sparse_metadata_is_accepted() -> None:
    from flash_mla_jax.in_graph import matching_schedule

    for batch, heads, queries, topk in ((1, 64, 1, 128), (5, 128, 2, 2048), (33, 64, 2, 64)):
        lens = jnp.zeros(batch, jnp.int32)
        metadata, num_splits = flash_mla_jax.get_mla_metadata(lens, heads * queries, 1, heads, True, topk)
        full = jnp.full(batch, topk, jnp.int32)
        kept, splits = matching_schedule(metadata, num_splits, full, tokens=False)
        assert np.array_equal(kept, metadata) and np.array_equal(splits, num_splits)


def test_layers_share_a_schedule_and_it_changes_nothing() -> None:
    arrays = Problem(LENS, 2, 16, q_dtype="bfloat16", kv_dtype="bfloat16").arrays()
    q, cache, table, lens = (arrays[n] for n in ("q", "kv_cache", "block_table", "kv_lens"))

    @functools.partial(jax.jit, static_argnums=4)
    def layers(q, cache, table, lens, shared):
        schedule = step_schedule("flash_mla", q, cache, lens) if shared else None
        for _ in range(3):
            out, lse = mla_decode(q, cache, table, lens, schedule=schedule, implementation="flash_mla")
            q = q + jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, 64)))
        return q, lse

    for a, b in zip(layers(q, cache, table, lens, True), layers(q, cache, table, lens, False), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.name)
def test_wrong_calls(wrong: Any) -> None:
    if wrong.says is not None:
        with pytest.raises(ValueError) as error:
            flash_mla_jax.flash_mla_with_kvcache(**wrong.call())
        assert wrong.says in str(error.value)
        return
    for got, want in zip(
        flash_mla_jax.flash_mla_with_kvcache(**wrong.call()),
        flash_mla_jax.flash_mla_with_kvcache(**wrong.same_as()),
        strict=True,
    ):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
        np.testing.assert_allclose(got, want, atol=2e-2 if "e4m3" in wrong.name else 2e-3, rtol=2.0**-7)


def test_scratch_is_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_mla_jax import arena

    used, take = [], arena.Arena.__exit__

    def leave(self, *args):
        used.append((self.used, self.scratch.numel(), len(self.results)))
        return take(self, *args)

    monkeypatch.setattr(arena.Arena, "__exit__", leave)
    heads = 7  # a shape that no other test has compiled
    call = right_call() | {"q": jnp.ones((3, 2, heads, 576), jnp.bfloat16)}
    flash_mla_jax.flash_mla_with_kvcache(**call)[0].block_until_ready()
    flash_mla_jax.flash_mla_with_kvcache(**sparse_call() | {"softmax_scale": 0.0625})[0].block_until_ready()
    assert used and all(a == b and left == 0 for a, b, left in used), used


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int32", "uint8", "int8", "bool"])
def test_dlpack_shares_memory(dtype: str) -> None:
    array = (jnp.arange(192).reshape(3, 64) % 2).astype(dtype)
    tensor = flash_mla_jax.to_torch(array)
    assert tensor.is_cuda and tensor.data_ptr() == array.unsafe_buffer_pointer()
    back = flash_mla_jax.from_torch(tensor)
    assert back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer() and back.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(back.astype(jnp.float32)), np.asarray(array.astype(jnp.float32)))
