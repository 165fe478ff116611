"""Decode steps with queries in e4m3: all attention of a step gets them, with drafts and without, and only if legal."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode.engine import Engine
from mla_jax.decode.evaluate import WINDOW, evaluate
from mla_jax.decode.generate import Settings, generate
from mla_jax.errors import InputError
from mla_jax.model import attend
from mla_jax.model.cache import create_cache
from mla_jax.model.transformer import decode
from mla_jax.schedule import tile_schedule
from mla_jax.speculative.config import Speculation
from tests.tiny import TINY, prompts, tiny_params

PARAMS = tiny_params()
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("fp8_queries", [False, True])
@pytest.mark.parametrize(
    "speculation", [None, Speculation(2, 1, 3), Speculation(3, 2, 5)], ids=["plain", "chain", "tree"]
)
def test_every_call_of_a_step_gets_them(speculation, fp8_queries, monkeypatch):
    """The model's, the draft module's and a tree's; schedules are asked for what the calls get."""
    calls, schedules = [], []
    decode, schedule = attend.mla_decode, attend.step_schedule

    def watched(q: Any, *arrays: Any, q_scale: Any = None, **options: Any) -> Any:
        calls.append((q.dtype, None if q_scale is None else (q_scale.shape == q.shape[:3])))
        return decode(q, *arrays, q_scale=q_scale, **options)

    def watched_schedule(implementation: Any, q: Any, *arrays: Any, row_scales: bool) -> Any:
        schedules.append((q.dtype, row_scales))
        return schedule(implementation, q, *arrays, row_scales=row_scales)

    monkeypatch.setattr(attend, "mla_decode", watched)
    monkeypatch.setattr(attend, "step_schedule", watched_schedule)
    config = replace(TINY, max_position=1000 + 2 * bool(speculation) + fp8_queries)  # traced by no other test
    settings = Settings(
        max_new_tokens=9, kv_format="fp8_e4m3", fp8_queries=fp8_queries, num_slots=2, speculation=speculation
    )
    result = generate(PARAMS, config, prompts((5, 70)), settings)
    assert [len(s.tokens) for s in result.sequences] == [9, 9]
    dtype = jnp.dtype(jnp.float8_e4m3fn if fp8_queries else jnp.float32)
    assert set(calls) == {(dtype, True if fp8_queries else None)}
    assert set(schedules) == {(dtype, fp8_queries)}
    module_calls = 0 if speculation is None else speculation.steps  # the window's, and a further one for each step
    assert len(calls) == (TINY.num_layers + module_calls) * len(schedules)


def test_they_change_the_score_by_little():
    text = np.random.default_rng().integers(0, TINY.vocab_size, WINDOW).tolist()
    plain, rounded = (
        evaluate(PARAMS, TINY, text, kv_format="fp8_e4m3", fp8_queries=fp8_queries) for fp8_queries in (False, True)
    )
    assert plain.bits_per_token != rounded.bits_per_token
    assert rounded.bits_per_token == pytest.approx(plain.bits_per_token, rel=5e-2)


@pytest.mark.parametrize("kv_format", ["bf16", "fp32", "fp8_ds_mla"])
def test_other_caches_are_refused(kv_format):
    config = replace(TINY, kv_lora_rank=512, qk_rope_head_dim=64)  # rows that all formats hold
    for make in (Engine, lambda *model, **how: evaluate(*model, [1] * WINDOW, **how)):
        with pytest.raises(InputError, match=f"FP8 queries need a cache in fp8_e4m3 .* got {kv_format}"):
            make(tiny_params(config=config), config, kv_format=kv_format, fp8_queries=True)


@pytest.mark.parametrize("wrong", ["no", 1, None, np.asarray([True])])
def test_it_is_a_bool(wrong):
    with pytest.raises(InputError, match="fp8_queries must be True or False"):
        attend.check_fp8_queries(wrong, "fp8_e4m3")


def test_a_schedule_does_not_hide_another_cache():
    config = replace(TINY, kv_lora_rank=512, qk_rope_head_dim=64)
    params = tiny_params(config=config)
    cache = create_cache(params, config, 3, "fp8_ds_mla")
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(InputError, match="FP8 queries need a cache in fp8_e4m3"):
        decode(params, config, one[:, None], one, one[:, None], cache, fp8_queries=True, schedule=tile_schedule(one, 4))
