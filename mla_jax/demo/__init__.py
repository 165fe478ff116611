"""A small DeepSeek-V3-style model of Shakespeare's plays, byte by byte, with true latent dimensions (512 + 64).

`checkpoint/` is in Hugging Face's format; `heldout.txt` is text that it was not trained on; `train.py` made both.
"""

from pathlib import Path

__all__ = ["CHECKPOINT", "HELDOUT"]

CHECKPOINT = Path(__file__).parent / "checkpoint"
HELDOUT = Path(__file__).parent / "heldout.txt"
