"""The score role for caches in fp8_ds_mla: Sᵀ = K Qᵀ, with keys widened on their way to registers, and softmax.

Keys are rows of the products: so they can be widened where they are, and no page needs to lie as a product wants it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mla_jax.attention.mosaic_gpu.byte_work import Place
from mla_jax.attention.mosaic_gpu.column_softmax import (
    add_totals,
    any_above,
    no_totals,
    scale_totals,
    store_probabilities_by_key,
    sum_totals,
)
from mla_jax.attention.mosaic_gpu.config import LOG2E
from mla_jax.attention.mosaic_gpu.ds_keys import KeyScales, clear_keys, load_scales, store_scales
from mla_jax.attention.mosaic_gpu.ds_products import key_products
from mla_jax.attention.mosaic_gpu.ds_queries import take_queries
from mla_jax.attention.mosaic_gpu.ds_work import DsCta
from mla_jax.attention.mosaic_gpu.fp8_config import BUFFERS
from mla_jax.attention.mosaic_gpu.fp8_hardware import COLUMN
from mla_jax.attention.mosaic_gpu.hardware import make_visible, warpgroup_barrier
from mla_jax.attention.mosaic_gpu.scores import (
    HIDDEN,
    LOWEST,
    SLACK,
    clear_unowned,
    first_masked_block,
    nonzero,
    store_lse,
    visible_keys,
)
from mla_jax.attention.mosaic_gpu.work import Segment


def score(cta: DsCta) -> None:
    """Score every block of every request, and write the log-sum-exp."""
    config, rows = cta.config, cta.problem.copied_rows
    scale = cta.memory.scale[0] * LOG2E

    def request(r: jax.Array, place: Place) -> Place:
        segment = cta.segment(r)
        source = cta.memory.q.at[r, cta.rows]
        take_queries(source, *cta.queries, scale, emulate=cta.emulate)
        cta.top[...] = plgpu.layout_cast(jnp.full((rows,), LOWEST, jnp.float32), COLUMN)
        make_visible(emulate=cta.emulate)
        warpgroup_barrier(emulate=cta.emulate)

        def block(masked: bool, i: jax.Array, carry: tuple[jax.Array, Place]) -> tuple[jax.Array, Place]:
            totals, place = carry
            return _score_block(cta, segment, i, place, totals, masked=masked), place.after(config)

        mask_from = lax.max(lax.min(first_masked_block(cta, segment.length), segment.end), segment.first)
        carry = (no_totals(rows, emulate=cta.emulate), place)
        carry = lax.fori_loop(segment.first, mask_from, functools.partial(block, False), carry)
        totals, place = lax.fori_loop(mask_from, segment.end, functools.partial(block, True), carry)
        total = sum_totals(totals, rows, emulate=cta.emulate)
        cta.buffer_free.receive(place.buffer)
        cta.inverse_total(place.buffer).at[pl.ds(0, rows)][...] = 1.0 / nonzero(total)
        if cta.emulate:
            plgpu.commit_smem()
        cta.scored.send(place.buffer)
        top = plgpu.load(cta.top, layout=COLUMN, optimized=False)
        store_lse(cta, segment, top, total)
        return place.after_total()

    cta.for_each_request(request, Place.start())
    for buffer in range(BUFFERS):
        cta.buffer_free.receive(jnp.int32(buffer))  # nothing is left behind
    plgpu.wait_smem_to_gmem(0)


def _score_block(
    cta: DsCta, segment: Segment, block: jax.Array, place: Place, totals: jax.Array, *, masked: bool
) -> jax.Array:
    """Sums of the probabilities up to this block, which go to the value roles."""
    emulate = cta.emulate
    keys = cta.keys.at[place.slot]
    plgpu.barrier_wait(cta.full.at[place.slot])
    if masked:
        clear_unowned(segment, block, lambda first: clear_keys(keys, first, emulate=emulate))
        if emulate:
            plgpu.commit_smem()
        warpgroup_barrier(emulate=emulate)
    scales = load_scales(keys, emulate=emulate)
    latent, rope, _ = cta.queries
    products = key_products(keys, latent, rope, scales, segment.length | place.slot, emulate=emulate)
    logits = _logits(cta, products, scales)
    if masked:
        logits = jnp.where(visible_keys(cta, segment, block, rows=cta.problem.copied_rows, row_axis=1), logits, HIDDEN)
    exceeds = any_above(logits, cta.top, SLACK, cta.vote_barrier, emulate=emulate)
    cta.buffer_free.receive(place.buffer)
    cta.differs.at[place.buffer][...] = exceeds
    totals = lax.cond(exceeds != 0, lambda: _follow(cta, logits, totals, place.buffer), lambda: totals)
    top = plgpu.load(cta.top, layout=COLUMN, optimized=False)
    probabilities = jnp.exp2(logits - lax.broadcast_in_dim(top, logits.shape, [1]))
    store_probabilities_by_key(cta.probabilities.at[place.buffer], probabilities, emulate=emulate)
    store_scales(cta.scales.at[place.buffer], scales, emulate=emulate)
    make_visible(emulate=emulate)
    cta.scored.send(place.buffer)
    return add_totals(totals, probabilities, scales.unit, emulate=emulate)


def _logits(cta: DsCta, products: jax.Array, scales: KeyScales) -> jax.Array:
    """Base 2; each together with its key's exponent."""
    factor = plgpu.load(cta.queries.factor, layout=COLUMN, optimized=False)
    products = products * lax.broadcast_in_dim(scales.unit, products.shape, [0])
    products = products * lax.broadcast_in_dim(factor, products.shape, [1])
    return products + lax.broadcast_in_dim(scales.exponent, products.shape, [0])


def _follow(cta: DsCta, logits: jax.Array, totals: jax.Array, buffer: jax.Array) -> jax.Array:
    """Let the maximum follow the logits: returns what totals are then."""
    highest = logits.max(axis=0)
    top = plgpu.load(cta.top, layout=COLUMN, optimized=False)
    risen = jnp.where(highest > top + SLACK, highest, top)
    decay = jnp.exp2(top - risen)
    warpgroup_barrier(emulate=cta.emulate)  # all four warps have read the maximum
    cta.top[...] = risen
    cta.decay(buffer).at[pl.ds(0, cta.problem.copied_rows)][...] = decay
    if cta.emulate:
        plgpu.commit_smem()
    warpgroup_barrier(emulate=cta.emulate)
    return scale_totals(totals, decay, emulate=cta.emulate)
