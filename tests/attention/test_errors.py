"""Every malformed call of `mla_decode` is a ValueError of one sentence: what was expected, what came, what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_problems import IMPLEMENTATIONS, assert_one_sentence

from mla_jax import InputError, TileSchedule, mla_decode, tile_schedule

GOOD = {
    "q": jnp.zeros((2, 3, 4, 576), jnp.bfloat16),
    "kv_cache": jnp.zeros((5, 64, 576), jnp.bfloat16),
    "block_table": jnp.zeros((2, 3), jnp.int32),
    "kv_lens": jnp.zeros((2,), jnp.int32),
}

FP8 = {"kv_cache": jnp.zeros((5, 64, 576), jnp.float8_e4m3fn)}


def leaves(change):
    return jax.tree.map(change, tile_schedule(jnp.ones(2, jnp.int32), 4))


# what is wrong: (changed arguments, what the sentence must name)
WRONG = {
    "q in float64": ({"q": np.zeros((2, 3, 4, 576))}, ("q must", "bfloat16", "float64")),
    "q of integers": ({"q": jnp.zeros((2, 3, 4, 576), jnp.int32)}, ("q must", "int32")),
    "q of booleans": ({"q": jnp.zeros((2, 3, 4, 576), bool)}, ("q must", "bool")),
    "q without heads": ({"q": jnp.zeros((2, 3, 576))}, ("q must be [B, S, H, D]", "(2, 3, 576)")),
    "q before absorbing": ({"q": jnp.zeros((2, 3, 4, 192))}, ("192", "576", "absorb")),
    "q a list": ({"q": [[1.0]]}, ("q must be", "list")),
    "q None": ({"q": None}, ("q must be", "NoneType")),
    "q a number": ({"q": 1.0}, ("q must be", "float")),
    "no heads": ({"q": jnp.zeros((2, 3, 0, 576))}, ("H", "at least 1", "(2, 3, 0, 576)")),
    "no queries": ({"q": jnp.zeros((2, 0, 4, 576))}, ("S", "(2, 0, 4, 576)")),
    "no latent": ({"q": jnp.zeros((2, 3, 4, 0)), "kv_cache": jnp.zeros((5, 64, 0))}, ("(2, 3, 4, 0)",)),
    "q in FP8, cache in bf16": ({"q": jnp.zeros((2, 3, 4, 576), jnp.float8_e4m3fn)}, ("float8_e4m3fn", "bfloat16")),
    "q in another FP8": ({"q": jnp.zeros((2, 3, 4, 576), jnp.float8_e5m2)}, ("q must", "float8_e5m2")),
    "cache with FlashMLA's head dim": ({"kv_cache": jnp.zeros((5, 64, 1, 576))}, ("kv_cache", "(5, 64, 1, 576)")),
    "pages of 32": ({"kv_cache": jnp.zeros((5, 32, 576))}, ("64", "32")),
    "pages of 1": ({"kv_cache": jnp.zeros((5, 1, 576))}, ("64", "(5, 1, 576)")),
    "no pages": ({"kv_cache": jnp.zeros((0, 64, 576))}, ("(0, 64, 576)",)),
    "cache of another width": ({"kv_cache": jnp.zeros((5, 64, 512))}, ("576", "512")),
    "cache in float64": ({"kv_cache": np.zeros((5, 64, 576))}, ("kv_cache must", "float64")),
    "cache of integers": ({"kv_cache": jnp.zeros((5, 64, 576), jnp.int8)}, ("kv_cache must", "int8")),
    "cache of 656 float numbers": ({"kv_cache": jnp.zeros((5, 64, 656))}, ("576", "656")),
    "FP8 rows of 576 bytes": ({"kv_cache": jnp.zeros((5, 64, 576), jnp.uint8)}, ("656", "576")),
    "cache a list": ({"kv_cache": [[0.0]]}, ("kv_cache must be", "list")),
    "table of int64": ({"block_table": np.zeros((2, 3), np.int64)}, ("block_table must be int32", "int64")),
    "table of uint32": ({"block_table": np.zeros((2, 3), np.uint32)}, ("block_table must be int32", "uint32")),
    "table of floats": ({"block_table": jnp.zeros((2, 3))}, ("block_table must be int32", "float32")),
    "table of one row": ({"block_table": jnp.zeros((3,), jnp.int32)}, ("block_table must be", "(3,)")),
    "table of another batch": ({"block_table": jnp.zeros((1, 3), jnp.int32)}, ("2", "block_table", "1")),
    "table without entries": ({"block_table": jnp.zeros((2, 0), jnp.int32)}, ("block_table", "(2, 0)")),
    "table a list": ({"block_table": [[0, 1, 2], [0, 1, 2]]}, ("block_table must be", "list")),
    "lengths of int64": ({"kv_lens": np.zeros(2, np.int64)}, ("kv_lens must be int32", "int64")),
    "lengths a list": ({"kv_lens": [1, 2]}, ("kv_lens must be", "list")),
    "one length": ({"kv_lens": jnp.int32(3)}, ("kv_lens must be [B]", "()")),
    "lengths of another batch": ({"kv_lens": jnp.zeros((3,), jnp.int32)}, ("2", "kv_lens", "3")),
    "lengths in a column": ({"kv_lens": jnp.zeros((2, 1), jnp.int32)}, ("kv_lens must be [B]", "(2, 1)")),
    "values wider than keys": ({"d_v": 577}, ("d_v", "576", "577")),
    "no values": ({"d_v": 0}, ("d_v", "0")),
    "negative d_v": ({"d_v": -1}, ("d_v", "-1")),
    "d_v a float": ({"d_v": 512.0}, ("d_v", "512.0")),
    "d_v None": ({"d_v": None}, ("d_v", "None")),
    "d_v an array": ({"d_v": jnp.int32(512)}, ("d_v must be a whole number",)),
    "scale of a cache without one": ({"kv_scale": 1.0}, ("kv_scale must be None", "bfloat16")),
    "scale for each request": ({"sm_scale": jnp.ones((2,))}, ("sm_scale", "(2,)")),
    "scale in a list": ({"sm_scale": [0.1]}, ("sm_scale", "list")),
    "scale in words": ({"sm_scale": "auto"}, ("sm_scale", "auto")),
    "complex scale": ({"sm_scale": 1j}, ("sm_scale", "1j")),
    "scale of q for each head": ({"q_scale": jnp.ones((4,))}, ("q_scale", "float32 [B, S, H] = (2, 3, 4)", "(4,)")),
    "scale of q for each row, transposed": ({"q_scale": jnp.ones((2, 4, 3))}, ("q_scale", "(2, 3, 4)", "(2, 4, 3)")),
    "scale of q for each row in bf16": ({"q_scale": jnp.ones((2, 3, 4), jnp.bfloat16)}, ("q_scale", "bfloat16")),
    "scale of q for each row in float64": ({"q_scale": np.ones((2, 3, 4))}, ("q_scale", "float32", "float64")),
    "scale of q in a list": ({"q_scale": [1.0]}, ("q_scale", "list")),
    "causal a mask": ({"causal": jnp.ones((3, 3), bool)}, ("causal must be True or False",)),
    "causal None": ({"causal": None}, ("causal must be True or False", "NoneType")),
    "causal in words": ({"causal": "no"}, ("causal must be True or False", "str")),
    "mask of one request": ({"tree_mask": jnp.ones((3, 3), bool)}, ("tree_mask", "(2, 3, 3)", "(3, 3)")),
    "mask over all keys": ({"tree_mask": jnp.ones((2, 3, 192), bool)}, ("tree_mask", "(2, 3, 3)", "(2, 3, 192)")),
    "mask of integers": ({"tree_mask": jnp.ones((2, 3, 3), jnp.int32)}, ("tree_mask must be bool", "int32")),
    "mask of floats": ({"tree_mask": jnp.ones((2, 3, 3))}, ("tree_mask must be bool", "float32")),
    "mask a list": ({"tree_mask": [[[True]]]}, ("tree_mask", "(2, 3, 3)", "list")),
    "mask True": ({"tree_mask": True}, ("tree_mask", "(2, 3, 3)", "bool")),
    "schedule a table": ({"schedule": jnp.zeros((4, 8), jnp.int32)}, ("schedule must be a TileSchedule",)),
    "schedule of another batch": ({"schedule": tile_schedule(jnp.ones(3, jnp.int32), 4)}, ("3 requests", "q has 2")),
    "schedule of nothing": ({"schedule": TileSchedule(None, None, None)}, ("schedule.metadata must be int32", "None")),
    "schedule in bytes": ({"schedule": leaves(lambda x: x.astype(jnp.int8))}, ("schedule.metadata must be", "int8")),
    "two schedules": ({"schedule": leaves(lambda x: jnp.stack([x, x]))}, ("schedule.metadata must be", "(2, 4, 8)")),
    "array of no scale": (FP8 | {"kv_scale": np.array(0.0)}, ("kv_scale must be a positive number",)),
    "unknown implementation": ({"implementation": "cuda"}, ("implementation 'cuda'", "xla", "reference")),
    "no implementation": ({"implementation": ()}, ("implementation",)),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_call_is_one_sentence(what):
    changes, named = WRONG[what]
    with pytest.raises(ValueError) as error:
        mla_decode(**(GOOD | changes))
    message = str(error.value)
    assert isinstance(error.value, InputError), f"not ours: {message}"
    assert_one_sentence(message)
    for words in named:
        assert words in message, f"{words!r} is not in: {message}"
    print(message)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_wrong_calls_are_refused_while_tracing_too(implementation):
    def call(q, kv_lens):
        return mla_decode(**(GOOD | {"q": q, "kv_lens": kv_lens}), implementation=implementation)

    jax.eval_shape(call, GOOD["q"], GOOD["kv_lens"])
    with pytest.raises(InputError, match="absorb"):
        jax.jit(call)(GOOD["q"][..., :192], GOOD["kv_lens"])
    with pytest.raises(InputError, match="kv_lens"):
        jax.eval_shape(call, GOOD["q"], GOOD["kv_lens"][:1])


def test_the_good_call_is_good():
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        mla_decode(**(GOOD | {"kv_cache": GOOD["kv_cache"].astype(dtype)}))
    mla_decode(**(GOOD | {"d_v": np.int64(512), "causal": np.True_, "sm_scale": np.float64(0.1), "q_scale": 1}))
    mla_decode(**(GOOD | {"q_scale": np.ones((2, 3, 4), np.float32)}))
