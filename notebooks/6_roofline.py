# %% [markdown]
# # Which limit a decode step meets
#
# A decode kernel reads latents and multiplies. How many products it makes with each byte, its **arithmetic
# intensity**, follows from two numbers alone: how many heads share a row, and how many new tokens ask at once. Below
# some intensity the memory sets the pace, above it the arithmetic. Where the measured kernels lie is drawn from the
# results in `mla_jax/bench/results`, all of an H200; this notebook itself needs no GPU.

# %%
import json
from importlib import resources

import matplotlib.pyplot as plt
import numpy as np

from mla_jax import FORMATS
from mla_jax.bench.cases import DIM, LATENT, Case

folder = resources.files("mla_jax.bench") / "results"
reports = sorted(
    (json.loads(path.read_text()) | {"file": path.name} for path in folder.iterdir() if path.name.endswith(".json")),
    key=lambda report: report["date"],
)
newest = {}  # of each case
for report in reports:
    for row in report["rows"]:
        if "us" in row and report["device"] == "NVIDIA H200":
            newest[row["case"]] = row | {"file": report["file"]}
cases = {name: Case.parse(name) for name in sorted(newest)}
print(f"{len(cases)} cases, from:", *sorted({row["file"] for row in newest.values()}), sep="\n  ")

# %% [markdown]
# ## Intensity
#
# A query row and a key make $2 \cdot 576$ FLOP of score and $2 \cdot 512$ of value. Every row of the cache serves all
# $h$ heads and all $s_q$ new tokens, so
#
# $$\text{intensity} = \frac{2\, h\, s_q\, (576 + 512)}{\text{bytes of a row}}$$
#
# with 1152 bytes in bf16. The limits of the machine are those that the same runs measured, so they are in the rows:
# what a kernel reached, divided by its share of the limit.

# %%
ROWS = {name: kv_format.bytes_per_token(DIM) for name, kv_format in FORMATS.items()}  # bytes


def intensity(heads, tokens, kv_format="bf16"):
    """FLOP per byte of the cache."""
    return 2 * heads * tokens * (DIM + LATENT) / ROWS[kv_format]


def limits(rows):
    """TFLOP/s and GB/s of the machine: the largest that a row implies, since a row knows the one that binds it."""
    shares = [row["percent_of_limit"] / 100 for row in rows]
    peaks = [row["tflops"] / share for row, share in zip(rows, shares, strict=True)]
    reads = [row["gbps"] / share for row, share in zip(rows, shares, strict=True)]
    return max(peaks), max(reads)


# Products in e4m3, with queries in e4m3, have a roof of their own, nearly twice as high.
of_bytes = {size: [n for n in cases if cases[n].query_dtype.itemsize == size] for size in (2, 1)}  # of a query's number
roofs = {size: limits([newest[n] for n in names]) for size, names in of_bytes.items() if names}
peak, read = roofs[2]
ridges = {size: 1e3 * peak / read for size, (peak, read) in roofs.items()}
ridge = ridges[2]
print(f"{peak:.0f} TFLOP/s of matrix products, {read:.0f} GB/s of reads: they meet at {ridge:.0f} FLOP per byte")
if 1 in roofs:
    print(f"in e4m3 {roofs[1][0]:.0f} TFLOP/s, and {ridges[1]:.0f} FLOP per byte")
print(f"bf16 passes that at {ridge / intensity(1, 1):.0f} query rows (heads × new tokens)\n")
print("FLOP per byte   " + "".join(f"{f'h = {h}':>10}" for h in (16, 64, 128)))
for kv_format in ("bf16", "fp8_ds_mla", "fp8_e4m3"):
    for tokens in (1, 2, 4):
        values = [intensity(h, tokens, kv_format) for h in (16, 64, 128)]
        cells = "".join(f"{f'{v:.0f} ' + ('A' if v > ridge else 'M'):>10}" for v in values)
        print(f"{kv_format:<11}s_q={tokens}" + cells)
print("\nM: memory binds, A: arithmetic binds, with products in 16 bits")

# %% [markdown]
# ## The roofline
#
# Each case as a pair: our kernel filled, FlashMLA in the same run hollow. Columns of the same intensity are the same
# $h$ and $s_q$; within a column, a longer context or more requests lie higher, because filling the GPU and merging the
# pieces weigh less. Beside `fp8_ds_mla` stands FlashMLA's bf16 kernel over the same tokens in bf16, since its dense
# kernels do not read that format; it is drawn at our intensity.

# %%
COLORS = {16: "C2", 32: "C6", 64: "C1", 128: "C0"}
MARKS = {1: "o", 2: "s", 4: "^"}


def at(case):
    """FLOP per byte of a case."""
    return case.flops / case.read_bytes


fig, ax = plt.subplots(figsize=(9.5, 5))
x = np.geomspace(12, 2400, 200)
ax.plot(x, np.minimum(peak, x * read / 1e3), color="0.3", linewidth=1.5)
ax.text(15, 15 * read / 1e3 * 1.12, f"{read:.0f} GB/s", rotation=33, fontsize=8.5, va="bottom")
ax.text(2300, peak * 1.04, f"{peak:.0f} TFLOP/s", ha="right", fontsize=8.5)
ax.axvline(ridge, color="0.8", linewidth=1, zorder=0)
if 1 in roofs:
    ax.plot(x[x > ridge], np.minimum(roofs[1][0], x[x > ridge] * roofs[1][1] / 1e3), "--", color="0.6", linewidth=1)
    ax.text(2300, roofs[1][0] * 1.04, f"{roofs[1][0]:.0f} TFLOP/s in e4m3", ha="right", fontsize=8.5)
