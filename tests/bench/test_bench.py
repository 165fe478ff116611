"""The benchmark's cases, arithmetic and report; its times are the machine's."""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.__main__ import main
from mla_jax.bench.cases import CPU_CASES, GPU_CASES, Case, in_groups, make_arrays
from mla_jax.bench.company import Company, _own_seconds
from mla_jax.bench.limits import Limits, factors, limit_programs
from mla_jax.bench.run import Ready, Wanted, flash_mla
from mla_jax.bench.share import Here
from mla_jax.bench.timing import Program, Times
from mla_jax.bench.turns import Results, run_cases, steps
from mla_jax.cli.bench import _text

SMALL = "fp32_b2_h2_s1_1k~"
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes in /proc")


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 64 MiB would be most of these tests."""
    monkeypatch.setattr("mla_jax.bench.limits._sizes", lambda: (2**20, 64))


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


def test_the_slope_leaves_out_what_starting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert clock.program(lambda: 2.0, calls=4).seconds() == 0.5
    assert clock.program(lambda: 3.0, calls=4).seconds() == 0.75
    assert Times([0.75, 0.5, 1.0]).spread_us() == [500000.0, 1000000.0] and Times([0.75, 0.5, 1.0]).us == 750000.0


def test_programs_of_a_case_come_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer, that always came behind our kernel, found a card that was slower by 2 %."""
    began: list[str] = []

    def program(name: str) -> Program:
        return types.SimpleNamespace(seconds=lambda: began.append(name) or 1.0)

    monkeypatch.setattr(
        "mla_jax.bench.share.prepare", lambda *_: (Ready("xla", {}), {name: program(name) for name in ("ours", "peer")})
    )
    share = Here(Wanted())
    share.begin({0: Case.parse("fp32_b1_h16_s1_1k")})
    list(share.ready())
    assert [list(share.round()[0]) for _ in range(4)] == [["ours", "peer"]] * 4
    assert began == ["ours", "peer", "peer", "ours"] * 2


def test_a_result_is_let_go_before_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    held: weakref.WeakSet[Result] = weakref.WeakSet()

    class Result:
        def __init__(self) -> None:
            assert not held
            held.add(self)

    monkeypatch.setattr("mla_jax.bench.timing.PAUSE", 0)
    Program(Result, lambda _: None).seconds()


def test_two_runs_on_a_machine_that_drifts_differ_by_less_than_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed swings by a third, slowly enough that all rounds of one case, taken at once, would look steady."""
    clock = Clock(monkeypatch)
    swing = 3000.0  # seconds

    def prepare(case: Case, wanted: Wanted) -> tuple[Ready, dict[str, Program]]:
        cost = case.heads / 16
        return Ready("xla", {}), {"ours": clock.program(lambda: cost * (1 + np.sin(2 * np.pi * clock.now / swing) / 3))}

    monkeypatch.setattr("mla_jax.bench.share.prepare", prepare)
    steady = {name: clock.program(lambda: 1.0) for name in ("read", "copy", "float32")}
    monkeypatch.setattr("mla_jax.bench.turns.limit_programs", lambda dtypes: steady)
    cases = [Case.parse(f"fp32_b1_h{heads}_s1_1k") for heads in (8, 16, 32, 64)]
    runs = []
    for _ in range(6):
        list(run_cases(results := Results(cases), Wanted(rounds=9), 1, budget=1e12))
        runs.append(results.rows())
        clock.now += swing / 5.3
    for row in (row for rows in runs for row in rows):
        assert row["rounds"] == 9 and row["spread_us"][1] > 1.5 * row["spread_us"][0]
    for before, after in itertools.pairwise(runs):
        for a, b in zip(before, after, strict=True):
            widths = (row["spread_us"][1] - row["spread_us"][0] for row in (a, b))
            assert abs(a["us"] - b["us"]) < min(widths)


class Clock:
    """A clock that only the programs move; starting them and waiting costs five seconds for each burst."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(
            "mla_jax.bench.timing.time", types.SimpleNamespace(perf_counter=lambda: self.now, sleep=abs)
        )

    def program(self, cost: Callable[[], float], calls: int = 1) -> Program:
        """Takes so many seconds, by what the clock says when it is started."""

        def start() -> None:
            self.now += cost()

        def wait(_: object) -> None:
            self.now += 5.0

        return Program(start, wait, calls)


