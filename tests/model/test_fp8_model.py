"""A model over an FP8 cache: prompt chunks, decode, rejected drafts and YaRN, with the model's own scales.

How far off an FP8 run may be is measured, not guessed: by what rounding to the format does to the same model.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from paged_run import JITTED, PagedRun

from mla_jax.config import MLAConfig, YarnConfig
from mla_jax.decode.calibrate import calibrate
from mla_jax.errors import InputError
from mla_jax.model import attend
from mla_jax.model.cache import create_cache
from mla_jax.model.params import ModelParams
from tests.tiny import TINY, tiny_params

FP8 = ("fp8_e4m3", "fp8_ds_mla")
YARN = YarnConfig(40.0, 64, mscale=0.7, mscale_all_dim=1.0)
CONFIG = replace(
    TINY, kv_lora_rank=512, qk_rope_head_dim=64, yarn=YARN, max_position=2560
)  # rows that both formats hold
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, 150).astype(np.int32)
Model = tuple[MLAConfig, ModelParams]


@pytest.fixture(scope="module")
def model() -> Model:
    params = tiny_params(config=CONFIG)
    return CONFIG, replace(params, kv_scales=calibrate(params, CONFIG, TOKENS.tolist()).scales)


@pytest.fixture
def short_prefix_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend, "PREFIX_CHUNK", 32)


def start(model: Model, kv_format: str) -> PagedRun:
    """A run whose cache is 0xFF, which is NaN in every format, in every byte."""
    config, params = model
    run = PagedRun(config, params, 1)
    cache = create_cache(params, config, run.pool.owners.shape[0], kv_format, mtp=True)
    layers = (np.full(x.nbytes, 0xFF, np.uint8).view(x.dtype).reshape(x.shape) for x in cache.layers)
    run.cache = replace(cache, layers=tuple(jnp.asarray(x) for x in layers))
    return run


def prefill(model: Model, widths: list[int], kv_format: str) -> np.ndarray:
    run, logits, done = start(model, kv_format), [], 0
    for width in widths:
        logits += run.prefill([TOKENS[done : done + width]], 150)
        done += width
    return np.concatenate(logits)


def decoded(model: Model, kv_format: str, fp8_queries: bool = False) -> np.ndarray:
    run = start(model, kv_format)
    run.prefill([TOKENS[:60]], 150)
    return np.concatenate([run.decode([TOKENS[at : at + 6]], fp8_queries)[0] for at in range(60, 150, 6)])


def rms(x: np.ndarray) -> float:
    assert np.isfinite(x).all()
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.fixture(scope="module")
def exact(model: Model) -> np.ndarray:
    return np.asarray(JITTED.forward(model[1], model[0], jnp.asarray(TOKENS[None])))[0]


@pytest.mark.parametrize("kv_format", FP8)
def test_chunks_and_decode_read_what_the_format_keeps(model, exact, kv_format, short_prefix_chunks):
    """Borders of prompt chunks and the form of attention change far less than the format itself does."""
    whole = prefill(model, [150], kv_format)
    rounding = rms(whole - exact)
    assert 1e-3 < rounding / rms(exact) < 0.1  # e4m3 keeps 4 bits: 3 % of a number
    borders, steps = rms(prefill(model, [64, 75, 11], kv_format) - whole), rms(decoded(model, kv_format) - whole[60:])
    print(f"{kv_format}: rounding {rounding:.1e}, chunks {borders:.1e}, decode {steps:.1e}")
    assert borders < 0.1 * rounding and steps < 0.1 * rounding


def test_queries_in_e4m3_change_as_little_as_the_cache_does(model, exact):
    plain, rounded = (decoded(model, "fp8_e4m3", fp8_queries) for fp8_queries in (False, True))
    cost, format_cost = rms(rounded - plain), rms(plain - exact[60:])
    print(f"queries {cost:.1e}, cache {format_cost:.1e}")
    assert 0.1 * format_cost < cost < 2 * format_cost  # 4 bits are kept of both


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_ds_mla"])
def test_queries_in_e4m3_want_such_a_cache(model, kv_format):
    with pytest.raises(InputError, match=f"FP8 queries need a cache in fp8_e4m3 .*, got {kv_format}"):
        decoded(model, kv_format, fp8_queries=True)


@pytest.mark.parametrize("kv_format", FP8)
def test_a_rejected_draft_leaves_no_trace(model, kv_format):
    """Truncated to 62 tokens after drafts across a page border, a sequence goes on as if they had never been."""
    plain, detour = start(model, kv_format), start(model, kv_format)
    for run in (plain, detour):
        run.prefill([TOKENS[:62]], 150)
    detour.decode([TOKENS[100:106]])
    detour.pool = detour.pool.truncate(jnp.array([62], jnp.int32))
    for at in (62, 68):
        wanted, got = (run.decode([TOKENS[at : at + 6]])[0] for run in (plain, detour))
        np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(wanted).all() and int(detour.pool.num_free) == int(plain.pool.num_free)


@pytest.fixture(scope="module")
def factor_lost(model: Model) -> np.ndarray:
    """As `exact`, with YaRN's rotation, but a softmax scale without its factor."""
    lost = replace(CONFIG, yarn=replace(YARN, mscale_all_dim=0.0, attention_factor=YARN.amplitude))
    assert lost.sm_scale < 0.8 * CONFIG.sm_scale and lost.yarn.amplitude == YARN.amplitude
    return np.asarray(JITTED.forward(model[1], lost, jnp.asarray(TOKENS[None])))[0]


@pytest.mark.parametrize("kv_format", ["bf16", *FP8])
def test_yarn_factor_40_is_on_every_path(model, exact, factor_lost, kv_format):
    """TRT-LLM 3675: the softmax scale lost YaRN's factor on the FP8 path; here that is ten times the rounding."""
    error, without = rms(decoded(model, kv_format) - exact[60:]), rms(factor_lost - exact)
    print(f"{kv_format}: error {error:.1e}, with the factor lost {without:.1e}")
    assert without > 5 * error
