"""Whole layers: a small checkpoint that transformers made and ran, decoded here from the paged cache."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.attention.api import IMPLEMENTATIONS
from mla_jax.cache.paged import PagedKVCache
from mla_jax.cache.pages import PagePool
from mla_jax.check.compare import PEERS, Row, peers
from mla_jax.config import MLAConfig
from mla_jax.model.cache import create_cache
from mla_jax.model.load import load_checkpoint
from mla_jax.model.params import ModelParams
from mla_jax.model.transformer import decode, lm_logits, prefill

BATCH, PROMPT, NEW = 2, 70, 2  # requests, tokens before and after; the decoded ones see two pages
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
RMS = {"fp32": 1e-5, "bf16": 3e-2}  # of logits; bf16 rounds every product of two layers


def compare_layers(version: int, names: tuple[str, ...], *, kinds: tuple[str, ...]) -> list[Row]:
    """A row per implementation and dtype; the answer is transformers' in float32."""
    names = tuple(n for n in names if n not in (*PEERS, "transformers"))
    cases = [(f"{kind} layers DeepSeek-V{version}", kind, name) for kind in kinds for name in names]
    if (reason := peers().transformers_reason()) is not None:
        return [Row(case, name, "skip", reason) for case, _, name in cases]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        peers().save_random_model(folder, version)
        tokens = np.random.default_rng(version).integers(1, 128, (BATCH, PROMPT + NEW)).astype(np.int32)
        want = peers().transformers_logits(folder, tokens)[:, PROMPT:]
        models = {kind: load_checkpoint(folder, DTYPES[kind]) for kind in kinds}
    return [_row(case, name, kind, *models[kind], tokens, want) for case, kind, name in cases]


def _row(
    case: str, name: str, kind: str, config: MLAConfig, params: ModelParams, tokens: np.ndarray, want: np.ndarray
) -> Row:
    q = jax.ShapeDtypeStruct((BATCH, NEW, config.num_heads, config.latent_dim), DTYPES[kind])
    cache = jax.ShapeDtypeStruct((1, 64, config.latent_dim), DTYPES[kind])
    if (reason := IMPLEMENTATIONS[name].cannot_run(q, cache, d_v=config.kv_lora_rank)) is not None:
        return Row(case, name, "skip", reason.rstrip(".") + ".")
    try:
        got = _decoded(config, params, jnp.asarray(tokens), name, kind)
    except Exception as error:  # a row that breaks must not hide the others
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Row(case, name, "fail", f"raised {type(error).__name__}: {first_line:.200}")
    difference = np.abs(got - want)
    rms = float(np.sqrt((difference**2).sum() / (want.astype(np.float64) ** 2).sum()))
    failed = f"The relative RMS error of the logits is {rms:.1e}." if not rms <= RMS[kind] else None
    return Row(case, name, "pass" if failed is None else "fail", failed, float(difference.max()), rms)


def _decoded(config: MLAConfig, params: ModelParams, tokens: jax.Array, name: str, kind: str) -> np.ndarray:
    """Logits of the new tokens: the prompt goes into the cache, the rest reads it."""
    pages = -(-(PROMPT + NEW) // 64)
    pool = PagePool.create(BATCH * pages + 1, BATCH, pages)
    pool, _ = pool.extend(jnp.full(BATCH, PROMPT + NEW, jnp.int32))
    cache = create_cache(params, config, BATCH * pages + 1, kind)
    counts, none = jnp.full(BATCH, PROMPT, jnp.int32), jnp.zeros(BATCH, jnp.int32)

    @jax.jit
    def run(params: ModelParams, tokens: jax.Array, cache: PagedKVCache) -> jax.Array:
        _, filled = prefill(params, config, tokens[:, :PROMPT], counts, none, pool.block_table, cache)
        hidden, _ = decode(
            params, config, tokens[:, PROMPT:], pool.kv_lens, pool.block_table, filled, implementation=name
        )
        return lm_logits(params, hidden)

    return np.asarray(run(params, tokens, cache), np.float64)
