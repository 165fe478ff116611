# %% [markdown]
# # The tile scheduler
#
# Decode attention of a ragged batch has a problem: if each request goes to one group of thread blocks (a **part**), the
# longest request sets the time, and most of the GPU waits. FlashMLA's scheduler puts the pages of all requests on one
# line and cuts it into equal shares, through requests where need be (*split-KV*). `tile_schedule` computes the same
# division, bit for bit, as a jitted function of the lengths. What was cut is merged afterwards by log-sum-exp.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_jax import (
    PAGE_SIZE,
    Explanation,
    PagedKVCache,
    PagePool,
    absorb_query,
    explain,
    load_checkpoint,
    merge_states,
    mla_decode,
    num_sm_parts,
    tile_schedule,
)
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.explain import Piece
from mla_jax.model.attend import attend_self
from mla_jax.model.transformer import decode_stack
from mla_jax.schedule import REQUEST_OVERHEAD

kv_lens = [8192, 130, 2048, 70, 5000, 900, 300, 3500, 64, 1200, 6400, 450]
parts = num_sm_parts(num_sms=132, seq_len_q=1, num_heads_q=128)  # an H200; 128 query rows are two thread blocks
print(f"{len(kv_lens)} requests, {sum(kv_lens):,} tokens, {parts} parts")

# %% [markdown]
# ## Before and after
#
# The cost model counts pages of 64 tokens, and 5 more whenever a part starts and ends a request.

