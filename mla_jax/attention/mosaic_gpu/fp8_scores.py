"""The score role for FP8 caches: S = Q Kᵀ in e4m3 as it lies in the cache, softmax, probabilities in float16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_work import Place
from mla_jax.attention.mosaic_gpu.config import LOG2E, PAGE, ROWS
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.fp8_hardware import KEYS_AT_ONCE, clear_keys, copy_queries, store_probabilities
from mla_jax.attention.mosaic_gpu.fp8_work import Fp8Cta
from mla_jax.attention.mosaic_gpu.hardware import make_visible
from mla_jax.attention.mosaic_gpu.scores import (
    ROW,
    Softmax,
    clear_unowned,
    first_masked_block,
    logits_of,
    nonzero,
    store_lse,
    visible_keys,
)
from mla_jax.attention.mosaic_gpu.steps import Steps, finish, interleave, no_steps
from mla_jax.attention.mosaic_gpu.work import Segment, Side


def score(cta: Fp8Cta) -> None:
    """Score every block of every request, and write the log-sum-exp.

    The products of a block are under way while the softmax of the block before is computed.
    """
    config = cta.config
    scale = cta.memory.scale[0]

    def request(r: jax.Array, place: Place) -> Place:
        segment = cta.segment(r)
        rows = pl.ds(cta.row_block * ROWS, ROWS)
        logit_scale = plgpu.load(cta.query_scale.at[r, rows], layout=ROW, optimized=False) * (jnp.abs(scale) * LOG2E)
        for part in range(config.query_parts):
            _take_queries(cta, place, part, negative=scale < 0)
            place = place.after(config)

        def block(masked: bool, i: jax.Array, carry: tuple[Softmax, jax.Array, Place]) -> Any:
            softmax, products, place = carry

            steps = _publish(cta, segment, i, place, softmax, products, logit_scale, masked=masked)
            softmax, products = _products(cta, segment, place.after(config), steps, plain=masked)
            return softmax, products, place.after(config)

        _, products = _products(cta, segment, place, no_steps())
        last = segment.end - 1
        mask_from = lax.max(lax.min(first_masked_block(cta, segment.length), last), segment.first)
        carry = (Softmax.empty(), products, place)
        carry = lax.fori_loop(segment.first, mask_from, functools.partial(block, False), carry)
        softmax, products, place = lax.fori_loop(mask_from, last, functools.partial(block, True), carry)
        softmax = finish(_publish(cta, segment, last, place, softmax, products, logit_scale, masked=True, last=True))
        store_lse(cta, segment, softmax.top, softmax.totals.sum(axis=1))
        return place.after(config)

    cta.for_each_request(request, Place.start())
    for buffer in range(BUFFERS):
        cta.buffer_free.receive(jnp.int32(buffer))  # nothing is left behind
    plgpu.wait_smem_to_gmem(0)


def _await_item(cta: Fp8Cta, place: Place) -> None:
    for side in Side:
        plgpu.barrier_wait(cta.arrived(side, place.slot))
    plgpu.barrier_wait(cta.rope_full.at[place.slot])


def _take_queries(cta: Fp8Cta, place: Place, part: int, *, negative: jax.Array) -> None:
    """Copy queries out of their slot, and give the slot back."""
    _await_item(cta, place)
    cta.buffer_free.receive(place.buffer)
    for source, target in zip(cta.slots.operands(place.slot), cta.queries.operands(part), strict=True):
        copy_queries(source, target, negative, emulate=cta.emulate)
    plgpu.commit_smem()  # the slot has been read, and what was stored is there for products
    cta.scored.send(place.buffer)


def _products(
    cta: Fp8Cta, segment: Segment, place: Place, meanwhile: Steps[Any], *, plain: bool = False
) -> tuple[Any, jax.Array]:
    """Result of `meanwhile`, and Q Kᵀ of one block: [64, 64] float32, under way meanwhile.

    plain: issue all products first. Where steps hide keys, ptxas waits for each product that comes between them.
    """
    keys = cta.keys.operands(place.slot)
    # A zero that the compiler takes for a number that changes from block to block: it would keep the descriptors of
    # all query tiles in registers otherwise. Not of the length, which may be negative.
    zero = lax.shift_right_logical(place.slot | segment.end, jnp.int32(31))
    operands = [
        operands
        for part in reversed(range(cta.config.query_parts))  # small numbers first
        for operands in zip(cta.queries.operands(part + zero), keys, strict=True)
    ]
    _await_item(cta, place)
    if cta.emulate:
        products = jnp.zeros((ROWS, PAGE), jnp.float32)
        for q, k in operands:
            products += jnp.dot(q[...].astype(jnp.float32), k[...].astype(jnp.float32).T)
        plgpu.commit_smem()
        return finish(meanwhile), products

    def multiply(products: Any) -> tuple[Any, jax.Array]:
        issue = [functools.partial(plgpu.wgmma, products, q, k.transpose((1, 0))) for q, k in operands]
        if plain:
            for one in issue:
                one()
            return finish(meanwhile), products[...]
        return interleave(issue, meanwhile), products[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, PAGE), jnp.float32))


def _publish(
    cta: Fp8Cta,
    segment: Segment,
    block: jax.Array,
    place: Place,
    softmax: Softmax,
    products: jax.Array,
    scale: jax.Array,
    *,
    masked: bool,
    last: bool = False,
) -> Steps[Softmax]:
    """Softmax of a block's products; probabilities and what value roles need beside them go to shared memory."""
    visible = visible_keys(cta, segment, block) if masked else None
    target = cta.probabilities.at[place.buffer]

    def store(first: int, probabilities: jax.Array) -> None:
        if first == 0:
            cta.buffer_free.receive(place.buffer)
        parts = pl.ds(first // KEYS_AT_ONCE, probabilities.shape[1] // KEYS_AT_ONCE)
        store_probabilities(target.at[parts], probabilities, cta.problem.copied_rows, emulate=cta.emulate)

    logits, highest = logits_of(products, scale, visible)
    top, decay = softmax.follow(highest)
    softmax = softmax.advance(top, decay)
    yield
    columns = PAGE if masked else KEYS_AT_ONCE
    for first in range(0, PAGE, columns):
        some = logits[:, first : first + columns] if columns < PAGE else logits
        probabilities = jnp.exp2(some - lax.broadcast_in_dim(top, some.shape, [0]))
        store(first, probabilities)
        softmax = softmax.add(probabilities)
        if first + columns < PAGE:
            yield
    cta.decay(place.buffer)[...] = decay
    if last:
        cta.inverse_total(place.buffer)[...] = 1.0 / nonzero(softmax.totals.sum(axis=1))
    if masked:

        def clear(first: jax.Array) -> None:
            for side in Side:
                clear_keys(cta.slots.half(side, place.slot), first, emulate=cta.emulate)

        clear_unowned(segment, block, clear)
    make_visible(emulate=cta.emulate)
    cta.scored.send(place.buffer)
    return softmax
