"""Routers and experts against token-by-token NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_run import QUICK

from mla_jax.config import MoEConfig
from mla_jax.model.moe import moe, route
from mla_jax.model.params import MLPParams, MoEParams, RouterParams

E, F = 24, 10  # hidden size, size of an expert
V2_GREEDY = MoEConfig(8, 3, F, 2, "softmax", normalize=False, routed_scaling=1.5)
V2_GROUPS = MoEConfig(12, 3, F, 2, "softmax", 4, 2, normalize=False, routed_scaling=16.0)
V3 = MoEConfig(16, 4, F, 1, "sigmoid", 4, 2, routed_scaling=2.5)
V3_ONE_GROUP = MoEConfig(8, 2, F, 0, "sigmoid", normalize=False)
ROUTERS = {"v2-greedy": V2_GREEDY, "v2-groups": V2_GROUPS, "v3": V3, "v3-one-group": V3_ONE_GROUP}

run_route = jax.jit(route, static_argnums=1, compiler_options=QUICK)
run_moe = jax.jit(moe, static_argnums=1, compiler_options=QUICK)


def random_params(config: MoEConfig, dtype=jnp.float32) -> MoEParams:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, shape[-1] ** -0.5, shape).astype(jnp.dtype(dtype)))

    shared = config.num_shared_experts * F
    router = rng.normal(0, 3 * E**-0.5, (config.num_experts, E)).astype(np.float32)
    bias = jnp.asarray(rng.normal(0, 0.5, config.num_experts), jnp.float32) if config.scoring == "sigmoid" else None
    return MoEParams(
        router=RouterParams(jnp.asarray(router), bias),
        gate_up_proj=draw(E, config.num_experts, 2 * F),
        down_proj=draw(F, config.num_experts, E),
        shared=MLPParams(draw(shared, E), draw(shared, E), draw(E, shared)) if shared else None,
    )


def naive_route(config: MoEConfig, p: RouterParams, x: np.ndarray) -> dict[int, float]:
    """Expert → weight of one token, in float64."""
    logits = np.asarray(p.weight, np.float64) @ x
    scores = np.exp(logits) / np.exp(logits).sum() if config.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    ranking = scores if p.bias is None else scores + np.asarray(p.bias, np.float64)
    groups = ranking.reshape(config.num_groups, -1)
    best = 1 if config.scoring == "softmax" else 2
    value = np.sort(groups, axis=1)[:, -best:].sum(1)
    allowed = sorted(range(config.num_groups), key=lambda g: -value[g])[: config.groups_per_token]
    candidates = [e for e in range(config.num_experts) if e // groups.shape[1] in allowed]
    chosen = sorted(candidates, key=lambda e: -ranking[e])[: config.experts_per_token]
    total = sum(scores[e] for e in chosen) if config.normalize else 1.0
    return {e: scores[e] / total * config.routed_scaling for e in chosen}


def naive_swiglu(gate: np.ndarray, up: np.ndarray, down: np.ndarray, x: np.ndarray) -> np.ndarray:
    hidden = gate @ x
    return down @ (hidden / (1 + np.exp(-hidden)) * (up @ x))


def naive_moe(config: MoEConfig, p: MoEParams, x: np.ndarray) -> np.ndarray:
    gate_up, down = np.asarray(p.gate_up_proj, np.float64), np.asarray(p.down_proj, np.float64)
    out = np.zeros(E)
    for e, weight in naive_route(config, p.router, x).items():
        out += weight * naive_swiglu(gate_up[:, e, :F].T, gate_up[:, e, F:].T, down[:, e].T, x)
    if p.shared is not None:
        matrices = (p.shared.gate_proj, p.shared.up_proj, p.shared.down_proj)
        out += naive_swiglu(*(np.asarray(w, np.float64) for w in matrices), x)
    return out


@pytest.mark.parametrize("config", ROUTERS.values(), ids=ROUTERS)
def test_router_chooses_and_weighs_as_defined(config):
    p = random_params(config).router
    x = np.random.default_rng(1).normal(size=(300, E)).astype(np.float32)
    weights, experts = map(np.asarray, run_route(p, config, jnp.asarray(x)))
    assert len({tuple(sorted(row)) for row in experts}) > 8  # tokens do choose differently
    for i, row in enumerate(x):
        expected = naive_route(config, p, row.astype(np.float64))
        ours = dict(zip(experts[i].tolist(), weights[i].tolist(), strict=True))
        assert ours.keys() == expected.keys(), i
        assert ours == pytest.approx(expected, rel=1e-5), i


def test_the_bias_takes_part_in_the_choice_alone():
    p = random_params(V3_ONE_GROUP).router
    bias = np.zeros(8, np.float32)
    bias[[2, 5]] = 100.0
    x = jnp.asarray(np.random.default_rng(2).normal(size=(20, E)), jnp.float32)
    weights, experts = run_route(RouterParams(p.weight, jnp.asarray(bias)), V3_ONE_GROUP, x)
    assert set(np.asarray(experts).flat) == {2, 5}
    assert float(jnp.max(weights)) < 1


def test_a_negative_bias_does_not_let_other_groups_in():
    """With scores of the others masked by 0 instead of −inf, they would beat a picked group's negative ones."""
    p = random_params(V3).router
    biased = RouterParams(p.weight, jnp.asarray(np.full(16, -5.0), jnp.float32))
    x = np.random.default_rng(3).normal(size=(50, E)).astype(np.float32)
    _, experts = run_route(biased, V3, jnp.asarray(x))
    for i, row in enumerate(x):
        assert set(np.asarray(experts[i])) == naive_route(V3, biased, row.astype(np.float64)).keys()


@pytest.mark.parametrize("shape", [(1, 1), (2, 33)], ids=["decode", "prefill"])
@pytest.mark.parametrize("config", ROUTERS.values(), ids=ROUTERS)
def test_layer_equals_token_by_token(config, shape):
    p = random_params(config)
    x = np.random.default_rng(4).normal(size=(*shape, E)).astype(np.float32)
    ours = np.asarray(run_moe(p, config, jnp.asarray(x)))
    expected = np.array([naive_moe(config, p, row) for row in x.reshape(-1, E).astype(np.float64)])
    np.testing.assert_allclose(ours.reshape(-1, E), expected, atol=2e-5)


def test_meaningless_rows_disturb_no_other():
    p = random_params(V3)
    x = np.random.default_rng(5).normal(size=(6, 7, E)).astype(np.float32)
    clean = np.asarray(run_moe(p, V3, jnp.asarray(x)))
    padded = np.zeros((6, 7), bool)
    padded[[0, 2, 5], 3:], padded[4] = True, True
    for garbage in (np.nan, np.inf, -1e30, 0.0):
        dirty = np.asarray(run_moe(p, V3, jnp.asarray(np.where(padded[..., None], np.float32(garbage), x))))
        np.testing.assert_array_equal(dirty[~padded], clean[~padded])


def test_bfloat16_weights_with_a_float32_router():
    p = random_params(V3, jnp.bfloat16)
    x = np.random.default_rng(6).normal(size=(3, 5, E)).astype(np.float32)
    ours = run_moe(p, V3, jnp.asarray(x, jnp.bfloat16))
    rounded = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
    expected = np.array([naive_moe(V3, p, row) for row in rounded.reshape(-1, E)])
    assert ours.dtype == jnp.bfloat16
    tolerance = 0.03 * np.abs(expected).max()  # a few roundings of 2⁻⁸
    np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(-1, E), expected, atol=tolerance)
