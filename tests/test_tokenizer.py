"""Bytes and `tokenizer.json`: encoding, decoding, and text that comes token by token."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from mla_jax import save_checkpoint
from mla_jax.__main__ import main
from mla_jax.demo import HELDOUT
from mla_jax.tokenizer import ByteTokenizer, load_tokenizer
from tests.tiny import TINY, tiny_params

TEXT = "Schön, ç’est ça: 数学 🙂\n\tThe end."


def write_tokenizer(folder: Path, vocab_size: int = 300) -> Path:
    """A byte-level BPE like DeepSeek's, trained on Shakespeare."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator([HELDOUT.read_text()], vocab_size=vocab_size, special_tokens=["<end>"], show_progress=False)
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes_round_trip() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"
    assert tokenizer.encode(b"\xff".decode("utf-8", "surrogateescape")) == [0xFF]


def test_file_round_trip(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path), 300)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer.encode("the king and the queen")) < len("the king and the queen")


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_streamed_pieces_make_the_text_and_cut_no_character(kind: str, tmp_path: Path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else load_tokenizer(write_tokenizer(tmp_path), 300)
    push = tokenizer.streamer()
    pieces = [push(token) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)


def test_generate_and_evaluate_through_a_tokenizer(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    config = replace(TINY, vocab_size=300)
    save_checkpoint(folder, config, tiny_params(config=config))
    argv = ["generate", "The king", "--model", str(folder), "--max-new-tokens", "8", "--json"]
    assert main(argv) == 0
    (sequence,) = json.loads(capsys.readouterr().out.splitlines()[-1])["sequences"]
    assert sequence["text"] == load_tokenizer(folder, 300).decode(sequence["tokens"])
    assert main(["evaluate", "--model", str(folder), "--max-bytes", "1500", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < report["bits_per_byte"] < report["bits_per_token"]


def test_bad_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json, and a vocabulary of 300"):
        load_tokenizer(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not a tokenizer\.json") as error:
        load_tokenizer(tmp_path, 256)
    assert "\n" not in str(error.value)
