# %% [markdown]
# # Drafts by multi-token prediction
#
# DeepSeek-V3 is trained with a **multi-token-prediction (MTP) module**: one more layer that takes the model's state at
# a token, and the token behind it, and predicts the one after that. In decoding it drafts. The model then checks all
# drafted tokens in one pass, keeps those that it would have written itself, and adds one of its own. The text is the
# same as without, in fewer steps.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_jax import PagePool, load_checkpoint
from mla_jax.decode.generate import Settings, generate
from mla_jax.demo import CHECKPOINT, HELDOUT
from mla_jax.model import lm_logits, prefill
from mla_jax.model.cache import create_cache
from mla_jax.speculative.accept import accept_walk, last_of
from mla_jax.speculative.config import Speculation
from mla_jax.speculative.draft import Drafter, prefill_draft_layer
from mla_jax.speculative.verify import gather_kept, reserve, verify
from mla_jax.speculative.window import MTPWindow, window_after, window_after_prefill

config, params = load_checkpoint(CHECKPOINT, jnp.float32)
text = HELDOUT.read_bytes()
tree = Speculation(steps=3, topk=3, draft_tokens=8)  # 3 tokens deep; the 7 likeliest of its branches, and the root

# %% [markdown]
# ## One step
#
# Everything below is traced into one function: no length, page id or acceptance reaches the host.


# %%
@jax.jit
def step(pool, cache, window, root):
    """Draft, verify, accept, roll back. `root` is the token that is pending, `window` the states drafts begin with."""
    lens = pool.kv_lens
    pool, _, room = reserve(pool, jnp.array([True]), tree.draft_tokens)  # pages for all nodes

    drafter = Drafter(params, config, pool.block_table, lens, room)
    draft, cache = drafter.draft(tree, window, root, cache)
    hidden, cache = verify(params, config, tree, draft, lens, room, pool.block_table, cache)
    choices = jnp.argmax(lm_logits(params, hidden), axis=-1).astype(jnp.int32)  # the model's token behind each node
    accepted = accept_walk(draft, choices, room, tree.most_kept)

    cache = gather_kept(cache, pool.block_table, lens, accepted)  # rows of the kept path, side by side
    pool = pool.truncate(lens + accepted.count)  # the others are gone
    window = window_after(accepted, hidden)
    return (pool, cache, window, last_of(accepted.tokens, accepted.count)), draft, accepted


# %% [markdown]
# A prompt goes into the cache, all but its last token, which is the first root.

# %%
prompt = text[:200]
tokens = jnp.asarray(list(prompt), jnp.int32)[None]
count = jnp.array([len(prompt) - 1], jnp.int32)
none = jnp.zeros_like(count)

pool, _ = PagePool.create(num_pages=9, max_seqs=1, max_pages_per_seq=8).extend(count)
cache = create_cache(params, config, 9, "fp32", mtp=True)
where = count, none, pool.block_table
hidden, cache = jax.jit(prefill, static_argnums=1)(params, config, tokens[:, :-1], *where, cache)
cache = jax.jit(prefill_draft_layer, static_argnums=1)(params, config, hidden, tokens[:, 1:], *where, cache)
window = MTPWindow.create(1, tree.most_kept, config.hidden_size, jnp.float32)
window = window_after_prefill(window, hidden, tokens[:, 1:], count)

state, steps = (pool, cache, window, tokens[:, -1]), []
while sum(int(accepted.count[0]) for _, accepted in steps) < 64:
    state, draft, accepted = step(*state)
    steps.append((draft, accepted))
written = [[t for t in accepted.tokens[0].tolist() if t >= 0] for _, accepted in steps]
print(prompt[-40:].decode() + "▸" + "|".join(bytes(t).decode() for t in written))


# %%
def letter(token):
    """A byte as it can be seen."""
    return {32: "␣", 10: "↵"}.get(token, chr(token))


def rows_of(parents):
    """y of each node: leaves one below the other, parents in the middle of their children."""
    children = {n: [c for c in range(1, len(parents)) if parents[c] == n] for n in range(len(parents))}
    y, leaves = {}, iter(range(len(parents)))

    def place(node):
        of_children = [place(c) for c in children[node]]
        y[node] = np.mean(of_children) if of_children else next(leaves)
        return y[node]

    place(0)
    return y


