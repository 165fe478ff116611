"""A small model whose MTP module mostly, but not always, predicts what the model says next."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from mla_jax.model.params import LayerParams, ModelParams
from tests.tiny import TINY, tiny_params


def agreeable_params(quiet: float = 0.35) -> ModelParams:
    """Layers add little (`quiet`) to the embedding, and the module starts from the embedding of the next token."""
    params = tiny_params()
    module = params.mtp[0]
    eye, zero = jnp.eye(TINY.hidden_size), jnp.zeros_like(params.embed[0])
    eh_proj = jnp.concatenate([eye, 0.05 * module.eh_proj[:, TINY.hidden_size :]], axis=1)
    module = replace(module, enorm=zero + 0.9, eh_proj=eh_proj, norm=params.norm, layer=hushed(module.layer, quiet))
    embed = params.embed / jnp.sqrt(jnp.mean(params.embed**2, axis=1, keepdims=True))
    return replace(params, embed=embed, layers=tuple(hushed(p, quiet) for p in params.layers), mtp=(module,))


def hushed(p: LayerParams, quiet: float) -> LayerParams:
    attention = replace(p.attention, o_proj=quiet * p.attention.o_proj)
    mlp: Any = p.mlp
    return replace(p, attention=attention, mlp=replace(mlp, down_proj=quiet * mlp.down_proj))