def test_no_case_is_lost_when_memory_holds_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("bf16_b8_h16_s1_1k~", "fp32_b1_h16_s1_4k", "bf16_b1_h16_s1_1k", "fp8_b1_h16_s1_1k")
    cases = dict(enumerate(map(Case.parse, names)))
    assert all(case.read_bytes < case.held_bytes < 1.5 * case.read_bytes for case in cases.values())
    assert in_groups(cases, 1e12) == [cases] and in_groups(cases, 1.0) == [{at: cases[at]} for at in cases]
    assert [list(group) for group in in_groups(cases, 5 * cases[2].held_bytes)] == [[0], [1], [2, 3]]
    held: list[set[str]] = []

    def round_of(share: Here) -> dict[int, dict[str, float]]:
        held.append({case.name for case in share._cases.values()})
        return {at: {"ours": 1.0} for at in share._cases}

    monkeypatch.setattr("mla_jax.bench.share.prepare", lambda case, wanted: (Ready("xla", {}), {}))
    monkeypatch.setattr(Here, "round", round_of)
    monkeypatch.setattr("mla_jax.bench.turns.limit_programs", lambda dtypes: {"read": STILL, "copy": STILL} | PRODUCTS)
    results = Results(list(cases.values()))
    said = list(run_cases(results, Wanted(rounds=2), 1, budget=1.0))
    assert len(said) == steps(results.cases, 2, budget=1.0) == 4 + 2 * 4
    assert held == [{name} for name in names for _ in range(2)]
    assert [row["case"] for row in results.rows()] == list(names) and all(row["rounds"] == 2 for row in results.rows())


STILL = types.SimpleNamespace(warm_up=lambda: None, seconds=lambda: 1.0)  # a program that is not run
PRODUCTS = {name: STILL for name in ("bfloat16", "float32", "float8_e4m3fn")}


def test_the_limit_is_what_binds() -> None:
    case = Case.parse("bf16_b4_h128_s2_4k")
    products, reads = case.flops / 1e12, case.read_bytes / 1e9
    assert Limits(2.0 * reads, reads, {"bfloat16": products / 3}).seconds(case) == pytest.approx(3.0)
    assert Limits(2.0 * reads, reads, {"bfloat16": products * 3}).seconds(case) == pytest.approx(0.5)


def test_no_kernel_can_exceed_the_limit_of_an_fp8_case() -> None:
    """Which may multiply in e4m3; where that is slower, as on a CPU, 16 bits are the limit."""
    case = Case.parse("fp8_b4_h128_s2_4k")
    products = case.flops / 1e12
    assert factors(case) == ["bfloat16", "float8_e4m3fn"]
    assert factors(Case.parse("fp8_ds_mla_b4_h128_s2_4k")) == ["bfloat16"]
    for rates, seconds in (((1.0, 2.0), 0.5), ((1.0, 0.1), 1.0)):
        by_dtype = {name: rate * products for name, rate in zip(factors(case), rates, strict=True)}
        assert Limits(1e9, 1e9, by_dtype).seconds(case) == pytest.approx(seconds)


def test_limits_have_a_spread() -> None:
    rounds = Times([1.0, 0.5, 2.0])
    limits = Limits.of({"read": rounds, "copy": rounds, "bfloat16": rounds})
    assert limits.spread["read_gbps"] == pytest.approx([limits.read_gbps / 2, limits.read_gbps * 2], rel=1e-3)
    low, high = limits.spread["matmul_tflops"]["bfloat16"]
    assert low < limits.matmul_tflops["bfloat16"] < high
    assert set(limit_programs(["float8_e4m3fn", "bfloat16"])) == {"read", "copy", "bfloat16", "float8_e4m3fn"}


