"""README.md's tables and sentences from results of a CPU."""

from mla_jax import FORMATS, PAGE_SIZE, MLAConfig
from mla_jax.demo import CHECKPOINT
from scripts.results import CPU, newest, table

DIM = 576
MEMORY = 2**26  # bytes of the cache that is filled
CACHES = {
    "bf16": "`bf16`",
    "fp8_e4m3, scale 1": "`fp8_e4m3` (or `fp8`)",
    "fp8_e4m3, calibrated": "`fp8_e4m3`, calibrated",
    "fp8_e4m3, calibrated, e4m3 queries": "`fp8_e4m3`, calibrated, with `--fp8-queries`",
    "fp8_ds_mla": "`fp8_ds_mla`",
    "broken: scale on one side only": "broken on purpose: `fp8_e4m3` scaled on one side only",
    "broken: an outlier decides the scale": "broken on purpose: an outlier, 30,000 times the rest, decides the scale",
}


def fp8() -> str:
    """What FP8 caches hold and cost."""
    file, report = newest(CPU, "fp8-accuracy")
    rows = {row["cache"]: row for row in report["rows"]}
    layers = MLAConfig.from_hf(CHECKPOINT).num_layers
    lines = []
    for name, label in CACHES.items():
        held = ("", "")
        if not name.startswith("broken"):
            size = FORMATS[name.split(",")[0]].bytes_per_token(DIM)
            pages = MEMORY // (layers * PAGE_SIZE * size) - 1  # page 0 is reserved
            held = (str(size), f"{pages * PAGE_SIZE:,}")
        same = "" if name == "bf16" else f"{100 * rows[name]['top1_agreement']:.1f} %"
        lines.append((label, *held, f"{rows[name]['bits_per_byte']:.4f}", same))
    head = ("`--kv-format`", "bytes per token and layer", "tokens in 64 MiB", "bits per byte")
    return (
        table((*head, "same most likely byte as bf16"), lines)
        + f"\n\n[Results]({file}): demo model, its held-out sample, calibrated on the 12 KB of the play that follow "
        f"it; 2 CPU cores, jax {report['jax']}, {report['date'][:10]}; `make bench-cache`. The 64 MiB are "
        "filled by `tests/cache/test_fp8_pages.py`."
    )


def fp8_limit() -> str:
    """What FP8 changes, as a line of the limits."""
    _, report = newest(CPU, "fp8-accuracy")
    changed = {row["cache"]: f"{100 - 100 * row['top1_agreement']:.1f} %" for row in report["rows"]}
    return (
        f"- `fp8_e4m3` changes the most likely byte of the demo model in {changed['fp8_e4m3, scale 1']} of places, "
        f"`fp8_ds_mla` in {changed['fp8_ds_mla']}; take the latter where that matters."
    )


def demo_bits() -> str:
    """The demo model's score."""
    file, report = newest(CPU, "fp8-accuracy")
    (bits,) = (row["bits_per_byte"] for row in report["rows"] if row["cache"] == "bf16")
    return (
        f"On text it has not seen: {bits:.3f} bits per byte with the cache in bf16 (`python -m mla_jax evaluate`: "
        f"windows of 512 bytes, the last 256 scored; [results]({file}), {report['date'][:10]})."
    )


def cpu() -> str:
    """The chunked walk beside torch."""
    file, report = newest(CPU, "xla-against-sdpa")
    ours, peer = (report["ms"][name]["median"] for name in ("mla_jax xla", "torch SDPA"))
    return (
        f"On a CPU the chunked walk is {peer / ours:.1f} times as fast as torch's `scaled_dot_product_attention` with "
        f"heads as query rows over gathered pages (8 requests, 16 heads, 4096 tokens, float32: {ours:.1f} against "
        f"{peer:.1f} ms; `make bench-cpu`, {report['threads']} threads, jax {report['jax']}, torch {report['torch']}, "
        f"{report['date'][:10]}, [results]({file}))."
    )
