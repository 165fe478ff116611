import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import explain
from mla_jax.__main__ import main
from mla_jax.attention.mosaic_gpu.config import KernelConfig
from mla_jax.explain import plot
from mla_jax.schedule import tile_schedule

MIXED = [130, 4096, 70, 0, 900, 300, 64, 65]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_cover_every_block_once_and_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = rng.integers(1, 40)
    lens = np.where(rng.random(batch) < 0.2, 0, rng.integers(1, 3000, batch)).tolist()
    explanation = explain(lens, int(rng.integers(1, 133)))
    assert [p.part for p in explanation.pieces] == sorted(p.part for p in explanation.pieces)
    for request, length in enumerate(lens):
        pieces = [p for p in explanation.pieces if p.request == request]
        assert [p.split for p in pieces] == list(range(pieces[0].num_splits))
        assert pieces[0].first_block == 0 and pieces[-1].end_block == -(-length // 64)
        assert all(a.end_block == b.first_block for a, b in itertools.pairwise(pieces))
    assert sum(explanation.load) == sum(p.end_block - p.first_block + 5 for p in explanation.pieces)


def test_numbers_of_a_schedule_done_by_hand() -> None:
    """Two requests of 10 blocks on 2 parts cost 30 together, so each part takes one of them whole."""
    s = explain([640, 640], 2).summary()
    assert (s["blocks"], s["idle_parts"], s["largest_load"], s["balance"], s["splits"]) == (20, 0, 15, 1.0, [1, 1])


def test_chart_shows_a_line_per_part_and_says_what_it_leaves_out() -> None:
    assert explain(MIXED, 4).chart().count("\n") == 3
    assert "request 3 (empty)" in str(explain(MIXED, 4))
    many = explain([64] * 200, 132)
    assert many.chart().splitlines()[-1] == "… and 60 more working parts"
    assert len(many.chart(all_parts=True).splitlines()) == 100


def test_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    picture = tmp_path / "schedule.png"
    argv = ["schedule", "--kv-lens", "130,4096,70", "--num-sms", "132", "--num-heads", "16", "--plot", str(picture)]
    assert main([*argv, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parts"] == 132 and len(report["load"]) == 132 and report["requests"] == 3
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(argv[:3]) == 0
    assert "3 requests, 69 blocks of 64 tokens, 66 parts" in capsys.readouterr().out


def test_command_divides_as_the_kernel_does_unless_told(capsys: pytest.CaptureFixture) -> None:
    argv = ["schedule", "--kv-lens", "130,4096,70", "--json"]
    for options, overhead in (([], KernelConfig().request_overhead), (["--request-overhead", "5"], 5)):
        assert main([*argv, *options]) == 0
        report = json.loads(capsys.readouterr().out)
        schedule = tile_schedule(jnp.array([130, 4096, 70], jnp.int32), report["parts"], request_overhead=overhead)
        assert report["request_overhead"] == overhead
        assert report["splits"] == np.diff(schedule.num_splits).tolist()
        assert all(p["cost"] == p["end_block"] - p["first_block"] + overhead for p in report["pieces"])


def test_the_name_of_a_picture_is_the_one_it_gets(tmp_path: Path) -> None:
    for name, written in (("a", "a.png"), ("b.", "b.png"), ("c.svg", "c.svg")):
        assert plot(explain(MIXED, 8), tmp_path / name) == str(tmp_path / written)
        assert (tmp_path / written).exists()


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--kv-lens", "1,x"], "--kv-lens"),
        (["--kv-lens", ""], "kv_lens"),
        (["--kv-lens", "5,-1"], "kv_lens"),
        (["--kv-lens", "3000000000"], "kv_lens"),
        (["--kv-lens", "5", "--num-sms", "0"], "--num-sms"),
        (["--kv-lens", "5", "--request-overhead", "0"], "--request-overhead"),
        (["--kv-lens", "5", "--request-overhead", "9999999"], "request_overhead"),
        (["--kv-lens", "5", "--plot", "/no/such/folder/x.png"], "/no/such/folder/x.png"),
        (["--kv-lens", "5", "--plot", "x.unknown"], "x.unknown"),
    ],
)
def test_wrong_options_give_one_sentence(capsys: pytest.CaptureFixture, argv: list[str], word: str) -> None:
    assert main(["schedule", *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert word in error and "\n" not in error


@pytest.mark.parametrize("lens", [[], [1.5], [-1], [[1]], [2**31 - 1] * 70])
def test_lengths_that_cannot_be_are_refused(lens: list) -> None:
    with pytest.raises(ValueError, match="kv_lens"):
        explain(lens, 66)


def test_arrays_are_lengths_too() -> None:
    assert explain(np.array(MIXED), 4) == explain(jnp.asarray(MIXED), 4) == explain(MIXED, 4)


def test_plot_in_each_format(tmp_path: Path) -> None:
    for suffix in ("svg", "pdf"):
        plot(explain(MIXED, 8), tmp_path / f"p.{suffix}")
        assert (tmp_path / f"p.{suffix}").stat().st_size > 1000
