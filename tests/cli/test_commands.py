import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mla_jax.__main__ import main
from mla_jax.demo import CHECKPOINT, HELDOUT

KEYS = {"sequences", "steps", "tokens_per_second", "kv_format", "kv_bytes_per_token", "implementation", "pages"}


def run_json(capsys: pytest.CaptureFixture, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])


def fails(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """The one sentence that a command prints for wrong input."""
    assert main(argv) == 2
    sentence = capsys.readouterr().err.strip()
    assert "\n" not in sentence and "Traceback" not in sentence, sentence
    return sentence


def test_drafts_write_the_same_text_and_report_what_was_accepted(capsys: pytest.CaptureFixture) -> None:
    argv = ["generate", "ROMEO: ", "--max-new-tokens", "24", "--kv-format", "fp32", "--json"]
    reports = []
    for more in ([], ["--mtp-steps", "2"]):
        assert main([*argv, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    plain, drafted = reports
    assert drafted["sequences"] == plain["sequences"] and "accept_length" not in plain
    assert drafted["draft_steps"] == 2 and 1 < drafted["accept_length"] <= 3
    committed = sum(int(n) * times for n, times in drafted["accept_histogram"].items())
    assert committed == 24
    assert drafted["pages"]["free_after"] == drafted["pages"]["total"]


def test_generate_json(capsys: pytest.CaptureFixture) -> None:
    report = run_json(capsys, "generate", "--prompt", "JULIET", "--prompt", "What is", "--max-new-tokens", "20")
    assert report.keys() >= KEYS
    assert [s["prompt"] for s in report["sequences"]] == ["JULIET", "What is"]
    for sequence in report["sequences"]:
        assert bytes(sequence["tokens"]).decode() == sequence["text"]
        assert (len(sequence["tokens"]), sequence["finish_reason"]) == (20, "length")
    assert (report["kv_format"], report["kv_bytes_per_token"], report["steps"]) == ("bf16", 1152, 20)
    assert report["pages"]["free_after"] == report["pages"]["free_before"] == report["pages"]["total"]


def test_prompts_from_a_file_and_stop_bytes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("**ROMEO**\n\nGood morrow, my lord\n")
    report = run_json(capsys, "generate", "--prompts", str(file), "--stop-bytes", r"\n", "--max-new-tokens", "60")
    assert [s["prompt"] for s in report["sequences"]] == ["**ROMEO**", "Good morrow, my lord"]
    for sequence in report["sequences"]:
        assert sequence["finish_reason"] == "stop"
        assert sequence["tokens"][-1] == ord("\n") and "\n" not in sequence["text"]


def test_text_streams_and_a_table_follows(capsys: pytest.CaptureFixture) -> None:
    assert main(["generate", "My liege,", "--max-new-tokens", "12", "--kv-format", "fp32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("My liege,")
    for row in ("tokens/s", "2304 bytes per token and layer", "returned"):
        assert row in out


@pytest.mark.parametrize(("kv_format", "row"), [("fp8", 576), ("fp8_e4m3", 576), ("fp8_ds_mla", 656)])
def test_fp8_caches_hold_more_tokens(capsys: pytest.CaptureFixture, kv_format: str, row: int) -> None:
    argv = ["generate", "ROMEO", "--max-new-tokens", "16", "--cache-bytes", "8MiB", "--kv-format", kv_format]
    report = run_json(capsys, *argv)
    assert report["kv_bytes_per_token"] == row
    assert report["pages"]["total"] == 8 * 2**20 // (64 * 4 * row) - 1
    assert len(report["sequences"][0]["tokens"]) == 16


def test_evaluate_json(capsys: pytest.CaptureFixture) -> None:
    report = run_json(capsys, "evaluate", "--max-bytes", "4352")
    assert report["windows"] == 16 and report["text"] == HELDOUT.name
    assert 1.5 < report["bits_per_byte"] < 2.1


def test_queries_in_e4m3_cost_the_demo_model_little(capsys: pytest.CaptureFixture) -> None:
    argv = ["--max-bytes", "4352", "--kv-format", "fp8", "--fp8-queries", "--against", "bf16"]
    report = run_json(capsys, "evaluate", *argv)
    assert report["fp8_queries"] and report["kv_format"] == "fp8_e4m3" and report["top1_agreement"] > 0.97
    bits, bf16_bits = report["bits_per_byte"], report["bits_per_byte_against"]
    assert bits != bf16_bits and abs(bits / bf16_bits - 1) < 2e-3


def test_generate_with_queries_in_e4m3(capsys: pytest.CaptureFixture) -> None:
    argv = ["generate", "ROMEO: ", "--max-new-tokens", "12", "--kv-format", "fp8", "--fp8-queries"]
    assert run_json(capsys, *argv)["fp8_queries"] is True
    assert main(argv) == 0
    assert "cache in fp8_e4m3, queries in e4m3" in capsys.readouterr().out


def test_info(capsys: pytest.CaptureFixture) -> None:
    report = run_json(capsys, "info")
    assert report["default_implementation"] in report["implementations"]
    assert report["implementations"]["xla"] == {"runs": True, "reason": None}
    assert all(row["runs"] or row["reason"] for row in report["implementations"].values())
    assert main(["info"]) == 0
    assert "cannot run: " in capsys.readouterr().out


def checkpoint(tmp_path: Path, **changes: object) -> Path:
    """A copy of the demo checkpoint with a changed config."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "--kv-format", "int3"], ["'int3'", "bf16"]),
        (["generate", "--implementation", "cuda"], ["'cuda'", "xla"]),
        (["generate", "--fp8-queries", "x"], ["need a cache in fp8_e4m3 (--kv-format", "got bf16"]),
        (["generate", "--fp8-queries", "--kv-format", "fp8_ds_mla", "x"], ["fp8_e4m3", "got fp8_ds_mla"]),
        (["generate", "--fp8-queries", "--kv-format", "int3", "x"], ["'int3'", "bf16"]),
        (["evaluate", "--fp8-queries"], ["need a cache in fp8_e4m3 (--kv-format", "got bf16"]),
        (["generate", "--max-new-tokens", "0"], ["at least 1"]),
        (["generate", "--temperature", "-1"], ["temperature"]),
        (["generate", "--top-p", "2"], ["top_p"]),
        (["generate", ""], ["empty"]),
        (["generate", "--pages", "1", "x" * 300], ["300 tokens", "the pool has 1"]),
        (["generate", "--pages", "0", "x"], ["--pages must be at least 1"]),
        (["generate", "--slots", "0", "x"], ["--slots must be at least 1"]),
        (["generate", "--mtp-topk", "2", "x"], ["need --mtp-steps N"]),
        (["generate", "--mtp-steps", "0", "x"], ["Speculation.steps"]),
        (["generate", "--mtp-steps", "3", "--mtp-draft-tokens", "3", "x"], ["has draft_tokens 4", "got 3"]),
        (["generate", "--cache-bytes", "many"], ["'many'", "64MiB"]),
        (["generate", "--cache-bytes", "10k"], ["--cache-bytes 10k", "bytes"]),
        (["generate", "--prompts", "/no/such/file"], ["/no/such/file"]),
        (["generate", "--model", "/no/such/folder"], ["/no/such/folder"]),
        (["generate", "--stop-bytes", r"\x0"], ["--stop-bytes"]),
        (["generate", "--stop-bytes", "ü"], ["--stop-bytes"]),
        (["evaluate", "/no/such/file"], ["/no/such/file"]),
        (["evaluate", "--max-bytes", "100"], ["512"]),
        (["evaluate", "--max-bytes", "-5"], ["--max-bytes must be at least 1"]),
        (["evaluate", "a\0b"], ["null byte"]),
        (["generate", "--model", ""], ["config.json"]),
        (["generate", "x", "--max-new-tokens", "10000000"], ["4096 positions"]),
        (["generate", "x", "--cache-bytes", "1000GiB"], ["this machine's memory"]),
        (["generate", "x", "--cache-bytes", "9" * 400], ["64MiB"]),
        (["generate", "x", "--pages", "1000000000000"], ["this machine's memory"]),
        (["generate", "x", "--top-k", "2147483648"], ["top_k"]),
        (["generate", "x", "--seed", "-1"], ["seed"]),
        (["generate", "\ud800"], ["UTF-8"]),
        (["generate", "x", "--implementation", "flash_mla"], ["flash_mla: "]),
        (["schedule", "--kv-lens", "1", "--num-sms", "1000000000000"], ["num_parts"]),
        (["evaluate", "--max-bytes", "-5"], ["--max-bytes must be at least 1"]),
        (["generate", "x", "--max-new-tokens", "10000000"], ["4096 positions"]),
        (["generate", "x", "--cache-bytes", "1000GiB"], ["this machine's memory"]),
        (["generate", "x", "--implementation", "flash_mla"], ["flash_mla: "]),
    ],
)
def test_wrong_options_give_one_sentence(capsys: pytest.CaptureFixture, argv: list[str], words: list[str]) -> None:
    sentence = fails(capsys, *argv)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    "argv", [["generate", "--temperature", "warm"], ["generate", "--pages", "1", "--cache-bytes", "1M"], ["dance"], []]
)
def test_options_that_do_not_parse_give_one_sentence(capsys: pytest.CaptureFixture, argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("mla_jax")


def test_text_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    """A prompt of bytes that are no UTF-8, and a terminal that knows only ASCII."""
    (tmp_path / "prompts").write_bytes(b"na\xefve caf\xe9\n")
    start = [sys.executable, "-m", "mla_jax"]
    for encoding, argv in (
        ("utf-8", ["generate", "--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "2"]),
        ("ascii", ["schedule", "--kv-lens", "1"]),
    ):
        environment = os.environ | {"PYTHONIOENCODING": encoding, "JAX_PLATFORMS": "cpu"}
        result = subprocess.run([*start, *argv], capture_output=True, env=environment, timeout=200)
        assert result.returncode == 0, result.stderr


def test_a_stop_byte_may_be_any_byte(capsys: pytest.CaptureFixture) -> None:
    report = run_json(capsys, "generate", "ROMEO", "--max-new-tokens", "20", "--stop-bytes", r"\xff\x20")
    (sequence,) = report["sequences"]
    assert sequence["finish_reason"] == "stop" and sequence["tokens"][-1] == 0x20


def test_broken_checkpoints_give_one_sentence(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert "llama" in fails(capsys, "generate", "x", "--model", str(checkpoint(tmp_path / "a", model_type="llama")))
    folder = checkpoint(tmp_path / "b", num_hidden_layers=6, first_k_dense_replace=6)
    assert "model.layers." in fails(capsys, "generate", "x", "--model", str(folder))
    folder = checkpoint(tmp_path / "c", hidden_size=128)
    assert "shape" in fails(capsys, "generate", "x", "--model", str(folder))
    folder = checkpoint(tmp_path / "d")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "safetensors" in fails(capsys, "generate", "x", "--model", str(folder))
    (folder / "config.json").write_text("{")
    assert "config.json" in fails(capsys, "generate", "x", "--model", str(folder))


def test_the_program_itself() -> None:
    """As users start it: JSON last on stdout, sentences on stderr, exit codes."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    start = [sys.executable, "-m", "mla_jax"]
    good = subprocess.run([*start, "info", "--json"], capture_output=True, text=True, env=environment, timeout=120)
    assert good.returncode == 0 and json.loads(good.stdout.splitlines()[-1])["devices"]
    bad = subprocess.run(
        [*start, "generate", "--model", "/nowhere"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert bad.returncode == 2 and bad.stdout == "" and len(bad.stderr.strip().splitlines()) == 1
