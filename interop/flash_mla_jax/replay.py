"""FlashMLA as PyTorch runs it, for comparison: its kernels alone, in a CUDA graph that torch captures and replays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from flash_mla_jax.dlpack import to_torch
from flash_mla_jax.provider import DENSE, find

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
        queries: each `[b, s_q, h_q, 576]` bf16 or fp16; the cache, `[num_blocks, 64, 576]`, and the rest are shared.

    Returns:
        A function that starts the graph and returns its results, (out, lse) for each query, as torch tensors that the
        next start overwrites; and one that waits for the GPU.

    Raises:
        UnavailableError: FlashMLA's dense kernel cannot run here.
    """
    kernel = find().kernel(DENSE)
    import torch

    q = [to_torch(x) for x in queries]
    cache, table, lens = (to_torch(x) for x in (k_cache, block_table, cache_seqlens))
    cache = cache.unsqueeze(2)

    def call(x: Any, *metadata: Any) -> Any:
        return kernel(x, cache, head_dim_v, lens, table, softmax_scale, True, *metadata)

    _, _, *metadata = call(q[0], None, None)  # outside capture: it loads its module, and computes the metadata
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(x, *metadata)[:2] for x in q]

    def start() -> Any:
        graph.replay()
        return results

    return start, lambda _: torch.cuda.synchronize()
