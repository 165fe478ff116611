"""Budgets say what to lower; calls that cannot run say why."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from mla_jax import mla_decode, tile_schedule
from mla_jax.attention.api import implementation_for, step_schedule
from mla_jax.attention.mosaic_gpu import launch
from mla_jax.attention.mosaic_gpu.config import SHARED_MEMORY, KernelConfig, padded_rows
from mla_jax.attention.mosaic_gpu.requirements import cannot_run
from scripts.support import MACHINES, pretend


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


Q, CACHE = array((2, 1, 16, 576)), array((8, 64, 576))
DS_CACHE = array((8, 64, 656), jnp.uint8)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"left_slots": 4}, "lower left_slots or right_slots"),
        ({"right_slots": 1}, "each must be at least 2"),
        ({"register_tiles": 8}, "give 5, 6 or 7"),
        ({"score_registers": 192}, r"512 registers .* has 504 .* lower score_registers"),
        ({"score_registers": 160}, "lower register_tiles"),
        ({"score_registers": 182}, "multiple of 8"),
        ({"value_registers": 152}, "at least 160"),
    ],
)
def test_budgets(fields, reason):
    assert KernelConfig().shared_memory() <= SHARED_MEMORY
    with pytest.raises(ValueError, match=reason):
        KernelConfig(**fields)


@pytest.mark.parametrize(
    "q, cache, options, reason",
    [
        (
            array(Q.shape, jnp.float32),
            array(CACHE.shape, jnp.float32),
            {},
            "bfloat16 or float16, got q in float32",
        ),
        (Q, array(CACHE.shape, jnp.float16), {}, "one dtype, got bfloat16 and float16"),
        (
            array((2, 1, 16, 72)),
            array((8, 64, 72)),
            {},
            "built for 576 dims with 512 value dims, got 72 and 512",
        ),
        (Q, array((8, 16, 576)), {}, r"needs kv_cache \[pages, 64, 576\], got \(8, 16, 576\)"),
        (
            array(Q.shape, jnp.float16),
            array(CACHE.shape, jnp.float8_e4m3fn),
            {},
            "in float8_e4m3fn it takes q in bfloat16 or float8_e4m3fn, got float16",
        ),
        *(
            (array(Q.shape, dtype), DS_CACHE, {}, f"in fp8_ds_mla it takes q in bfloat16, got {jnp.dtype(dtype).name}")
            for dtype in (jnp.float16, jnp.float32, jnp.float8_e4m3fn)
        ),
        (Q, array(CACHE.shape, jnp.uint8), {}, r"needs kv_cache \[pages, 64, 656\], got \(8, 64, 576\)"),
        (array((2, 300, 1, 576)), CACHE, {"tree_mask": array((2, 300, 300), bool)}, "up to 256 tokens, got 300"),
        (Q, CACHE, {"row_scales": True}, "q_scale for each query row with a cache in float8_e4m3fn only, got bfloat16"),
        (Q, DS_CACHE, {"row_scales": True}, "q_scale for each query row .* only, got uint8"),
    ],
)
def test_reasons(q, cache, options, reason):
    found = cannot_run(q, cache, **options)
    assert found is not None
    assert re.search(reason, found), found


def test_other_machines():
    if jax.devices()[0].platform == "gpu":
        pytest.skip("this machine has a GPU")
    assert cannot_run() == cannot_run(Q, CACHE) == "it needs a Hopper GPU (compute capability 9.0), found cpu"
    zeros = [jnp.zeros(x.shape, x.dtype) for x in (Q, CACHE)]
    with pytest.raises(NotImplementedError, match="mosaic_gpu: it needs a Hopper"):
        mla_decode(*zeros, jnp.zeros((2, 4), jnp.int32), jnp.ones(2, jnp.int32), implementation="mosaic_gpu")
    assert implementation_for(None, Q, CACHE) == "xla"
    assert step_schedule(None, Q, CACHE, jnp.ones(2, jnp.int32)) is None


@pytest.mark.parametrize(
    "q_dtype, cache",
    [
        (jnp.bfloat16, CACHE),
        (jnp.float16, array(CACHE.shape, jnp.float16)),
        (jnp.bfloat16, array(CACHE.shape, jnp.float8_e4m3fn)),
        (jnp.float8_e4m3fn, array(CACHE.shape, jnp.float8_e4m3fn)),
        (jnp.bfloat16, DS_CACHE),
    ],
)
def test_hopper_takes_it_by_default(q_dtype, cache):
    with pretend(MACHINES["Hopper GPU"]):
        assert implementation_for(None, array(Q.shape, q_dtype), cache) == "mosaic_gpu"


@pytest.mark.parametrize(
    "q_dtype, cache, chosen",
    [
        (jnp.float8_e4m3fn, array(CACHE.shape, jnp.float8_e4m3fn), "mosaic_gpu"),
        (jnp.bfloat16, array(CACHE.shape, jnp.float8_e4m3fn), "mosaic_gpu"),
        (jnp.bfloat16, CACHE, "xla"),
        (jnp.bfloat16, DS_CACHE, "xla"),
    ],
)
def test_who_takes_a_scale_for_each_query_row(q_dtype, cache, chosen):
    q = array(Q.shape, q_dtype)
    with pretend(MACHINES["Hopper GPU"]):
        assert implementation_for(None, q, cache, row_scales=True) == chosen
        assert implementation_for(["flash_mla", "reference"], q, cache, row_scales=True) == "reference"
        schedule = step_schedule(None, q, cache, jnp.ones(2, jnp.int32), row_scales=True)
        assert (schedule is None) == (chosen == "xla")
        if q_dtype == cache.dtype:
            with pytest.raises(NotImplementedError, match="flash_mla: its kernels take one q_scale for all queries"):
                implementation_for("flash_mla", q, cache, row_scales=True)


@pytest.mark.parametrize("order", ["2025-09", "2025-02"])
def test_schedules_in_another_order_are_refused(order):
    schedule = tile_schedule(jnp.ones(2, jnp.int32), 4, order=order)
    lens, table = jnp.ones(2, jnp.int32), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match=f"order of {order}, mosaic_gpu takes that of 2026-01; make it with step_sch"):
        jax.eval_shape(partial(launch.decode, logit_scale=1.0, schedule=schedule), Q, CACHE, table, lens)
    assert jax.jit(lambda schedule: schedule)(schedule).order == order


def test_padded_rows():
    assert [padded_rows(n) for n in (1, 8, 9, 63, 64, 65, 126, 128)] == [8, 8, 16, 64, 64, 128, 128, 128]


@pytest.mark.filterwarnings("ignore:.*core_map is deprecated")  # by JAX 0.12; 0.11 has nothing in its place
def test_calls_under_vmap_follow_each_other():
    """As one grid their CTAs would not fit the GPU together, and count in the same counters."""
    with pretend(MACHINES["Hopper GPU"]):
        call = partial(mla_decode, implementation="mosaic_gpu", d_v=512)
        args = (array((3, *Q.shape)), CACHE, array((2, 4), jnp.int32), array((2,), jnp.int32))
        printed = str(jax.make_jaxpr(jax.vmap(call, in_axes=(0, None, None, None)))(*args))
    assert "grid=(132, 1)" in printed and "scan[" in printed


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"kv_lens": [1, 2]}, "kv_lens must be an array of 1 axes"),
        ({"kv_lens": jnp.ones(3, jnp.int32)}, r"kv_lens must be int32 \[2\]"),
        ({"kv_lens": array((3,), jnp.int32)}, r"must be int32 \[2\], .* got int32 \(3,\)"),
        ({"q": array(Q.shape[1:])}, "q must be an array of 4 axes"),
        ({"kv_cache": None}, "kv_cache must be an array of 3 axes"),
    ],
)
def test_step_schedule_checks_what_it_is_given(changes, sentence):
    call = {"q": Q, "kv_cache": CACHE, "kv_lens": jnp.ones(2, jnp.int32)} | changes
    with pytest.raises(ValueError, match=sentence):
        step_schedule(None, **call)