def draw(ax, draft, accepted):
    """The tree of a step: what was drafted, what was kept, and the model's own token behind it."""
    parents, depths, drafted = (x[0].tolist() for x in (draft.parents, draft.depths, draft.tokens))
    kept = accepted.path[0].tolist()[: int(accepted.count[0])]
    new = [t for t in accepted.tokens[0].tolist() if t >= 0]
    y = rows_of(parents)
    nodes = [(depths[n], y[n], drafted[n], "C2" if n in kept else "0.75") for n in range(len(parents))]
    bonus = (depths[kept[-1]] + 1, y[kept[-1]] + 0.45, new[-1], "C1")
    for n in range(1, len(parents)):
        xs, ys = [depths[parents[n]], depths[n]], [y[parents[n]], y[n]]
        ax.plot(xs, ys, color="C2" if n in kept else "0.8", linewidth=2 if n in kept else 1, zorder=1)
    ax.plot([bonus[0] - 1, bonus[0]], [y[kept[-1]], bonus[1]], color="C1", linestyle=":", zorder=1)
    for x, height, token, color in (*nodes, bonus):
        ax.text(
            x, height, letter(token), ha="center", va="center", family="monospace", color="white",
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": color, "edgecolor": "none"},
        )  # fmt: skip
    ax.set(title=f"+ {len(new)}: {''.join(map(letter, new))}", xlim=(-0.4, 4.4), yticks=[], xticks=range(5))
    ax.set_ylim(max(y.values()) + 0.8, -0.6)
    ax.spines["left"].set_visible(False)


fig, axes = plt.subplots(2, 4, figsize=(9.5, 4.6), sharex=True)
for ax, (draft, accepted) in zip(axes.flat, steps, strict=False):
    draw(ax, draft, accepted)
for ax in axes[1]:
    ax.set_xlabel("tokens ahead of the root")
fig.suptitle("the first 8 steps (green: kept, grey: rejected, orange: the model's own)", fontsize=9.5)
plt.show()

# %% [markdown]
# ## The same text, in fewer steps
#
# `generate` does this for whole batches. Eight prompts from text that the model has not seen, continued greedily, with
# nothing, a chain of one, a chain of three, and the tree above.

# %%
prompts = [list(text[start : start + 32]) for start in range(0, len(text), len(text) // 8)][:8]
drafts = {
    "no draft": None,
    "chain of 1": Speculation.chain(1),
    "chain of 3": Speculation.chain(3),
    "tree of 8 nodes, 3 deep": tree,
}
results = {
    name: generate(params, config, prompts, Settings(max_new_tokens=64, kv_format="fp32", speculation=speculation))
    for name, speculation in drafts.items()
}
plain = [s.tokens for s in results["no draft"].sequences]
for name, result in results.items():
    same = sum(s.tokens == p for s, p in zip(result.sequences, plain, strict=True))
    steps_each = sum(result.accept_histogram.values()) / len(prompts)
    print(f"{name:<24} same text for {same} of {len(prompts)}, {steps_each:.1f} steps for 64 tokens each")

# %%
fig, ax = plt.subplots(figsize=(9, 3.2))
for i, (name, result) in enumerate(list(results.items())[1:]):
    committed = np.arange(1, drafts[name].most_kept + 1)
    total = sum(result.accept_histogram.values())
    share = [100 * result.accept_histogram.get(n, 0) / total for n in committed]
    label = f"{name}: {result.accept_length:.2f} on average"
    ax.bar_label(ax.bar(committed + 0.28 * (i - 1), share, width=0.26, label=label), fmt="%.0f", fontsize=8)
ax.set(xlabel="tokens committed in a step (accept length)", ylabel="steps, %", xticks=range(1, tree.most_kept + 1))
fig.legend(loc="outside upper center", ncols=3)
plt.show()

# %% [markdown]
# Equal text is no luck: a token is kept only if it is the model's own choice, so the draft decides the speed alone.
# (With other batch shapes sums round differently; two tokens that are as good as equally likely may then swap.) The
# tree wins over the chain of the same depth because a second guess stands ready where the first is wrong; it pays with
# more rows in every pass of the model.
