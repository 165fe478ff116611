import os
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "attention")]
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def stand_in(monkeypatch):
    """The operators of stand_in.py in place of FlashMLA's: the whole way from JAX into torch and back, on this CPU."""
    import stand_in as module

    from flash_mla_jax import interface

    monkeypatch.setattr(interface, "PROVIDER", module.PROVIDER)
    yield module
    module.misbehave = None
