"""FlashMLA as PyTorch runs it, for comparison: its kernels alone, in a CUDA graph that torch captures and replays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from flash_mla_jax.dlpack import to_torch
from flash_mla_jax.provider import DENSE, DENSE_FP8, METADATA_FP8, find

Replay = tuple[Callable[[], Any], Callable[[Any], None]]


def dense_decode(
    queries: Sequence[jax.Array],
    k_cache: jax.Array,
    block_table: jax.Array,
    cache_seqlens: jax.Array,
    head_dim_v: int,
    softmax_scale: float,
) -> Replay:
    """One dense decode for each query, causal, in one graph, the tile metadata computed before.

    Args:
        queries: each `[b, s_q, h_q, 576]` bf16 or fp16, or float8_e4m3fn with factors of 1; the cache,
            `[num_blocks, 64, 576]` of the same dtype, and the rest are shared. With float8 no request may be empty.

    Returns:
        A function that starts the graph and returns its results, (out, lse) for each query, as torch tensors that the
        next start overwrites; and one that waits for the GPU.

    Raises:
        UnavailableError: FlashMLA's dense kernel cannot run here.
    """
    fp8 = queries[0].dtype.itemsize == 1
    provider = find()
    kernel = provider.kernel(DENSE_FP8 if fp8 else DENSE)
    import torch

    q = [to_torch(x) for x in queries]
    cache, table, lens = (to_torch(x) for x in (k_cache, block_table, cache_seqlens))
    cache = cache.unsqueeze(2)
    scales = [torch.ones(1, dtype=torch.float32, device="cuda")] * 2 if fp8 else []

    def call(x: Any, *metadata: Any) -> Any:
        return kernel(x, cache, head_dim_v, lens, table, softmax_scale, True, *metadata, *scales)

    # Outside capture: it loads its module, and computes the metadata.
    if fp8:
        metadata = provider.kernel(METADATA_FP8)(lens, q[0].shape[1] * q[0].shape[2], 1)
        call(q[0], *metadata)
    else:
        _, _, *metadata = call(q[0], None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(x, *metadata)[:2] for x in q]

    def start(keep_alive: Any = (q, cache, table, lens, metadata, scales)) -> Any:
        graph.replay()  # it reads those by address
        return results

    return start, lambda _: torch.cuda.synchronize()
