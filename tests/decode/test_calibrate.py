"""Scales from a text: what a cache would have been given, and nothing that padding holds."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import PagedKVCache
from mla_jax.decode import calibrate as module
from mla_jax.decode.calibrate import calibrate, largest_latents
from mla_jax.model.attend import attend_prefill
from mla_jax.model.transformer import mtp_forward, prefill
from tests.tiny import TINY, tiny_params

PARAMS = tiny_params()
WINDOW = 24
TEXT = np.random.default_rng(5).integers(1, TINY.vocab_size, 2 * WINDOW + 11)  # no token 0: that is the padding


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW", WINDOW)
    monkeypatch.setattr(module, "BATCH", 2)  # so that the text takes two batches


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True})
def latents_of(tokens: jax.Array) -> list[jax.Array]:
    """What each layer, the MTP module's too, writes to a float32 cache for one window and the token behind it."""
    size, table, none = tokens.shape[1] - 1, jnp.array([[1]], jnp.int32), jnp.zeros((1,), jnp.int32)
    cache = PagedKVCache.create(TINY.num_cache_layers, 2, TINY.latent_dim, "fp32")
    hidden, cache = prefill(PARAMS, TINY, tokens[:, :-1], none + size, none, table, cache)
    positions = jnp.arange(size, dtype=jnp.int32)[None]
    attend = attend_prefill(TINY, table, none, positions, positions >= 0)
    layer = TINY.num_layers
    _, cache = mtp_forward(PARAMS.mtp[0], PARAMS, TINY, layer, hidden, tokens[:, 1:], positions, cache, attend)
    return [cache.gather(i, table, positions)[0] for i in range(TINY.num_cache_layers)]


def test_scales_are_the_largest_of_what_a_cache_is_given() -> None:
    found = calibrate(PARAMS, TINY, TEXT.tolist())
    expected = np.zeros(3)
    for start in range(0, len(TEXT), WINDOW):
        tokens = TEXT[start : start + WINDOW + 1].astype(np.int32)
        last = len(tokens) <= WINDOW  # the text ends here: its last token has none behind it
        written = latents_of(jnp.asarray(np.append(tokens, 0)[None] if last else tokens[None]))
        for layer, rows in enumerate(written):
            rows = rows[:-1] if last and layer == TINY.num_layers else rows
            expected[layer] = max(expected[layer], float(jnp.abs(rows).max()))
    np.testing.assert_allclose(found.largest, expected, rtol=1e-5)
    np.testing.assert_allclose(found.scales, expected / 448, rtol=1e-5)
    assert found.scales.dtype == jnp.float32 and found.tokens == len(TEXT)


def test_the_last_token_counts() -> None:
    """At the end of text and window, where a cut might lose it: many tokens raise the first layer's maximum there."""
    largest = lambda last: float(calibrate(PARAMS, TINY, [1] * (2 * WINDOW - 1) + [last]).largest[0])  # noqa: E731
    assert sum(largest(token) > largest(1) for token in range(2, 22)) >= 5


@pytest.mark.parametrize("length", [1 + TINY.num_mtp_layers, WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW + 5])
def test_padded_nan_rows_poison_nothing(length: int) -> None:
    """The padding token's embedding is NaN: no scale may see it, in its own row of the batch or in another."""
    text = np.resize(TEXT, length).tolist()
    poisoned = replace(PARAMS, embed=PARAMS.embed.at[0].set(jnp.nan))
    np.testing.assert_array_equal(calibrate(poisoned, TINY, text).scales, calibrate(PARAMS, TINY, text).scales)


def test_a_window_that_counts_nothing_gives_nothing() -> None:
    windows, full = np.resize(TEXT, (2, WINDOW + 1)).astype(np.int32), WINDOW + 1
    everything, first, nothing = (
        largest_latents(PARAMS, windows, np.array(counts, np.int32), config=TINY)
        for counts in ([full] * 2, [full, 0], [0] * 2)
    )
    alone = largest_latents(PARAMS, windows[[0] * 2], np.array([full] * 2, np.int32), config=TINY)
    np.testing.assert_allclose(first, alone, rtol=1e-6)
    assert (everything >= first).all() and not np.array_equal(everything, first) and not nothing.any()


def test_a_layer_of_zeros_has_scale_1() -> None:
    attention = PARAMS.layers[1].attention
    zero = replace(attention, kv_a_proj=jnp.zeros_like(attention.kv_a_proj))
    layers = (PARAMS.layers[0], replace(PARAMS.layers[1], attention=zero))
    found = calibrate(replace(PARAMS, layers=layers), TINY, TEXT.tolist())
    assert found.scales[1] == 1 and found.largest[1] == 0 and found.scales[0] != 1


def test_progress_and_weights_in_bf16() -> None:
    seen: list[int] = []
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    found = calibrate(half, TINY, TEXT.tolist(), progress=lambda batches: (seen.append(b) or b for b in batches))
    np.testing.assert_allclose(found.scales, calibrate(PARAMS, TINY, TEXT.tolist()).scales, rtol=5e-2)
    assert seen == [0, 2]


@pytest.mark.parametrize(
    ("text", "sentence"), [([], "0 tokens; calibration needs at least 2"), ([1], "at least 2"), ([1, 61], "outside")]
)
def test_bad_text_is_one_sentence(text: list[int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        calibrate(PARAMS, TINY, text)
    assert "\n" not in str(error.value)


def test_weights_that_are_not_numbers_are_one_sentence() -> None:
    params = replace(
        PARAMS,
        layers=(PARAMS.layers[0], replace(PARAMS.layers[1], input_layernorm=jnp.full((32,), jnp.nan, jnp.float32))),
    )
    with pytest.raises(ValueError, match="latents of layer 1 are not finite"):
        calibrate(params, TINY, TEXT.tolist())
