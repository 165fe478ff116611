"""Text to token ids and back: bytes, or a checkpoint's own `tokenizer.json`."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mla_jax.errors import InputError


class Tokenizer(Protocol):
    """What the commands need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens that the text does not spell."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids; what is no valid UTF-8 becomes U+FFFD."""

    def streamer(self) -> Callable[[int], str]:
        """A function that takes tokens one by one and returns the text that each completes."""


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        try:
            return list(text.encode("utf-8", errors="surrogateescape"))
        except UnicodeEncodeError as e:
            raise InputError(f"The text holds {text[e.start]!r}, which is no character of UTF-8.") from None

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(tokens).decode("utf-8", errors="replace")

    def streamer(self) -> Callable[[int], str]:
        """See `Tokenizer`."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes([token]))


class FileTokenizer:
    """A `tokenizer.json`, through the optional package `tokenizers`."""

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise InputError(f"{path} needs the package tokenizers; install it with: pip install tokenizers.") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the package raises bare Exception
            raise InputError(f"{path} is not a tokenizer.json that the package tokenizers reads ({e}).") from None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        whole = text.encode("utf-8", errors="replace").decode("utf-8")  # it takes no lone surrogates
        return self._tokenizer.encode(whole, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def streamer(self) -> Callable[[int], str]:
        """See `Tokenizer`."""
        seen: list[int] = []
        shown = ""

        def push(token: int) -> str:
            nonlocal shown
            seen.append(token)
            text = self.decode(seen)
            if text.endswith("\ufffd"):  # the middle of a character
                return ""
            new, shown = text[len(shown) :], text
            return new

        return push


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint folder; a model of 256 tokens without `tokenizer.json` reads bytes."""
    path = folder / "tokenizer.json"
    if path.exists():
        return FileTokenizer(path)
    if vocab_size == 256:
        return ByteTokenizer()
    raise InputError(f"{folder} holds no tokenizer.json, and a vocabulary of {vocab_size} is not one of bytes (256).")