def test_report_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    argv = ["bench", SMALL, "fp8_b1_h2_s1_1k", "--rounds", "2"]
    assert main([*argv, "--json", "--output", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows")]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out.splitlines()[-1])
    assert report == json.loads((tmp_path / "rows.json").read_text())
    assert {"rows", "limits", "span_s", "device", "versions", "date", "command"} <= set(report)
    assert set(report["limits"]["matmul_tflops"]) == {"float32", "bfloat16", "float8_e4m3fn"}
    for row in report["rows"]:
        low, high = row["spread_us"]
        assert row["implementation"] == "xla" and row["us"] > 0 and low <= row["us"] <= high and row["rounds"] == 2
        assert row["gbps"] > 0 and row["tflops"] > 0 and row["percent_of_limit"] > 0 and "ratio" not in row
    assert (tmp_path / "rows.png").stat().st_size > 10_000 and f"Picture written to {tmp_path}/rows.png" in err
    assert f"{SMALL} is compiled\n" in err and "round 2 of 2\n" in err


def test_the_table_shows_every_spread() -> None:
    row = {"case": SMALL, "implementation": "xla", "us": 2.0, "spread_us": [1.1, 3.1], "tflops": 1.0, "gbps": 1.0}
    row |= {"percent_of_limit": 50.0, "peer": "flash_mla", "peer_us": 4.0, "peer_spread_us": [3.3, 5.5], "ratio": 2.0}
    row |= {"settings": [{"settings": "left_slots=2", "us": 6.0, "spread_us": [5.9, 6.1]}]}
    limits = Limits.of({name: Times([1.0, 2.0, 4.0]) for name in ("read", "copy", "bfloat16")})
    report = {"rows": [row], "limits": dataclasses.asdict(limits), "device": "cpu", "span_s": 12.0}
    report |= {"others_percent": 7.0}
    text = _text(report)
    lines = [f"{SMALL:<26}xla", "flash_mla .* 4.0 .* 3.3 … 5.5", "left_slots=2 .* 5.9 … 6.1", "reads .* … .* GB/s"]
    lines += ["multiplies bfloat16 .* … .* TFLOP/s", "over 12 s", "took 7 %"]
    assert all(re.search(line, text) for line in lines) and text.count("% of limit") == 1


def test_what_others_take_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_jax.bench.company.os.cpu_count", lambda: 4)
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("mla_jax.bench.company.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("mla_jax.bench.company._busy_seconds", iter([100.0, 120.0]).__next__)
    monkeypatch.setattr("mla_jax.bench.company._own_seconds", iter([3.0, 11.0]).__next__)
    assert Company().percent() == 30.0  # 12 of 40 seconds


@needs_proc
def test_processors_of_this_machine() -> None:
    """Those of a real one: this process is not counted."""
    company = Company()
    sum(range(3_000_000))
    percent = company.percent()
    assert percent is not None and 0 <= percent <= 100 and _own_seconds() > 0


@pytest.mark.timeout(120)
def test_processes_and_a_case_that_fails(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_jax.cli.bench._check_case", lambda *args, **kwargs: None)
    names = [SMALL, "fp8_b1_h2_s1_1k", SMALL]  # one of them twice, which shows how steady the machine is
    assert main(["bench", *names, "--rounds", "2", "--jobs", "2", "--json"]) == 0
    workers = multiprocessing.active_children()  # those that have not ended yet
    for worker in workers:
        worker.join(30)
    out, err = capfd.readouterr()
    assert "Traceback" not in err and all(worker.exitcode == 0 for worker in workers)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert [row["case"] for row in rows] == names and all(row["us"] > 0 and row["rounds"] == 2 for row in rows)
    with pytest.raises(SystemExit):
        main(["bench", SMALL, "fp8_b1_h2_s1_1k", "--rounds", "1", "--implementation", "zz", "--json"])
    rows = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
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
        ([SMALL, "bf16_b1024_h1024_s1024_1k"], "with its queries, too much"),
        (["bf16_b00_h16_s1_1k"], "no case"),
        ([SMALL, "--implementation", "zz"], "'zz' is not known"),
        ([SMALL, "--rounds", "1", "--output", "/no/x"], "/no/x"),
        (["--jobs", "0", SMALL], "--jobs"),
        (["--settings", "slots=2", SMALL], "'slots' is no setting"),
        (["--settings", "left_slots=few", SMALL], "no value for left_slots"),
        (["--settings", 'left_slots="a"', SMALL], "left_slots is a whole number"),
        (["--settings", "left_slots=3.0", SMALL], "left_slots is a whole number"),
        (["--settings", "left_slots=true", SMALL], "left_slots is a whole number"),
        (["bf16_b1_h16_s1_0k"], "no case"),
        (["bf16_b1_h16_s1_" + "9" * 5000 + "k"], "no case"),
        (["--settings", "register_tiles=9", SMALL], "give 5, 6 or 7"),
        (["--settings", "left_slots=2", SMALL], "settings are for mosaic_gpu"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], sentence: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *argv]) == 2
    message = capsys.readouterr().err
    assert sentence in message and message.count("\n") == 1


def test_a_link_stays_one(tmp_path: Path) -> None:
    """`--output /dev/stdout` must not make a file of it."""
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    main(["bench", SMALL, "--rounds", "1", "--output", str(tmp_path / "link.json")])
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "real.json").read_text())["rows"]


