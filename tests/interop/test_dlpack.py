"""Arrays shared with torch: no copy, refusals, and who keeps what alive. Order on a GPU is tested in tests/gpu."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout

from flash_mla_jax import InputError, dlpack, from_torch, release_dropped, to_torch

TORCH_DTYPES = {name: getattr(torch, name) for name in dlpack.DTYPES}


def values(dtype: str) -> np.ndarray:
    return (np.arange(96).reshape(2, 3, 16) % 2 if dtype == "bool" else np.arange(96).reshape(2, 3, 16) % 13) != 0


@pytest.mark.parametrize("dtype", dlpack.DTYPES)
def test_jax_to_torch_shares_memory(dtype: str) -> None:
    array = jnp.asarray(values(dtype)).astype(dtype)
    tensor = to_torch(array)
    assert tensor.dtype == TORCH_DTYPES[dtype] and tuple(tensor.shape) == array.shape
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(tensor.float().numpy(), np.asarray(array.astype(jnp.float32)))


@pytest.mark.parametrize("dtype", dlpack.DTYPES)
def test_torch_to_jax_shares_memory(dtype: str) -> None:
    made = torch.from_numpy(values(dtype)).to(TORCH_DTYPES[dtype])
    room = torch.empty(made.nbytes + 64, dtype=torch.uint8)  # XLA on a CPU copies what does not begin at a cache line
    start = -room.data_ptr() % 64
    tensor = room[start : start + made.nbytes].view(made.dtype).view(made.shape).copy_(made)
    array = from_torch(tensor)
    assert array.dtype.name == dtype and array.shape == tuple(tensor.shape)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array.astype(jnp.float32)), tensor.float().numpy())


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex64", "int16"])
def test_other_dtypes_are_refused_both_ways(dtype: str) -> None:
    with pytest.raises(InputError, match=f"^{dtype} is not shared between JAX and torch; convert to one of bfloat16, "):
        from_torch(torch.zeros(4, dtype=getattr(torch, dtype)))
    with jax.enable_x64(True):
        array = jnp.zeros(4, dtype)
    with pytest.raises(InputError, match=f"^{dtype} is not shared"):
        to_torch(array)


def test_layout_and_alignment() -> None:
    tensor = torch.arange(64, dtype=torch.float32).reshape(4, 16)
    for wrong, says in (
        (tensor.T, "must be contiguous, got shape (16, 4) with strides (1, 16); pass copy=True."),
        (tensor[:1].expand(4, 16), "must be contiguous"),
        (tensor.flatten()[1:], "must begin at a multiple of 16 bytes; pass copy=True."),
    ):
        with pytest.raises(InputError) as error:
            from_torch(wrong)
        assert says in str(error.value)
        np.testing.assert_array_equal(np.asarray(from_torch(wrong, copy=True)), wrong.numpy())
    array = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    permuted = jax.device_put(array, Format(Layout(major_to_minor=(1, 0)), array.sharding))
    with pytest.raises(InputError, match=r"must lie in row-major order, found dims in order \(1, 0\)"):
        to_torch(permuted)
    np.testing.assert_array_equal(to_torch(jnp.copy(permuted)).numpy(), np.asarray(array))


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs a jax\.Array with values, got ndarray"):
        to_torch(np.zeros(3))
    with pytest.raises(InputError, match="got a traced one; call it outside jit"):
        jax.jit(to_torch)(jnp.zeros(3))
    with pytest.raises(InputError, match=r"needs a torch\.Tensor, got ArrayImpl"):
        from_torch(jnp.zeros(3))


def test_a_copy_has_memory_of_its_own() -> None:
    array = jnp.zeros(64, jnp.float32)
    tensor = to_torch(array, copy=True)
    tensor += 1
    assert float(array.sum()) == 0
    source = torch.zeros(64)
    copied = from_torch(source, copy=True)
    source += 1
    assert float(copied.sum()) == 0


def test_memory_stays_as_long_as_a_view_lives() -> None:
    release_dropped(wait=True)
    array = jnp.arange(1 << 16, dtype=jnp.float32)
    view = to_torch(array)[5:9]
    del array
    gc.collect()
    junk = [jnp.full(1 << 16, -1.0, jnp.float32) for _ in range(4)]
    assert release_dropped() == 0 and len(junk) == 4
    np.testing.assert_array_equal(view.numpy(), [5, 6, 7, 8])


def test_what_is_dropped_is_kept_until_its_work_is_done_and_then_given_back() -> None:
    release_dropped(wait=True)
    array = from_torch(torch.zeros(1 << 12))
    result = array + 1
    del array
    gc.collect()
    assert len(dlpack._dropped) == 1, "torch's memory would be free while JAX may be reading it"
    assert release_dropped(wait=True) == 0 and not dlpack._dropped
    assert float(result[0]) == 1


def test_what_torch_has_put_off_is_not_lost() -> None:
    ones = torch.ones(4)
    with pytest.raises(InputError, match="signs are still to be changed; pass copy=True"):
        from_torch(torch._neg_view(ones))
    np.testing.assert_array_equal(from_torch(torch._neg_view(ones), copy=True), -1)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("where", ["sparse_coo", "the meta device"])
def test_a_tensor_without_dense_memory_is_refused(where: str, copy: bool) -> None:
    tensor = torch.ones(3).to_sparse() if where == "sparse_coo" else torch.ones(3, device="meta")
    with pytest.raises(InputError, match=f"must be dense and have memory, got one of {where}"):
        from_torch(tensor, copy=copy)
