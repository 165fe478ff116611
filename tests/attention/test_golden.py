"""Both implementations against outputs of FlashMLA's CUDA kernels on an H200."""

import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from decode_problems import IMPLEMENTATIONS, OUT_ABSOLUTE, OUT_RELATIVE, OUT_RMS, errors

from mla_jax import mla_decode

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "golden_kernels.npz")
TAGS = ("dense_decode_h16", "dense_verify_sq2_h16", "dense_noncausal_sq2_h3", "dense_fp16_h9")
DTYPES = {"torch.bfloat16": ml_dtypes.bfloat16, "torch.float16": np.float16}
LSE = 1e-5


def test_no_dense_row_is_left_out():
    assert set(TAGS) == {key.split("/")[0] for key in GOLDEN.files if key.startswith("dense")}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tag", TAGS)
def test_equals_the_cuda_kernel(tag, implementation):
    row = {key.split("/")[1]: GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{tag}/")}
    dtype = DTYPES[str(row["dtype"])]
    q, kv, want = (row[name].view(dtype) for name in ("q", "kv", "out"))
    out, lse = mla_decode(
        jnp.asarray(q), jnp.asarray(kv[:, :, 0]), row["bt"], row["lens"],
        sm_scale=float(row["scale"]), causal=bool(row["causal"]), implementation=implementation,
    )  # fmt: skip
    assert out.dtype == dtype and out.shape == want.shape
    out, want, lse = np.asarray(out, np.float64), want.astype(np.float64), np.asarray(lse)
    empty = np.isposinf(row["lse"])  # the CUDA kernels' mark of a row that sees no key
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    assert not out[empty.transpose(0, 2, 1)].any()
    assert empty.any() == (tag in ("dense_verify_sq2_h16", "dense_noncausal_sq2_h3"))
    assert (np.abs(out - want) <= OUT_RELATIVE * np.abs(want) + OUT_ABSOLUTE).all(), errors(out, want)
    assert np.sqrt(((out - want) ** 2).sum() / (want**2).sum()) <= OUT_RMS, errors(out, want)
    assert (np.abs(lse[~empty] - row["lse"][~empty]) <= LSE).all(), errors(lse[~empty], row["lse"][~empty])
