"""The benchmark's cases, arithmetic and report; its times are the machine's."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.__main__ import main
from mla_jax.bench.cases import CPU_CASES, GPU_CASES, Case, make_arrays
from mla_jax.bench.limits import Limits
from mla_jax.bench.run import flash_mla
from mla_jax.bench.timing import Program, measure

SMALL = "fp32_b2_h2_s1_1k~"


@pytest.mark.parametrize("name", [*GPU_CASES, *CPU_CASES])
def test_every_case_has_a_shape(name: str) -> None:
    case = Case.parse(name)
    assert case.name == name and min(case.lens) >= case.tokens
    assert case.flops == 2 * case.heads * case.tokens * sum(case.lens) * (576 + 512)


def test_names_say_what_is_run() -> None:
    ragged, fixed = Case.parse("fp8_ds_mla_b16_h64_s2_4k~"), Case.parse("fp8_b16_h64_s2_4k")
    assert (ragged.format, fixed.format) == ("fp8_ds_mla", "fp8_e4m3")
    assert (ragged.heads, ragged.tokens, len(ragged.lens)) == (64, 2, 16)
    assert set(fixed.lens) == {4096} and len(set(ragged.lens)) > 8
    assert ragged.read_bytes == 656 * sum(ragged.lens)
    assert ragged.query_dtype == jnp.bfloat16
    assert Case.parse("bf16_imbalanced_h16_s4").lens == (4641, 45118, 1730, 1696)
    assert Case.parse("bf16_b1_h16_s1_131k").lens == (131072,)


@pytest.mark.parametrize(
    "name", ["", "bf16", "bf16_b0_h1_s1_4k", "bf16_b1_h0_s1_4k", "bf16_b1_h1_s1", "int4_b1_h1_s1_4k"]
)
def test_what_is_no_case_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"no case|no heads|not known"):
        Case.parse(name)


def test_pages_are_shuffled_and_owned_once() -> None:
    case = Case.parse(SMALL)
    arrays = make_arrays(case, 2)
    pages = [t for row, n in zip(np.asarray(arrays.block_table), case.lens, strict=True) for t in row[: -(-n // 64)]]
    assert sorted(pages) == list(range(arrays.cache.shape[0])) and pages != sorted(pages)
    assert len(arrays.queries) == 2 and not np.array_equal(*arrays.queries)


def test_the_slope_leaves_out_what_starting_costs() -> None:
    clock = {"now": 0.0}

    def start(cost: float) -> Program:
        def run() -> None:
            clock["now"] += cost

        def wait(_: object) -> None:
            clock["now"] += 5.0  # starting and waiting, once for each burst

        return Program(run, wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mla_jax.bench.timing.time.perf_counter", lambda: clock["now"])
        times = measure({"a": start(2.0), "b": start(3.0)}, calls=4, rounds=3)
    assert times["a"].rounds == [0.5] * 3 and times["b"].median == 0.75
    assert times["b"].spread_us() == [750000.0, 750000.0]


def test_the_limit_is_what_binds() -> None:
    limits = Limits(read_gbps=100.0, copy_gbps=80.0, matmul_tflops=1.0)
    assert limits.seconds(2e12, 1e9) == 2.0
    assert limits.seconds(1e9, 1e12) == 10.0


def test_report_text_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["bench", SMALL, "fp8_b1_h2_s1_1k", "--rounds", "2"]
    assert main([*argv, "--json", "--output", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads((tmp_path / "rows.json").read_text())
    assert {"rows", "limits", "device", "versions", "date", "command"} <= set(report)
    for row in report["rows"]:
        assert (
            row["implementation"] == "xla" and row["us"] > 0 and row["spread_us"][0] <= row["us"] <= row["spread_us"][1]
        )
        assert row["gbps"] > 0 and row["tflops"] > 0 and row["percent_of_limit"] > 0 and "ratio" not in row
    assert (tmp_path / "rows.png").stat().st_size > 10_000


@pytest.mark.timeout(120)
def test_processes_and_a_case_that_fails(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_jax.cli.bench._check_case", lambda *args, **kwargs: None)
    assert main(["bench", SMALL, "fp8_b1_h2_s1_1k", "--rounds", "1", "--jobs", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["case"] for row in rows] == [SMALL, "fp8_b1_h2_s1_1k"] and all(row["us"] > 0 for row in rows)
    with pytest.raises(SystemExit):
        main(["bench", SMALL, "fp8_b1_h2_s1_1k", "--rounds", "1", "--implementation", "zz", "--json"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert all("not known" in row["failed"] for row in rows)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a machine without a GPU lacks")
def test_a_peer_that_cannot_run_says_why(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "bf16_b1_h2_s1_1k", "--against", "flash_mla", "--rounds", "1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("mla_jax bench: ") and message.count("\n") == 1
    case = Case.parse("fp32_b1_h2_s1_1k")
    with pytest.raises(NotImplementedError, match="no caches in fp32"):
        flash_mla(case, make_arrays(case, 1))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--rounds", "0", SMALL], "--rounds"),
        (["what"], "no case"),
        (["bf16_b1_h64_s1_99999999k"], "larger than any GPU"),
        (["bf16_b128_h64_s1_16000k"], "too much for this machine"),
        ([SMALL, "--implementation", "zz"], "'zz' is not known"),
        ([SMALL, "--rounds", "1", "--output", "/no/x"], "/no/x"),
        (["--jobs", "0", SMALL], "--jobs"),
        (["--settings", "slots=2", SMALL], "'slots' is no setting"),
        (["--settings", "held_back=left", SMALL], "no value for held_back"),
        (["--settings", 'left_slots="a"', SMALL], "left_slots is a whole number"),
        (["--settings", "left_slots=3.0", SMALL], "left_slots is a whole number"),
        (["--settings", "held_back=true", SMALL], "held_back is a whole number"),
        (["bf16_b1_h16_s1_0k"], "no case"),
        (["bf16_b1_h16_s1_" + "9" * 5000 + "k"], "no case"),
        (["--settings", "held_back=9", SMALL], "0, 1, 2 or 3"),
        (["--settings", "held_back=0", SMALL], "settings are for mosaic_gpu"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *argv]) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")
def test_a_killed_process_does_not_hold_up_the_others() -> None:
    """As the kernel does it when memory runs out: others may wait for the lock that it held."""
    command = [sys.executable, "-m", "mla_jax", "bench", SMALL, "fp32_b1_h2_s1_1k", "--jobs", "2", "--json"]
    with subprocess.Popen(
        [*command, "--rounds", "1000000"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as bench:
        give_up = time.monotonic() + 60
        while len(workers := _spawned_by(bench.pid)) < 2 and time.monotonic() < give_up:
            time.sleep(0.1)
        os.kill(workers[0], signal.SIGKILL)
        out, _ = bench.communicate(timeout=60)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert bench.returncode == 1 and len(rows) == 2 and any("ended" in row.get("failed", "") for row in rows)
    assert not _spawned_by(bench.pid)


def _spawned_by(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