for name, row in newest.items():
    case = cases[name]
    color, mark = COLORS.get(case.heads, "C7"), MARKS.get(case.tokens, "D")
    if "peer_us" in row:
        theirs = row["tflops"] * row["us"] / row["peer_us"]
        ax.plot([at(case)] * 2, [row["tflops"], theirs], color=color, linewidth=0.8, zorder=1)
        ax.plot(at(case), theirs, mark, markerfacecolor="white", markeredgecolor=color, markersize=8, zorder=2)
    edge = "black" if case.format.startswith("fp8") else color
    ax.plot(at(case), row["tflops"], mark, color=color, markeredgecolor=edge, markersize=6, zorder=3)
handles = [plt.Line2D([], [], color=c, marker="o", linestyle="", label=f"h = {h}") for h, c in COLORS.items()]
handles += [
    plt.Line2D([], [], color="0.4", marker=m, linestyle="", label=rf"$s_q$ = {tokens}") for tokens, m in MARKS.items()
]
handles += [
    plt.Line2D([], [], color="0.4", marker="o", linestyle="", label="mla_jax"),
    plt.Line2D([], [], color="0.4", marker="o", markerfacecolor="white", linestyle="", label="FlashMLA"),
]
if any(case.format.startswith("fp8") for case in cases.values()):
    style = {"marker": "o", "markeredgecolor": "black", "linestyle": ""}
    handles.append(plt.Line2D([], [], color="0.6", label="FP8 cache", **style))
ax.legend(handles=handles, ncols=3, loc="lower right")
ax.set(xscale="log", yscale="log", xlim=(12, 2400), ylim=(5, 2200))
ax.set(xlabel="arithmetic intensity (FLOP per byte of the cache)", ylabel="speed (TFLOP/s)")
ax.set_xticks([15, 30, 60, 120, 240, 480, 960, 1920], ["15", "30", "60", "120", "240", "480", "960", "1920"])
ax.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1000"])
ax.minorticks_off()
of_bf16 = intensity(1, 1)
top = ax.secondary_xaxis("top", functions=(lambda x: x / of_bf16, lambda rows: rows * of_bf16))
top.set_xlabel(r"query rows $h \cdot s_q$ that give it with a cache in bf16")
top.set_xticks([8, 16, 32, 64, 128, 256, 512, 1024], ["8", "16", "32", "64", "128", "256", "512", "1024"])
top.minorticks_off()
plt.show()

# %% [markdown]
# ## How near the roof
#
# The same as a share of the limit that binds. Few requests with a short context leave most of the GPU with little to
# do, whatever the kernel.

# %%
order = sorted(cases, key=lambda name: (cases[name].format, at(cases[name]), cases[name].read_bytes), reverse=True)
fig, ax = plt.subplots(figsize=(9.5, 1 + 0.3 * len(order)))
for y, name in enumerate(order):
    row, case = newest[name], cases[name]
    ours = row["percent_of_limit"]
    ax.barh(y, ours, height=0.66, color=COLORS.get(case.heads, "C7"))
    note = f"{row['us']:.4g} µs"
    if "peer_us" in row:
        theirs = ours * row["us"] / row["peer_us"]
        ax.plot([theirs] * 2, [y - 0.42, y + 0.42], color="black", linewidth=1.6)
        note += f", {row['ratio']:.2f} ×"
    ax.text(max(ours, 0 if "peer_us" not in row else theirs) + 1, y, note, va="center", fontsize=8)
ax.axvline(100, color="0.8", linewidth=1, zorder=0)
binds = {n: "arithmetic" if at(cases[n]) > ridges[cases[n].query_dtype.itemsize] else "memory" for n in order}
ax.set_yticks(range(len(order)), [f"{n}  ({binds[n]})" for n in order])
ax.tick_params(axis="y", labelsize=8)
ax.set(
    xlabel="share of the limit (%), time, speed relative to FlashMLA's (black line)",
    xlim=(0, 110),
    ylim=(-0.6, len(order) - 0.4),
)
ax.set_xticks(range(0, 101, 20))
plt.show()

# %%
with_peer = {name: row for name, row in newest.items() if "ratio" in row}
slower = sorted((row["ratio"], name) for name, row in with_peer.items() if row["ratio"] < 1)
print(f"{len(with_peer)} cases beside FlashMLA: faster or equal in {len(with_peer) - len(slower)}, slower in:")
print("\n".join(f"  {name}: {ratio:.3f} of its speed" for ratio, name in slower) or "  none")

# %% [markdown]
# This is why multi-token prediction is nearly free with 16 heads per GPU (memory binds; more query rows read the same
# bytes) and not with 128 (arithmetic binds already), and why an FP8 cache helps memory-bound cases first: half the
# bytes. With many query rows it helps only as far as a kernel's products take bytes, too: those of the scores do with
# queries in e4m3, those with the values do not. With queries in bf16 over `fp8_ds_mla` neither do, and turning bytes
# into 16 bits comes on top, which shows with 128 heads.
