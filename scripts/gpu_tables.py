"""README.md's tables of steps, drafts, FP8 caches and FlashMLA calls, from results of a GPU."""

from typing import Any

from scripts.results import CPU, GPU, grouped, is_measured, microseconds, newest, table

DRAFTS = {"off": "none", "1-1-2": "chain 1-1-2", "3-1-4": "chain 3-1-4", "3-4-8": "tree 3-4-8"}
E4M3_QUERIES = "fp8_e4m3+q"  # what end_to_end.py calls an FP8 cache under queries in e4m3
STACKS = {(16, 8): "16 (an 8-way split), 8", (16, 32): "16, 32", (128, 32): "128, 32"}  # heads, requests


def step() -> str:
    """A decode step of the demo model with and without capture, and why there are several steps in a call."""
    file, capture = newest(GPU, "capture")
    first = capture["runs"][0]
    runs = ((r for r in run["rows"] if r.get("implementation") == "mosaic_gpu") for run in capture["runs"])
    on, off = ({row["batch"]: row for row in rows} for rows in runs)
    drafts_file, rows = _draft_rows("demo")
    one, eight = (f"{rows[16, b, 'off']['wall_us']:.0f}" for b in (1, 8))
    compile_file, compiled = newest(GPU, "compile-27-layers")
    anew, again = (sum(run["rows"][0][k] for k in ("lower_s", "compile_s")) for run in compiled["runs"])
    lines = (
        ("one step per call, capture off", *(f"{off[b]['wall_us']:.0f}" for b in (1, 8, 64))),
        ("one step per call", *(f"{on[b]['wall_us']:.0f}" for b in (1, 8, 64))),
        ("sum of its kernels' times", *(f"{on[b]['device_us']:.0f}" for b in (1, 8, 64))),
    )
    return (
        table(("µs per step", "1 request", "8", "64"), lines)
        + f"\n\n[Results]({file}): {first['device']}, jax {first['jax']}, {first['date'][:10]}; "
        f"`python {_with_a_file(first['command'])}`.\n\n"
        "Kernels' times are from a profiled run of its own, in which each takes a little longer: with many requests "
        "their sum passes the step. What is left above it with few is the host's, which has to start every step. So "
        f"`Engine` runs 8 steps per call on a GPU: {one} µs per step for one request, {eight} for 8 "
        f"([results]({drafts_file}), rows without drafts). A step of 27 layers of DeepSeek-V3's attention "
        f"compiles in {anew:.0f} s, and in {again:.0f} s when XLA's persistent cache has it "
        f"([results]({compile_file}))."
    )


def drafts() -> str:
    """What drafting is worth to the demo model."""
    file, rows = _draft_rows("demo")
    accept_file, accepted = _accepted()
    lines = []
    for draft, name in DRAFTS.items():
        means = (f"{accepted[draft, t]:.2f}" if draft != "off" else "1" for t in (0.0, 1.0))
        times = (f"{rows[16, b, draft]['wall_us']:.0f}" for b in (1, 8, 32))
        lines.append((name, *means, *times, *(grouped(_speed(rows, accepted, 16, b, draft)) for b in (1, 8, 32))))
    head = (
        "draft (steps-topk-tokens)",
        "tokens per step, greedy",
        "temperature 1",
        "µs per step, 1 request",
        "8",
        "32",
    )
    return (
        table((*head, "greedy tokens/s, 1 request", "8", "32"), lines)
        + f"\n\nTokens per step: [results]({accept_file}), `make bench-drafts`. Times: [results]({file}), an H200, "
        "8 steps per call, bf16, 400 tokens in the cache, all zeros, `OUT=FOLDER bash tests/gpu/mtp_table.sh`, "
        "2026-11-30. Tokens/s follow from both."
    )


def stack() -> str:
    """What drafting is worth to a stack of DeepSeek-V3's attention."""
    file, rows = _draft_rows("v3")
    _, accepted = _accepted()
    lines = []
    for (heads, batch), label in STACKS.items():
        plain = _speed(rows, accepted, heads, batch, "off")
        cells = [grouped(plain)]
        for draft in list(DRAFTS)[1:]:
            if (heads, batch, draft) not in rows:
                cells.append("")
                continue
            speed = _speed(rows, accepted, heads, batch, draft)
            cells.append(f"{grouped(speed)} ({100 * (speed / plain - 1):+.0f} %)")
        lines.append((label, *cells))
    head = ("heads, requests", "plain, tokens/s", *list(DRAFTS.values())[1:])
    return table(head, lines) + (
        f"\n\n[Results]({file}) of the same command, with the tokens per step above and latents of zeros in the cache, "
        "which take less power than the random ones below, and so less time."
    )


