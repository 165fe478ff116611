"""Values of the device made harmless: which schedules are accepted, and what takes the place of the others."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_mla_jax.in_graph import clamped, matching_schedule, valid_indices

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "golden_metadata.npz")
NAMES = sorted({key.split("/")[0] for key in GOLDEN.files})
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
matching = jax.jit(matching_schedule, static_argnames="tokens", compiler_options=QUICK)


def rows(kind: str) -> list[dict[str, np.ndarray]]:
    found = [{k.split("/")[1]: GOLDEN[k] for k in GOLDEN.files if k.startswith(f"{n}/")} for n in NAMES]
    return [r for r in found if r["kind"] == kind]


def accepted(metadata: np.ndarray, num_splits: np.ndarray, lens: np.ndarray, *, tokens: bool) -> bool:
    kept, splits = matching(*(jnp.asarray(x, jnp.int32) for x in (metadata, num_splits, lens)), tokens=tokens)
    same = np.array_equal(kept, metadata) and np.array_equal(splits, num_splits)
    if not same:  # one part with everything
        batch, last = len(lens), int(lens[-1])
        end = [batch - 1, last] if tokens else [batch - 1, 0, -(-last // 64)]
        row = [0, 0, *end] if tokens else [0, *end]
        assert np.asarray(kept)[0, :4].tolist() == row and (np.asarray(kept)[1:, 0] == batch).all()
        np.testing.assert_array_equal(splits, np.arange(batch + 1))
    return same


@pytest.mark.parametrize("kind", ["dense", "dense_fp8"])
def test_schedules_of_the_cuda_kernel_are_accepted_and_changed_ones_are_not(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokens = kind == "dense_fp8"
    rng = np.random.default_rng(0)
    shapes = {}
    for row in rows(kind):  # one of each shape, the most cut ones
        shape = (len(row["cache_seqlens"]), len(row["tile_scheduler_metadata"]))
        if shape not in shapes or row["num_splits"][-1] > shapes[shape]["num_splits"][-1]:
            shapes[shape] = row
    chosen = sorted(shapes.values(), key=lambda r: (len(r["cache_seqlens"]), len(r["tile_scheduler_metadata"])))
    if not request.config.getoption("--full"):
        chosen = chosen[:: 2 if tokens else 4]  # each is compiled
    changes = 0
    for row in chosen:
        lens, metadata, splits = (row[n] for n in ("cache_seqlens", "tile_scheduler_metadata", "num_splits"))
        if len(metadata) == 1 and not tokens and lens[-1] == 0:
            continue  # is what would take its place
        assert accepted(metadata, splits, lens, tokens=tokens)
        active = int((metadata[:, 0] < len(lens)).sum())
        for column in range(5 if tokens else 7):
            for step in (1, -1, 64, -64, 2**30):
                part = int(rng.integers(active))
                wrong = metadata.copy()
                wrong[part, column] += step
                if column > 4:  # flags
                    wrong[part, column] = 1 - metadata[part, column]
                assert not accepted(wrong, splits, lens, tokens=tokens), (part, column, step)
                changes += 1
        wrong_splits = splits.copy()
        wrong_splits[rng.integers(len(splits))] += 1
        assert not accepted(metadata, wrong_splits, lens, tokens=tokens)
        longer = lens.copy()
        longer[-1] += 64  # a request within a part may grow: its part does all of it
        assert not accepted(metadata, splits, longer, tokens=tokens)
    assert changes > 100


def test_right_values_stay_and_wrong_ones_are_clamped() -> None:
    table = jnp.asarray([[0, 7, -1], [8, 2147480000, 3]], jnp.int32)
    lens = jnp.asarray([-5, 1000], jnp.int32)
    pages, lengths = clamped(table, lens, 8)
    assert pages.tolist() == [[0, 7, 0], [7, 7, 3]] and lengths.tolist() == [0, 192]
    indices = jnp.asarray([-1, 0, 511, 512, -7, 2**31 - 1], jnp.int32)
    assert valid_indices(indices, 512).tolist() == [-1, 0, 511, -1, -1, -1]
