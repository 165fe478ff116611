"""Pages of both FP8 formats: how many tokens a cache holds, and that fork, move and truncate carry rows unchanged."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import MLAConfig, PagedKVCache, PagePool, dequantize_kv, quantize_kv
from mla_jax.demo import CHECKPOINT
from mla_jax.model.cache import page_bytes

FP8 = ("fp8_e4m3", "fp8_ds_mla")
CACHE_BYTES = 64 * 2**20


def int32(*values):
    return jnp.array(values, jnp.int32)


@jax.jit
def fill(pool: PagePool) -> PagePool:
    """Grows the only sequence until it is refused: by pages, then by tokens."""

    def grow(state: tuple[PagePool, jax.Array]) -> tuple[PagePool, jax.Array]:
        pool, step = state
        pool, ok = pool.extend(pool.kv_lens + step)
        return pool, jnp.where(ok[0], step, jnp.where(step == 64, 1, 0))

    return jax.lax.while_loop(lambda state: state[1] > 0, grow, (pool, jnp.int32(64)))[0]


def tokens_held(kv_format: str) -> int:
    """Of one sequence in a cache of the demo model that takes at most CACHE_BYTES, filled until it is refused."""
    config = MLAConfig.from_hf(CHECKPOINT)
    num_pages = CACHE_BYTES // page_bytes(config, kv_format)
    cache = PagedKVCache.create(config.num_layers, num_pages, config.latent_dim, kv_format)
    taken = sum(layer.nbytes for layer in cache.layers)
    assert CACHE_BYTES - taken < page_bytes(config, kv_format) and taken <= CACHE_BYTES
    pool = fill(PagePool.create(num_pages, 1, num_pages))
    count = int(pool.kv_lens[0])
    assert int(pool.num_free) == 0
    pages = np.arange(0, count, 64, dtype=np.int32)
    positions = jnp.asarray(np.concatenate([pages, np.minimum(pages + 63, count - 1)])[None])  # both ends of each page
    digits = jnp.right_shift(positions[..., None], jnp.arange(0, 18, 3, dtype=jnp.int32)[None, None]) & 7
    latents = jnp.pad(digits.astype(jnp.bfloat16), ((0, 0), (0, 0), (570, 0)))  # exact in every format
    last = config.num_layers - 1
    cache = cache.write(last, pool.block_table, positions, latents)
    read = cache.gather(last, pool.block_table, positions, jnp.bfloat16)
    np.testing.assert_array_equal(read[0, :, 570:].astype(jnp.int32), digits[0])
    return count


def test_the_same_bytes_hold_twice_the_tokens() -> None:
    held = {name: tokens_held(name) for name in ("bf16", *FP8)}
    print(f"64 MiB: {held}")
    assert held["fp8_e4m3"] >= 2.0 * held["bf16"]
    assert held["fp8_ds_mla"] >= 1.75 * held["bf16"]  # 1152 / 656 = 1.756, less the reserved page and the rest
    assert held == {"bf16": 226 * 64, "fp8_e4m3": 454 * 64, "fp8_ds_mla": 398 * 64}


def test_pages_of_mtp_modules_are_counted_where_wanted() -> None:
    config = MLAConfig.from_hf(CHECKPOINT)
    for name, row in (("bf16", 1152), ("fp8", 576), ("fp8_ds_mla", 656)):
        assert page_bytes(config, name) == 64 * 4 * row and page_bytes(config, name, mtp=True) == 64 * 5 * row


class Run:
    """A pool and two layers of an FP8 cache, every byte 0xFF, which is NaN, until a token is written."""

    def __init__(self, kv_format: str, lens: tuple[int, ...], num_pages: int = 8):
        scales = jnp.array([0.5, 4.0]) if kv_format == "fp8_e4m3" else None
        cache = PagedKVCache.create(2, num_pages, 576, kv_format, scales=scales)
        full = (np.full(x.nbytes, 0xFF, np.uint8).view(x.dtype).reshape(x.shape) for x in cache.layers)
        self.cache = replace(cache, layers=tuple(jnp.asarray(x) for x in full))
        self.pool, ok = PagePool.create(num_pages, len(lens), 4).extend(jnp.array(lens, jnp.int32))
        assert ok.all()

    def positions(self, count: int) -> jax.Array:
        return jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (self.pool.kv_lens.shape[0], count))

    def fill(self, seed: int = 0) -> list[np.ndarray]:
        """Writes all tokens of all sequences; returns what each layer must give back, [N, longest, 576]."""
        positions = self.positions(int(self.pool.kv_lens.max()))
        valid = positions < self.pool.kv_lens[:, None]
        return [self.write(layer, positions, valid, seed + layer) for layer in (0, 1)]

    def write(self, layer: int, positions: jax.Array, valid: jax.Array, seed: int) -> np.ndarray:
        latents = jax.random.normal(jax.random.key(seed), (*positions.shape, 576)) * 50
        self.cache = self.cache.write(layer, self.pool.block_table, positions, latents, valid)
        name, scale = self.cache.format.name, self.cache.scale(layer)
        return np.asarray(dequantize_kv(quantize_kv(latents, name, scale), name, scale))

    def read(self, layer: int, count: int) -> np.ndarray:
        return np.asarray(self.cache.gather(layer, self.pool.block_table, self.positions(count)))


@pytest.mark.parametrize("kv_format", FP8)
def test_fork_shares_full_pages_and_copies_the_partial_one(kv_format: str) -> None:
    run = Run(kv_format, (100, 0))
    expected = run.fill()
    run.pool, ok = run.pool.fork(0, 1, 70)
    run.cache = run.cache.fork(run.pool, 0, 1, 70, ok)
    assert ok and run.pool.block_table[0, 0] == run.pool.block_table[1, 0] != run.pool.block_table[1, 1]
    run.pool, _ = run.pool.extend(int32(100, 72))
    later = run.positions(72)[:, 70:]
    new = run.write(1, later, later * 0 + int32([0], [1]) == 1, seed=9)
    for layer in (0, 1):
        np.testing.assert_array_equal(
            run.read(layer, 100)[0], expected[layer][0]
        )  # what the fork writes, it does not see
        np.testing.assert_array_equal(run.read(layer, 70)[1], expected[layer][0, :70])
    np.testing.assert_array_equal(run.read(1, 72)[1, 70:], new[1])


@pytest.mark.parametrize("kv_format", FP8)
def test_a_cut_inside_a_shared_page_copies_it_before_it_grows(kv_format: str) -> None:
    run = Run(kv_format, (128, 0))
    expected = run.fill()
    run.pool, ok = run.pool.fork(0, 1, 128)
    assert ok
    before = run.pool.truncate(int32(128, 90))
    run.pool, ok = before.extend(int32(128, 91))
    run.cache = run.cache.copy_on_write(before, run.pool)
    new = run.write(1, int32([0], [90]), jnp.array([[False], [True]]), seed=9)
    for layer in (0, 1):
        np.testing.assert_array_equal(run.read(layer, 128)[0], expected[layer][0])
        np.testing.assert_array_equal(run.read(layer, 90)[1], expected[layer][0, :90])
    np.testing.assert_array_equal(run.read(1, 91)[1, 90], new[1, 0])
    assert ok.all() and run.pool.check()


@pytest.mark.parametrize("kv_format", FP8)
def test_accepted_nodes_of_a_tree_move_as_bytes(kv_format: str) -> None:
    """Nodes {0, 2, 5} of 7 drafted at 62 … 68 become rows 62, 63, 64: the same bytes, not quantized again."""
    run = Run(kv_format, (69, 3))
    expected = run.fill()
    before = run.cache
    source, destination = int32([62, 64, 67], [0, 0, 0]), int32([62, 63, 64], [1, 1, 1])
    run.cache = run.cache.move_rows(run.pool.block_table, source, destination, jnp.array([[True] * 3, [False] * 3]))
    run.pool = run.pool.truncate(int32(65, 3))
    pages = np.asarray(run.pool.block_table)[0]
    place = lambda t: (int(pages[t // 64]), t % 64)  # noqa: E731
    for layer in (0, 1):
        read, kept = run.read(layer, 65), expected[layer]
        np.testing.assert_array_equal(read[0], kept[0][np.r_[0:62, 62, 64, 67]])
        np.testing.assert_array_equal(read[1, :3], kept[1, :3])
        old, new = (np.asarray(cache.layers[layer]).view(np.uint8) for cache in (before, run.cache))
        assert np.array_equal(new[place(63)], old[place(64)]) and np.array_equal(new[place(64)], old[place(67)])


@pytest.mark.parametrize("kv_format", FP8)
def test_truncated_tokens_are_gone_and_their_places_taken_again(kv_format: str) -> None:
    run = Run(kv_format, (130, 60))
    expected = run.fill()
    run.pool = run.pool.truncate(int32(63, 60))
    assert int(run.pool.num_live) == 2
    run.pool, ok = run.pool.extend(int32(66, 130))
    assert ok.all() and run.pool.check()
    positions = run.positions(130)
    fresh = (positions < run.pool.kv_lens[:, None]) & (positions >= int32([63], [60]))
    new = [run.write(layer, positions, fresh, seed=20 + layer) for layer in (0, 1)]
    for layer in (0, 1):
        read = run.read(layer, 130)
        for request, (kept, length) in enumerate(((63, 66), (60, 130))):
            np.testing.assert_array_equal(read[request, :kept], expected[layer][request, :kept])
            np.testing.assert_array_equal(read[request, kept:length], new[layer][request, kept:length])