def end_to_end() -> str:
    """What drafts and FP8 caches are worth together; nothing before that was measured."""
    if not is_measured(GPU, "end-to-end"):
        return ""
    file, report = newest(GPU, "end-to-end")
    rows = {(r["heads"], r["batch"], r["mtp"], r["kv_format"]): r for r in report["rows"] if "gain" in r}
    ways = list(dict.fromkeys(key[2:] for key in rows))
    lines = []
    for heads, batch in dict.fromkeys(key[:2] for key in rows):
        cells = (_step_cell(rows.get((heads, batch, *way))) for way in ways)
        lines.append((f"{heads}, {batch}", *cells))
    one_size = {way: next(r["cache_against_plain"] for key, r in rows.items() if key[2:] == way) for way in ways}
    lines.append(("cache, relative", *(f"{one_size[way]:.2f}" for way in ways)))
    head = (kv_format if draft == "off" else f"{DRAFTS[draft]}, {kv_format}" for draft, kv_format in ways)
    rounded = any(kv_format == E4M3_QUERIES for _, kv_format in ways)
    queries = f"in bf16, or in e4m3 under `{E4M3_QUERIES}`" if rounded else "in bf16"
    return (
        "Drafts and FP8 caches together, in such a stack with random latents in its cache and the model's own queries "
        f"{queries}. µs per step, tokens/s as above, and how much more than with {ways[0][1]} and no drafts:\n\n"
        + table(("heads, requests", *head), lines)
        + f"\n\n{_fp8_steps(rows)}"
        + f"\n\n[Results]({file}), also for drafts whose tokens are each right with a given probability: "
        f"{_made(report)}."
    )


def _fp8_steps(rows: dict[tuple[int, int, str, str], dict[str, Any]]) -> str:
    """Where an FP8 cache makes a step faster than bf16 with the same draft, with queries in bf16 and in e4m3."""
    if not any(key[3] == E4M3_QUERIES for key in rows):
        return f"So with queries in bf16 the FP8 cache is for its size: it {_gain(rows, 'fp8_e4m3')}."
    parts = [f"With queries in e4m3 (`--fp8-queries`) an FP8 cache {_gain(rows, E4M3_QUERIES)}."]
    if any(key[3] == "fp8_e4m3" for key in rows):
        parts.append(f"With queries in bf16 it {_gain(rows, 'fp8_e4m3')}.")
    return " ".join(parts)


def _gain(rows: dict[tuple[int, int, str, str], dict[str, Any]], format_name: str) -> str:
    """In how many cases this format is faster than bf16 with the same draft, and by how much."""
    times = {}
    for (heads, batch, draft, kv_format), row in rows.items():
        if kv_format == format_name and (base := rows.get((heads, batch, draft, "bf16"))):
            times[heads, batch, draft] = row["wall_us"] / base["wall_us"] - 1
    faster = [
        f"{heads} heads, {batch} requests {'without drafts' if draft == 'off' else f'and {DRAFTS[draft]}'}"
        for (heads, batch, draft), more in times.items()
        if more < 0
    ]
    least, most = min(times.values()), max(times.values())
    named = f" ({'; '.join(faster)})" if 0 < len(faster) < len(times) else ""
    return (
        f"makes a step faster in {len(faster)} of {len(times)} cases{named}, and changes its time by "
        f"{100 * least:+.0f} to {100 * most:+.0f} %"
    )


def _step_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    gain = f" ({100 * row['gain']['measured']:+.0f} %)" if row["gain"]["measured"] else ""
    return f"{grouped(row['wall_us'])} µs, {grouped(row['tokens_per_second']['measured'])}{gain}"


def query_steps() -> str:
    """What e4m3 queries are worth to steps over an FP8 cache; nothing before that was measured."""
    if not is_measured(GPU, "end-to-end"):
        return ""
    file, report = newest(GPU, "end-to-end")
    plain = [row for row in report["rows"] if row["mtp"] == "off"]
    most = max(row["batch"] for row in plain)
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in (row for row in plain if row["batch"] == most):
        times.setdefault((row["heads"], row["batch"]), {})[row["kv_format"]] = row["wall_us"]
    parts = [
        f"{grouped(by['bf16'])} µs for {batch} requests and {heads} heads with a cache in bf16, "
        f"{grouped(by['fp8_e4m3'])} in `fp8_e4m3`, {grouped(by[E4M3_QUERIES])} with `--fp8-queries`"
        for (heads, batch), by in times.items()
        if E4M3_QUERIES in by
    ]
    first = plain[0]
    return (
        f"A step of {first['layers']} layers of DeepSeek-V3's attention, {first['context']} tokens in the cache, "
        f"without drafts: {'; '.join(parts)} ([results]({file}): {_made(report)})."
    )


def gpu_bits() -> str:
    """What caches and kernels cost the demo model on a GPU; nothing before that was measured."""
    if not is_measured(GPU, "bits-per-byte"):
        return ""
    file, report = newest(GPU, "bits-per-byte")
    rows = {(r["cache"], r["tokens_per_step"], r["implementation"]): r for r in report["rows"] if "excess" in r}
    ways = list(dict.fromkeys(key[1:] for key in rows))
    lines = []
    for cache in dict.fromkeys(key[0] for key in rows):
        found = (rows.get((cache, *way)) for way in ways)
        lines.append((cache.replace(",", ", ").replace("_queries", " queries"), *map(_bits_cell, found)))
    head = (f"`{name}`, {tokens} {'token' if tokens == 1 else 'tokens'} a step" for tokens, name in ways)
    return (
        "Bits per byte of the demo model on a GPU, weights in bf16, and how far they lie from those of the first row "
        "by `xla` with as many tokens a step:\n\n"
        + table(("cache", *head), lines)
        + f"\n\n[Results]({file}): {_made(report)}."
    )


