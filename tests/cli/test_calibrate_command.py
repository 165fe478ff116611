"""`calibrate` leaves scales where the other commands find them; `evaluate` compares cache formats."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import load_checkpoint, save_checkpoint
from mla_jax.__main__ import main
from mla_jax.decode.calibrate import calibrate
from mla_jax.model.kv_scales import SCALES_FILE, write_kv_scales
from tests.tiny import TINY, tiny_params

CONFIG = replace(TINY, vocab_size=256)  # tokens are bytes
TEXT = np.random.default_rng(0).integers(1, 256, 700).astype(np.uint8).tobytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_checkpoint(folder, CONFIG, tiny_params(config=CONFIG), jnp.float32)
    (tmp_path / "text.txt").write_bytes(TEXT)
    return folder


def run_json(capsys: pytest.CaptureFixture, *argv: object) -> dict:
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out.rstrip("\n").split("\n")[-1])


def fails(capsys: pytest.CaptureFixture, *argv: object) -> str:
    try:
        code = main(list(map(str, argv)))
    except SystemExit as exit:  # argparse
        code = exit.code
    sentence = capsys.readouterr().err.strip()
    assert code == 2 and sentence and "\n" not in sentence, sentence
    return sentence


def test_scales_land_beside_the_checkpoint(capsys: pytest.CaptureFixture, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    (model / SCALES_FILE).write_text("{}")  # damaged: it is replaced
    report = run_json(capsys, "calibrate", "--text", text, "--model", model)
    config, params = load_checkpoint(model, jnp.float32)
    expected = calibrate(params, config, list(TEXT))
    np.testing.assert_array_equal(params.kv_scales, expected.scales)
    assert report["scales"] == params.kv_scales.tolist() and report["output"] == str(model / SCALES_FILE)
    assert (report["tokens"], report["layers"], report["mtp_layers"], report["text"]) == (700, 2, 1, "text.txt")
    assert json.loads((model / SCALES_FILE).read_text())["tokens"] == 700
    other = tmp_path / "other.json"
    argv = ["calibrate", "--text", str(text), "--model", str(model), "--max-bytes", "100", "--output", str(other)]
    assert main(argv) == 0 and "scales" in capsys.readouterr().out
    assert json.loads(other.read_text())["tokens"] == 100
    np.testing.assert_array_equal(load_checkpoint(model)[1].kv_scales, expected.scales)


def test_evaluate_reads_them_and_compares_formats(capsys: pytest.CaptureFixture, model: Path, tmp_path: Path) -> None:
    argv = ["evaluate", tmp_path / "text.txt", "--model", model, "--kv-format", "fp8", "--against", "fp32"]
    write_kv_scales(model / SCALES_FILE, np.ones(3, np.float32))
    plain = run_json(capsys, *argv)
    assert (plain["against"], plain["kv_format"]) == ("fp32", "fp8_e4m3") and 0.8 < plain["top1_agreement"] < 1
    assert plain["bits_per_byte_against"] != plain["bits_per_byte"]
    write_kv_scales(model / SCALES_FILE, np.full(3, 1e6, np.float32))  # so large that every latent becomes 0
    ruined = run_json(capsys, *argv)
    assert ruined["top1_agreement"] < 0.5 and ruined["bits_per_byte_against"] == plain["bits_per_byte_against"]


def test_bad_calls_are_one_sentence(capsys: pytest.CaptureFixture, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    (tmp_path / "short.txt").write_text("a")
    assert "--text" in fails(capsys, "calibrate", "--model", model)
    assert "nowhere cannot be read" in fails(capsys, "calibrate", "--text", tmp_path / "nowhere")
    assert "--max-bytes must be at least 1" in fails(capsys, "calibrate", "--text", text, "--max-bytes", "0")
    assert "is not a folder" in fails(capsys, "calibrate", "--text", text, "--model", tmp_path / "nowhere")
    call = ("calibrate", "--model", model, "--text")
    assert "1 tokens; calibration needs at least 2" in fails(capsys, *call, tmp_path / "short.txt")
    for output in (tmp_path / "no" / "file.json", text / "file.json", tmp_path):
        assert f"{output} cannot be written" in fails(capsys, *call, text, "--output", output)
    assert "'int4' is not known" in fails(capsys, "evaluate", "--against", "int4")
    assert not (model / SCALES_FILE).exists()
