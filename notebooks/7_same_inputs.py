# %% [markdown]
# # The same inputs through everything
#
# One problem, many programs: the reference and the chunked XLA loop of this package, its Pallas kernel, FlashMLA's CUDA
# kernels, attention in plain PyTorch, and whole layers in transformers. `python -m mla_jax check` runs them all
# against float64 NumPy. What cannot run on a machine is skipped and says why, so this notebook shows what a CPU can,
# and then what the same command found on an H200.

# %%
import json
import warnings
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from mla_jax.check.compare import NAMES, compare
from mla_jax.check.layers import compare_layers
from mla_jax.check.problems import problems

warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, which transformers imports
quick = problems(quick=True)
for problem in quick:
    call = problem.call()
    print(f"{problem.name:<32} q {call['q'].dtype.name}{list(call['q'].shape)}, lengths {list(problem.lens)}")

# %% [markdown]
# Lengths sit around the page size of 64; some requests are empty. A problem's cache is NaN wherever no request has a
# token, its pages lie in random order, and the block table ends in garbage: an implementation that reads past its
# input gets found out.

# %%
call = quick[1].call()
print("block table\n", call["block_table"])
cache = np.asarray(call["kv_cache"], np.float32)
print(f"{np.isnan(cache[..., 0]).mean():.0%} of the cache's rows are NaN")

# %% [markdown]
# ## On this machine

# %%
rows = [row for problem in quick for row in compare(problem, NAMES)]
rows += compare_layers(3, NAMES, kinds=("fp32",))  # two layers of a random DeepSeek-V3 that transformers made and ran
for name in NAMES:
    counts = Counter(row.status for row in rows if row.implementation == name)
    found = ", ".join(f"{n} {status}" for status, n in counts.items())
    print(f"{name:<14}{found or 'gives the answer for whole layers'}")
print("\nskipped because")
for name, reason in sorted({(row.implementation, row.reason) for row in rows if row.status == "skip"}):
    print(f"  {name}: {reason}")


# %%
COLORS = {"reference": "C7", "xla": "C2", "mosaic_gpu": "C0", "flash_mla": "C1", "torch": "C3"}


def draw(ax, rows):
    """Relative RMS error of each row that ran, a line per problem."""
    cases = list(dict.fromkeys(row["case"] for row in rows if row["relative_rms"] is not None))[::-1]
    for y, case in enumerate(cases):
        of_case = [row for row in rows if row["case"] == case and row["relative_rms"] is not None]
        for row in of_case:
            below = 0.3 * (list(COLORS).index(row["implementation"]) % 3 - 1)  # equal errors lie side by side
            ax.plot(row["relative_rms"], y - below, "o", color=COLORS[row["implementation"]], markersize=5)
    ax.set_yticks(range(len(cases)), cases)
    ax.tick_params(axis="y", labelsize=8)
    ax.set(xscale="log", xlim=(1e-8, 1e-1), ylim=(-0.7, len(cases) - 0.3))
    ax.set_xlabel("error of the output (RMS, relative to the output)")
    ax.grid(axis="y", color="0.92")
    shown = dict.fromkeys(row["implementation"] for row in rows if row["relative_rms"] is not None)
    handles = [plt.Line2D([], [], color=COLORS[n], marker="o", linestyle="", label=n) for n in COLORS if n in shown]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=len(handles))


fig, ax = plt.subplots(figsize=(9, 4))
draw(ax, [{"case": r.case, "implementation": r.implementation, "relative_rms": r.relative_rms} for r in rows])
plt.show()

# %% [markdown]
# Outputs are rounded to the queries' dtype (to bf16 for queries in FP8), which costs bf16 about one part in a thousand
# and fp16 an eighth of that; PyTorch computes in float32 here and returns it. The layers are compared by their logits,
# in float32, and transformers' are the answer.
#
# ## On an H200
#
# The committed result of the same command there, with FlashMLA: each dot is one of the problems above or of the longer
# list, which has 1 to 128 heads and batches of 128.

# %%
check = json.loads(Path("../tests/gpu/results/2026-11-30-flash-mla-check.json").read_text())
print(f"{check['device']}, {check['date'][:10]}: {check['command']}")
print(f"{check['pass']} pass, {check['fail']} fail, {check['skip']} skip")
for name, reason in sorted({(row["implementation"], row["reason"]) for row in check["rows"] if row["reason"]}):
    print(f"  {name}: {reason}")

# %%
ran = [row for row in check["rows"] if row["status"] != "skip"]
groups = {}
for row in ran:
    layers = "layers" in row["case"]
    groups.setdefault(("layers, " if layers else "") + row["case"].split()[0], []).append(row)
fig, ax = plt.subplots(figsize=(9, 3.2))
names = [n for n in COLORS if any(row["implementation"] == n for row in ran)]
rng = np.random.default_rng(0)
for y, members in enumerate(groups[group] for group in sorted(groups, reverse=True)):
    for i, name in enumerate(names):
        errors = [row["relative_rms"] for row in members if row["implementation"] == name]
        height = y + 0.22 * (i - (len(names) - 1) / 2) + rng.uniform(-0.07, 0.07, len(errors))
        ax.plot(errors, height, "o", color=COLORS[name], alpha=0.5, markersize=4, markeredgewidth=0)
ax.set_yticks(range(len(groups)), sorted(groups, reverse=True))
ax.set(xscale="log", xlim=(1e-8, 1e-1), xlabel="error of the output (RMS, relative to the output)", ylabel="cache")
handles = [plt.Line2D([], [], color=COLORS[n], marker="o", linestyle="", label=n) for n in names]
ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(names))
plt.show()

# %% [markdown]
# FlashMLA's dense FP8 kernel stands apart: it rounds the softmax weights to e4m3 too, to multiply in FP8. Everything
# else differs by the rounding of its output.
