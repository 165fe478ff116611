"""Mixture of experts: the routers of DeepSeek-V2 and V3, and the experts as one grouped matrix product."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.attention.operands import HIGHEST
from mla_jax.config import MoEConfig
from mla_jax.model.layers import einsum, mlp
from mla_jax.model.params import MoEParams, RouterParams

_EXPERTS_IN_THE_MIDDLE = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(1,)
)


def moe(p: MoEParams, config: MoEConfig, x: Float[Array, "B S E"]) -> Float[Array, "B S E"]:
    """Σ over a token's chosen experts of weight · expert(x), plus the shared experts.

    Every token is computed by itself, none is dropped, so a padded or meaningless row disturbs no other.
    Temporaries: N·C rows of E, 2F and F numbers for N = B·S tokens with C experts each. JAX 0.12 has a native
    `ragged_dot` on TPUs only; elsewhere it masks the rows once per expert, which is N·C·X·E numbers and X times the
    arithmetic, so keep prefill chunks short for models with many experts.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, experts = route(p.router, config, rows)
    out = run_experts(p, rows, weights, experts).reshape(x.shape)
    return out if p.shared is None else out + mlp(p.shared, x)


def route(p: RouterParams, config: MoEConfig, x: Float[Array, "N E"]) -> tuple[Float[Array, "N C"], Int[Array, "N C"]]:
    """The experts_per_token experts of each token and their weights, in float32.

    softmax (V2): scores = softmax(logits), a group counts as its best expert, weights are scores · scaling.
    sigmoid (V3): scores = σ(logits), the choice is made on scores + bias, a group counts as its two best experts;
    weights are the scores without bias, normalized to sum 1 if the config says so, · scaling.
    """
    logits = einsum("ne,xe->nx", x.astype(jnp.float32), p.weight.astype(jnp.float32))
    if config.scoring == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
        ranking = _keep_best_groups(config, scores, best_of_group=1)
    else:
        scores = jax.nn.sigmoid(logits)
        assert p.bias is not None  # the router of a model with sigmoid scoring has one
        biased = scores + p.bias.astype(jnp.float32)[None]
        ranking = _keep_best_groups(config, biased, best_of_group=2)
    _, experts = jax.lax.top_k(ranking, config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * config.routed_scaling, experts


def run_experts(
    p: MoEParams, x: Float[Array, "N E"], weights: Float[Array, "N C"], experts: Int[Array, "N C"]
) -> Float[Array, "N E"]:
    """Σ over C of weights · expert(x). Rows are sorted by expert, so that each expert is one matrix product."""
    num_rows, per_row = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    group_sizes = jnp.bincount(flat, length=p.gate_up_proj.shape[1]).astype(jnp.int32)
    gate, up = jnp.split(_grouped(x[order // per_row], p.gate_up_proj, group_sizes), 2, axis=-1)
    sorted_out = _grouped(jax.nn.silu(gate) * up, p.down_proj, group_sizes)
    out = sorted_out[jnp.argsort(order)].reshape(num_rows, per_row, -1).astype(jnp.float32)
    return einsum("nc,nce->ne", weights, out).astype(x.dtype)


def _grouped(
    rows: Float[Array, "M I"], matrices: Float[Array, "I X O"], group_sizes: Int[Array, "X"]
) -> Float[Array, "M O"]:
    """The first group_sizes[0] rows times matrices[:, 0], the next group_sizes[1] rows times matrices[:, 1], …

    `jax.lax.ragged_dot` in its general form: the plain one wants [X, I, O], and where it is not native XLA would
    transpose all experts in every call (on a CPU: 5 times slower for 64 experts of 1024 × 1024 and 6 rows).
    """
    return jax.lax.ragged_dot_general(rows, matrices, group_sizes, _EXPERTS_IN_THE_MIDDLE, precision=HIGHEST)


def _keep_best_groups(config: MoEConfig, scores: Float[Array, "N X"], best_of_group: int) -> Float[Array, "N X"]:
    """Scores, −inf for the experts of groups that a token does not pick."""
    if config.groups_per_token == config.num_groups:
        return scores
    grouped = scores.reshape(scores.shape[0], config.num_groups, -1)
    group_scores = jnp.sum(jax.lax.top_k(grouped, best_of_group)[0], axis=-1)
    _, best = jax.lax.top_k(group_scores, config.groups_per_token)
    picked = jnp.any(best[:, :, None] == jnp.arange(config.num_groups, dtype=best.dtype)[None, None], axis=1)
    return jnp.where(picked[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