def test_a_file_that_cannot_be_written_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / ".rows.json.new").mkdir()  # where the file is made before it gets its name
    (tmp_path / "rows.json").write_text("before")
    assert main(["bench", SMALL, "--rounds", "1", "--json", "--output", str(tmp_path / "rows.json")]) == 0
    out, err = capsys.readouterr()
    assert "warning: --output" in err and json.loads(out.splitlines()[-1])["rows"][0]["us"] > 0
    assert (tmp_path / "rows.json").read_text() == "before"


@needs_proc
def test_a_killed_process_does_not_hold_up_the_others() -> None:
    """As the kernel does it when memory runs out."""
    with _bench_in_two_processes(rounds=2) as (bench, workers):
        os.kill(workers[0], signal.SIGKILL)
        out, _ = bench.communicate(timeout=60)
    rows = json.loads(out.splitlines()[-1])["rows"]
    assert bench.returncode == 1 and len(rows) == 2
    assert sorted("us" in row or "process ended" in row["failed"] for row in rows) == [True, True]
    assert sum("us" in row for row in rows) == 1
    assert not any(map(_runs, workers))


@needs_proc
def test_processes_end_with_the_one_that_started_them() -> None:
    with _bench_in_two_processes(rounds=1_000_000) as (bench, workers):
        bench.terminate()
        bench.communicate(timeout=60)
    assert bench.returncode == -signal.SIGTERM
    give_up = time.monotonic() + 30
    while any(map(_runs, workers)) and time.monotonic() < give_up:
        time.sleep(0.1)
    assert not any(map(_runs, workers))


@contextlib.contextmanager
def _bench_in_two_processes(rounds: int) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    command = [sys.executable, "-m", "mla_jax", "bench", SMALL, "fp32_b1_h2_s1_1k", "--jobs", "2", "--json"]
    command += ["--rounds", str(rounds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as bench:
        give_up = time.monotonic() + 60
        while len(workers := _spawned_by(bench.pid)) < 2 and time.monotonic() < give_up:
            time.sleep(0.1)
        yield bench, workers


def _runs(pid: int) -> bool:
    """False for one that has ended, though nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _spawned_by(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
