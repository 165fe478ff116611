# %% [markdown]
# # Pages and block tables
#
# A cache that serves many requests cannot keep each in one piece: nobody knows how long they will grow. So memory is
# cut into pages of 64 tokens, and a **block table** says which page holds which 64 tokens of which request. `PagePool`
# is that table and its bookkeeping, all of it on the device and inside `jit`. `PagedKVCache` is the memory.
#
# This notebook draws who owns which page while requests grow, fork and roll back, and then attends to the result.

# %%
from dataclasses import replace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from mla_jax import PAGE_SIZE, PagedKVCache, PagePool, mla_decode

NUM_PAGES, SLOTS, LATENT_DIM = 13, 3, 576
COLORS = ["C0", "C1", "C2"]


def owners_of(pool):
    """{page: [(slot, tokens that it keeps there), …]}"""
    found = {}
    table, lens = np.asarray(pool.block_table), np.asarray(pool.kv_lens)
    for slot, length in enumerate(lens):
        for entry in range(-(-length // PAGE_SIZE)):
            rows = min(PAGE_SIZE, int(length) - entry * PAGE_SIZE)
            found.setdefault(int(table[slot, entry]), []).append((slot, rows))
    return found


def draw(history):
    """A row per (title, pool): the pages on the left, filled as far as they are used, and the block table."""
    fig, axes = plt.subplots(len(history), 1, figsize=(9.5, 1.15 * len(history)), sharex=True)
    for ax, (title, pool) in zip(np.atleast_1d(axes), history, strict=True):
        for page in range(NUM_PAGES):
            ax.add_patch(plt.Rectangle((page, 0), 0.86, 1, facecolor="0.94", hatch="" if page else "////", ec="0.6"))
        for page, owners in owners_of(pool).items():
            width = 0.86 / len(owners)
            for i, (slot, rows) in enumerate(sorted(owners)):
                corner = (page + i * width, 0)
                ax.add_patch(plt.Rectangle(corner, width, rows / PAGE_SIZE, facecolor=COLORS[slot], alpha=0.85))
        for slot, (row, length) in enumerate(zip(pool.block_table.tolist(), pool.kv_lens.tolist(), strict=True)):
            pages = " ".join(f"{p:2d}" for p in row[: -(-length // PAGE_SIZE)])
            line = f"{'ABC'[slot]} {length:4d} tokens: {pages or '–'}"
            ax.text(NUM_PAGES + 0.2, 0.78 - 0.34 * slot, line, color=COLORS[slot], family="monospace", fontsize=9)
        ax.set(xlim=(0, NUM_PAGES + 5.2), ylim=(0, 1.02), yticks=[0, 1], yticklabels=["0", PAGE_SIZE])
        ax.set_title(f"{title}  (free: {int(pool.num_free)})", fontsize=9.5)
        ax.spines[:].set_visible(False)
    ax.set_xticks(np.arange(NUM_PAGES) + 0.43, range(NUM_PAGES))
    ax.set_xlabel("page (height: tokens used; two colours: shared)", x=0.36)
    fig.supylabel("tokens", fontsize=9.5)
    plt.show()


# %% [markdown]
# ## Growth
#
# `extend` takes the length that each slot shall have and hands out pages. Pages of a request need not be neighbours.
# A request that the pool cannot serve is refused (`ok` is False) and left as it was; those that need least come first,
# so it starves nobody.


# %%
def lens(*tokens):
    """A length per slot, as `extend` and `truncate` take them."""
    return jnp.array(tokens, jnp.int32)


pool = PagePool.create(NUM_PAGES, SLOTS, max_pages_per_seq=12)
history = [("empty; page 0 belongs to nobody: padding is written there", pool)]
pool, ok = pool.extend(lens(130, 70, 0))
history.append(("A and B arrive", pool))
pool, ok = pool.extend(lens(200, 190, 0))
history.append(("both grow", pool))
pool, ok = pool.extend(lens(260, 600, 0))
history.append((f"A asks for 260 tokens, B for 600: ok = {ok[:2].tolist()}", pool))
draw(history)

# %% [markdown]
# ## Fork and rollback
#
# `fork` lets a new request begin with the first tokens of another: full pages get a second owner, the partial last one
# a copy. `truncate` is how rejected draft tokens disappear: lengths shrink, pages past them return, no byte moves.

# %%
before_fork = pool
pool, forked = pool.fork(src=0, dst=2, length=150)
after_fork = pool
history = [("C begins with the first 150 tokens of A", pool)]
pool, ok = pool.extend(lens(330, 190, 210))
history.append(("C goes on by itself to 210; A drafts up to 330", pool))
pool = pool.truncate(lens(262, 190, 210))
history.append(("A keeps 262 of them", pool))
grown = pool
pool = pool.release(jnp.array([True, False, False]))
history.append(("A leaves; what C shares stays", pool))
draw(history)
print("every page owned as counted:", pool.check())

# %% [markdown]
# ## The same, with latents in the pages
#
# A and B write, C forks A and writes 60 tokens of its own. Then every row that nobody owns is filled with NaN, and
# all three attend. For comparison each request also lies in pages of its own, one after the other.


# %%
def random_latents(seed, tokens):
    """[1, tokens, 576]"""
    return jax.random.normal(jax.random.key(seed), (1, tokens, LATENT_DIM))


def write(cache, pool, slot, start, latents):
    """Rows start … of one slot."""
    positions = start + jnp.arange(latents.shape[1], dtype=jnp.int32)[None]
    return cache.write(0, pool.block_table[slot : slot + 1], positions, latents)


a, b, own = random_latents(0, 262), random_latents(1, 190), random_latents(2, 60)
cache = PagedKVCache.create(1, NUM_PAGES, LATENT_DIM, "fp32")
cache = write(write(cache, before_fork, 0, 0, a[:, :260]), before_fork, 1, 0, b)
cache = cache.fork(after_fork, 0, 2, 150, forked)  # copies the partial page
cache = write(write(cache, grown, 2, 150, own), grown, 0, 260, a[:, 260:])

used = np.zeros((NUM_PAGES, PAGE_SIZE), bool)
for page, owners in owners_of(grown).items():
    used[page, : max(rows for _, rows in owners)] = True
poisoned = replace(cache, layers=(jnp.where(used[..., None], cache.layers[0], jnp.nan),))

q = jax.random.normal(jax.random.key(3), (SLOTS, 1, 16, LATENT_DIM))
out, _ = mla_decode(q, poisoned.layers[0], grown.block_table, grown.kv_lens)

alone = PagedKVCache.create(1, 1 + SLOTS * 5, LATENT_DIM, "fp32")
table = 1 + jnp.arange(SLOTS * 5, dtype=jnp.int32).reshape(SLOTS, 5)
contents = (a, b, jnp.concatenate([a[:, :150], own], axis=1))
for slot, latents in enumerate(contents):
    positions = jnp.arange(latents.shape[1], dtype=jnp.int32)[None]
    alone = alone.write(0, table[slot : slot + 1], positions, latents)
expected, _ = mla_decode(q, alone.layers[0], table, grown.kv_lens)

print(f"{(~used).sum()} of {used.size} rows hold NaN; largest |difference| {jnp.abs(out - expected).max():.1e}")
print(f"tokens held: {sum(x.shape[1] for x in contents)}; rows in use: {used.sum()}, since A and C share two pages")

# %% [markdown]
# A decode step does all of this without the host: `extend`, `mla_decode` and `truncate` are traced into one function,
# and a table entry is just a number that a kernel reads.