def _bits_cell(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['bits_per_byte']:.4f} ({100 * row['excess']:+.3f} %)"


def flash_mla() -> str:
    """A layer of 24 that calls FlashMLA, in four ways, and what repetition found."""
    file, (captured, bare) = newest(GPU, "flash-mla-overhead")
    lines = []
    for name, times in captured["result"].items():
        shape = ", ".join(part.lstrip("bh") for part in name.split())
        ways = (times["captured"], times["torch graph"], bare["result"][name]["not captured"], times["torch"])
        lines.append((shape, *map(microseconds, ways)))
    head = ("requests, heads, cached tokens", "captured by XLA", "a CUDA graph of torch's", "not captured")
    outside = [times["outside jit"] / 1e3 for times in captured["result"].values()]
    versions = ", ".join(f"{name} {captured['versions'][name]}" for name in ("jax", "torch", "sgl-flash-mla"))
    return (
        table((*head, "torch, no graph"), lines)
        + f"\n\n[Results]({file}): µs per layer, {captured['device']}, {versions}, {captured['date'][:10]}; "
        "`tests/gpu/flash_mla.sh`.\n\n"
        f"Outside jit a call takes {min(outside):.1f} to {max(outside):.1f} ms. {_replayed()} {_handed_over()}"
    )


def checked() -> str:
    """How often FlashMLA's calls and the kernels were tested on a GPU."""
    file, report = newest(GPU, "flash-mla-check")
    tests_file, tests = newest(GPU, "flash-mla-tests")
    command = report["command"].split(" --json")[0]
    kernels_file, kernels = newest(GPU, "mosaic-gpu-tests")
    last = kernels["runs"][-1]
    rest = f", {last['not_run']} were not run" if last.get("not_run") else ""
    return (
        f"On an {report['device']}, FlashMLA's own outputs come back bit for bit; {tests['passed']} tests of its calls "
        f"pass and {tests['failed']} fail ([results]({tests_file}), {tests['date'][:10]}). {last['passed']} tests of "
        f"`mosaic_gpu` pass there, FlashMLA's grid of shapes among them, and {last['failed']} fail{rest} "
        f"([results]({kernels_file}), {kernels['date']}). Of `{command}` "
        f"{report['pass']} rows pass, {report['fail']} fail, and {report['skip']} are skipped, each with its reason "
        f"([results]({file}), {report['date'][:10]})."
    )


def _replayed() -> str:
    file, (run,) = newest(GPU, "flash-mla-replay")
    result = run["result"]
    outside = result["callback_runs_during"] - result["of_these_captured"]
    return (
        f"In {result['rounds']} replays of {result['layers']} layers with changing inputs, while torch allocated and "
        f"freed, {result['wrong']} results were wrong and {outside} callbacks ran outside a capture "
        f"([results]({file}))."
    )


def _handed_over() -> str:
    file, (run,) = newest(GPU, "flash-mla-shared")
    result = run["result"]
    bad = sum(n for name, n in result.items() if name.startswith(("stale", "corrupted")))
    return (
        f"Of {result['rounds']} arrays handed over and dropped at once, in each direction, {bad} were stale or "
        f"overwritten ([results]({file}))."
    )


def _draft_rows(model: str) -> tuple[str, dict[tuple[int, int, str], dict[str, Any]]]:
    """The file, and its rows by heads, requests and draft."""
    file, report = newest(GPU, "drafts")
    return file, {(r["heads"], r["batch"], r["mtp"]): r for r in report["rows"] if r["model"] == model}


def _accepted() -> tuple[str, dict[tuple[str, float], float]]:
    """The file, and tokens per step of a sequence by draft and temperature."""
    file, report = newest(CPU, "accept-lengths")
    found = {(row["draft"], row["temperature"]): row["accept_length"] for row in report["rows"]}
    return file, found | {("off", t): 1.0 for t in (0.0, 1.0)}


def _speed(rows: Any, accepted: Any, heads: int, batch: int, draft: str) -> float:
    """Greedy tokens per second."""
    return batch * accepted[draft, 0.0] / rows[heads, batch, draft]["wall_us"] * 1e6


def _made(report: dict[str, Any]) -> str:
    """Where, when and how; a file that was merged from several runs has the command of each."""
    commands = [_with_a_file(run["command"]) for run in report.get("runs", [report])]
    how = " and ".join(f"`python {command}`" for command in commands)
    return f"{report['device']}, jax {report['jax']}, {report['date'][:10]}; {how}"


def _with_a_file(command: str) -> str:
    """With FILE in place of the file that the run wrote."""
    words = command.split()
    words[words.index("--json") + 1] = "FILE"
    return " ".join(words)
