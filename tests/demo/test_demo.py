import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import load_checkpoint
from mla_jax.decode.evaluate import evaluate
from mla_jax.decode.generate import Settings, generate
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model.attend import attend_self
from mla_jax.model.transformer import decode_stack, lm_logits, mtp_forward

CONFIG, PARAMS = load_checkpoint(CHECKPOINT, jnp.float32)


def test_it_is_the_model_that_the_issue_asks_for() -> None:
    assert (CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim, CONFIG.num_heads) == (512, 64, 16)
    assert (CONFIG.hidden_size, CONFIG.num_layers, CONFIG.num_mtp_layers, CONFIG.vocab_size) == (256, 4, 1, 256)
    assert sum(p.stat().st_size for p in CHECKPOINT.iterdir()) <= 20_000_000
    assert HELDOUT.stat().st_size == 65_536
    assert json.loads((CHECKPOINT / "training_log.json").read_text())["settings"]["length"] >= 512


@pytest.mark.parametrize("sample_bytes", [8_704, pytest.param(65_536, marks=pytest.mark.full)])
def test_bits_per_byte(sample_bytes: int) -> None:
    assert evaluate(PARAMS, CONFIG, list(HELDOUT.read_bytes()[:sample_bytes])).bits_per_byte <= 1.95


def test_mtp_module_predicts_the_token_after_next() -> None:
    """Along greedy text, how often the MTP module's best token is what the model then writes: a chain of one draft."""
    sample = HELDOUT.read_bytes()
    prompts = [list(sample[at : at + 64]) for at in range(0, len(sample), len(sample) // 8)][:8]
    result = generate(PARAMS, CONFIG, prompts, Settings(max_new_tokens=96))
    tokens = jnp.asarray([p + s.tokens for p, s in zip(prompts, result.sequences, strict=True)], jnp.int32)

    @jax.jit
    def drafts(tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32), tokens[:, 1:].shape)
        attend = attend_self(CONFIG)
        hidden, _ = decode_stack(PARAMS, CONFIG, tokens[:, :-1], positions, None, attend)
        ahead, _ = mtp_forward(
            PARAMS.mtp[0], PARAMS, CONFIG, CONFIG.num_layers, hidden, tokens[:, 1:], positions, None, attend
        )
        return jnp.argmax(lm_logits(PARAMS, ahead), axis=-1)

    hits = np.asarray(drafts(tokens))[:, 63:-1] == np.asarray(tokens)[:, 65:]
    assert hits.mean() >= 0.80