# %%
blocks = [-(-n // PAGE_SIZE) for n in kv_lens]
whole = tuple(
    Piece(part=r, request=r, first_block=0, end_block=n, split=0, num_splits=1, cost=n + REQUEST_OVERHEAD)
    for r, n in enumerate(blocks)
)
before = Explanation(tuple(kv_lens), parts, whole)
after = explain(kv_lens, parts)


def gantt(ax, explanation, title):
    """A row per part, a bar per piece of a request."""
    start = [0] * explanation.num_parts
    for piece in explanation.pieces:
        length = piece.end_block - piece.first_block
        color = plt.cm.tab20(piece.request)
        ax.barh(piece.part, length, left=start[piece.part], height=0.85, color=color)
        ax.barh(piece.part, REQUEST_OVERHEAD, left=start[piece.part] + length, height=0.85, color=color, alpha=0.35)
        start[piece.part] += piece.cost
    ax.set(title=f"{title}: longest {max(start)}, balance {explanation.balance:.0%}", ylabel="part")
    ax.set_ylim(explanation.num_parts - 0.3, -0.7)


fig, axes = plt.subplots(1, 2, figsize=(9.5, 5.6), sharey=True, width_ratios=[3, 1])
gantt(axes[0], before, "a request per part")
gantt(axes[1], after, "tile_schedule")
axes[1].set(xlim=(0, max(before.load) / 3 * 1.05), ylabel="")  # the same scale on both sides
axes[0].set(xlim=(0, max(before.load) * 1.05))
for ax in axes:
    ax.set_xlabel(f"load (blocks of {PAGE_SIZE} tokens)")
handles = [plt.Rectangle((0, 0), 1, 1, color=plt.cm.tab20(r)) for r in range(len(kv_lens))]
axes[0].legend(handles, [f"{r}: {n:,} tokens" for r, n in enumerate(kv_lens)], title="request", loc="lower right")
plt.show()
print("Pale: starting and ending a request.", end=" ")
print(f"The longest part has {max(before.load) / max(after.load):.0f} times less to do.")

# %% [markdown]
# ## What a kernel gets
#
# A row of `metadata` per part, and `num_splits`, cumulative: request *b* comes in `num_splits[b + 1] - num_splits[b]`
# pieces. Both stay on the device, and one schedule serves all layers of a step.

# %%
schedule = tile_schedule(jnp.array(kv_lens, jnp.int32), parts)
names = ["begin_req", "end_req", "begin_block", "end_block", "begin_split", "first_is_split", "last_is_split"]
print(" part ", *names)
for part in (0, 1, 14, 15, 16, 17):
    row = schedule.metadata[part].tolist()
    print(f"{part:5d} ", *(f"{value:{len(name)}d}" for name, value in zip(names, row, strict=False)))
print("\nnum_splits", schedule.num_splits.tolist())

splits = np.diff(schedule.num_splits)
fig, ax = plt.subplots(figsize=(9, 2.5))
bars = ax.bar(
    [f"{r}\n{n:,}" for r, n in enumerate(kv_lens)], splits, color=[plt.cm.tab20(r) for r in range(len(kv_lens))]
)
ax.bar_label(bars)
ax.set(xlabel="request, and its tokens", ylabel="pieces")
plt.show()

# %% [markdown]
# ## Merging the pieces
#
# Attention over a piece gives an output $o_i$ and $\mathrm{lse}_i = \log\sum_t e^{s_t}$ over its keys. The whole is
# $\mathrm{lse} = \log\sum_i e^{\mathrm{lse}_i}$ and $o = \sum_i e^{\mathrm{lse}_i - \mathrm{lse}}\, o_i$: exact, and in
# any order. Request 2 shall be 2048 bytes of text that the demo model reads; the last byte attends, in one layer.

# %%
LAYER, REQUEST = 1, 2
config, params = load_checkpoint(CHECKPOINT, jnp.float32)
length = kv_lens[REQUEST]
tokens = jnp.asarray(list(HELDOUT.read_bytes()[:length]), jnp.int32)[None]
positions = jnp.arange(length, dtype=jnp.int32)[None]
seen = {}


def attend(layer, weights, query, latents, cache):
    """Ordinary self-attention that remembers what it was given."""
    seen[layer] = query, latents
    return attend_self(config)(layer, weights, query, latents, cache)


decode_stack(params, config, tokens, positions, None, attend)
(q_nope, q_rope), latents = seen[LAYER]
q = absorb_query(q_nope[:, -1:], q_rope[:, -1:], params.layers[LAYER].attention.w_uk)

num_pages = 1 + blocks[REQUEST]
pool, _ = PagePool.create(num_pages, 1, blocks[REQUEST]).extend(jnp.array([length], jnp.int32))
cache = PagedKVCache.create(1, num_pages, config.latent_dim, "fp32").write(0, pool.block_table, positions, latents)


def over(first_block, end_block):
    """Attention over some of the request's pages: out and lse."""
    table = pool.block_table[:, first_block:end_block]
    keys = jnp.array([min(length, end_block * PAGE_SIZE) - first_block * PAGE_SIZE], jnp.int32)
    return mla_decode(q, cache.layers[0], table, keys, sm_scale=config.sm_scale, causal=False)


pieces = [p for p in after.pieces if p.request == REQUEST]
outs, lses = zip(*(over(p.first_block, p.end_block) for p in pieces), strict=True)
merged, lse = merge_states(outs, lses)
expected, expected_lse = over(0, blocks[REQUEST])


def worst(out):
    """Largest difference from attention over everything at once."""
    return float(jnp.abs(out - expected).max())


print(f"{len(pieces)} pieces; out up to {jnp.abs(expected).max():.2f}")
print(f"merged by log-sum-exp: off by {worst(merged):.1e} (lse by {jnp.abs(lse - expected_lse).max():.1e})")
print(f"the mean of the pieces: off by {worst(jnp.mean(jnp.stack(outs), axis=0)):.2f}")

# %%
share = np.exp(np.stack([np.asarray(x)[0, :, 0] for x in lses]) - np.asarray(lse)[0, :, 0])  # [pieces, heads]
fig, ax = plt.subplots(figsize=(9, 3.2))
bottom = np.zeros(config.num_heads)
for piece, of_head in zip(pieces, share, strict=True):
    first, end = piece.first_block * PAGE_SIZE, min(piece.end_block * PAGE_SIZE, length)
    label = f"{first}–{end - 1} (part {piece.part})"
    ax.bar(range(config.num_heads), of_head, bottom=bottom, label=label, color=plt.cm.Blues(0.25 + 0.17 * piece.split))
    bottom += of_head
ax.set(xlabel="head", ylabel=r"share of a piece, $e^{\mathrm{lse}_i-\mathrm{lse}}$", xticks=range(config.num_heads))
ax.legend(title="tokens of the piece", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# Every head takes another share of each piece, so a fixed weight would be wrong for most; the log-sum-exp, one number
# per query and head, is enough to get it right. No piece waits for another, so all of them run at the same time.
