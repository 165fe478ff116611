"""The command that compares implementations: it passes what is right, fails what is not, and says why it skips."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mla_jax.__main__ import main
from mla_jax.check import compare as compare_module
from mla_jax.check.compare import NAMES, Row, compare, judge
from mla_jax.check.problems import Problem, problems
from mla_jax.cli import check as command

SMALL = Problem((70, 0, 3), 2, 3)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem per cache format and no layers, for tests of the command itself."""
    chosen = [Problem((70, 0), 1, 3, kv_format=f) for f in ("bf16", "fp8_ds_mla")]
    monkeypatch.setattr(command, "problems", lambda quick: chosen)
    monkeypatch.setattr(command, "compare_layers", lambda *_, **__: [])


def run_json(capsys: pytest.CaptureFixture, *argv: str, code: int = 0) -> dict[str, Any]:
    try:
        assert main(["check", *argv, "--json"]) == code
    except SystemExit as end:
        assert end.code == code
    return json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_e4m3", "fp8_ds_mla"])
def test_right_implementations_pass(kv_format: str) -> None:
    rows = compare(replace(SMALL, kv_format=kv_format), ("xla", "reference", "torch"))
    assert [(r.implementation, r.status) for r in rows] == [(n, "pass") for n in ("xla", "reference", "torch")], rows
    torch = rows[-1]
    assert torch.max_abs is not None and torch.max_abs < 1e-5  # an independent answer in float32


def answer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return SMALL.answer()


def _with_nan(out: np.ndarray, lse: np.ndarray) -> None:
    out[0, 0, 0, 0] = np.nan


def _empty_row_not_empty(out: np.ndarray, lse: np.ndarray) -> None:
    out[1, 0, 0, 0] = 1e-3


def _flash_mla_mark(out: np.ndarray, lse: np.ndarray) -> None:
    lse[1] = np.inf


def _lse_in_base_2(out: np.ndarray, lse: np.ndarray) -> None:
    lse /= np.log(2)


def _one_number(out: np.ndarray, lse: np.ndarray) -> None:
    out[0, 1, 2, 3] += 0.2


def _all_a_little(out: np.ndarray, lse: np.ndarray) -> None:
    out *= 1.006


@pytest.mark.parametrize("fault, says", [
    (_with_nan, "1 numbers of out are not finite"),
    (_empty_row_not_empty, "must have out 0 and lse -inf"),
    (_flash_mla_mark, "must have out 0 and lse -inf"),
    (_lse_in_base_2, "lse differs"),
    (_one_number, "1 numbers of out differ by more than rounding explains"),
    (_all_a_little, "relative RMS error"),
])  # fmt: skip
def test_faults_fail(fault: Callable[[np.ndarray, np.ndarray], None], says: str) -> None:
    out, lse, _ = answer()
    assert judge(SMALL, "xla", out, lse, answer()).status == "pass"
    fault(out, lse)
    row = judge(SMALL, "xla", out, lse, answer())
    assert row.status == "fail" and row.reason is not None and says in row.reason


def test_a_causal_mask_in_the_wrong_place_fails() -> None:
    call = SMALL.call()
    call["causal"] = False
    from mla_jax import mla_decode

    out, lse = mla_decode(**call, implementation="reference")
    assert (
        judge(SMALL, "reference", np.asarray(out, np.float64), np.asarray(lse, np.float64), answer()).status == "fail"
    )


def test_json_report(few: None, capsys: pytest.CaptureFixture) -> None:
    report = run_json(capsys, "--quick")
    assert report["ok"] is True and report["fail"] == 0
    assert {r["implementation"] for r in report["rows"]} == {n for n in NAMES if n != "transformers"}
    for row in report["rows"]:
        assert row.keys() >= {"case", "implementation", "status", "reason", "errors"}
        if row["status"] == "skip":
            assert row["reason"].endswith(".") and row["errors"] is None
        else:
            assert row["status"] == "pass" and row["reason"] is None
            assert row["errors"].keys() == {"max_abs", "relative_rms", "lse"} and row["errors"]["max_abs"] < 0.05
    counts = [sum(r["status"] == s for r in report["rows"]) for s in ("pass", "fail", "skip")]
    assert counts == [report["pass"], report["fail"], report["skip"]] and counts[0] >= 6


def test_against_limits_the_implementations(few: None, capsys: pytest.CaptureFixture) -> None:
    report = run_json(capsys, "--against", "xla,torch")
    assert {r["implementation"] for r in report["rows"]} == {"xla", "torch"}


def test_an_unknown_name_is_one_sentence(capsys: pytest.CaptureFixture) -> None:
    assert main(["check", "--against", "flashmla"]) == 2
    assert capsys.readouterr().err.startswith(
        "mla_jax check: --against 'flashmla' is not known; choose from mosaic_gpu"
    )


def test_a_failure_gives_exit_code_1_and_hides_nothing(
    few: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = compare_module._run

    def run(problem: Problem, name: str, call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        if name == "torch":
            raise RuntimeError("no kernel image\nmore lines")
        out, lse = right(problem, name, call)
        return (out + 1 if name == "xla" else out), lse

    monkeypatch.setattr(compare_module, "_run", run)
    report = run_json(capsys, "--against", "xla,reference,torch", code=1)
    assert report["ok"] is False
    status = {(r["implementation"], r["status"]) for r in report["rows"]}
    assert status == {("xla", "fail"), ("reference", "pass"), ("torch", "fail")}
    assert next(r for r in report["rows"] if r["implementation"] == "torch")["reason"] == (
        "raised RuntimeError: no kernel image"
    )


def test_the_table_for_people(few: None, capsys: pytest.CaptureFixture) -> None:
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "bf16 b2 s1 h3 ≤70 causal" in out and "max abs" in out
    assert "passed, 0 failed" in out and "flash_mla: 1 skipped: FlashMLA's kernels need an NVIDIA Hopper GPU" in out


def test_peers_that_are_missing_are_skipped(few: None, capsys: pytest.CaptureFixture, monkeypatch: Any) -> None:
    peers = importlib.import_module("flash_mla_jax.peers")
    find = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    report = run_json(capsys, "--against", "torch", code=1)  # nothing was checked
    assert not report["ok"]
    assert {(r["status"], r["reason"]) for r in report["rows"]} == {("skip", "PyTorch is not installed.")}


def test_layers_equal_transformers() -> None:
    from mla_jax.check.layers import compare_layers

    rows = compare_layers(3, ("xla", "flash_mla", "torch", "transformers"), kinds=("fp32",))
    assert [(r.implementation, r.status) for r in rows] == [("xla", "pass"), ("flash_mla", "skip")]
    assert rows[0].relative_rms is not None and rows[0].relative_rms < 5e-6


def test_problems_have_the_shapes_of_upstreams_tests() -> None:
    every = problems(quick=False)
    assert {p.queries for p in every} == {1, 2, 4}
    assert {p.heads for p in every} >= {1, 3, 9, 16, 63, 64, 126, 128}
    assert {len(p.lens) for p in every} >= {1, 128} and any(0 in p.lens for p in every)
    assert {p.kv_format for p in every} == {"bf16", "fp16", "fp8_e4m3", "fp8_ds_mla"}
    assert any(not p.causal for p in every) and len({p.name for p in every}) == len(every)
    assert set(problems(quick=True)) < set(every)


def test_rows_are_json() -> None:
    json.dumps([Row("a", "b", "skip", "why.").as_json(), Row("a", "b", "pass", None, 0.1, 0.2).as_json()])
