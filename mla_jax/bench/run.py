"""Times the cases and puts the results in rows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.attention.api import mla_decode, step_schedule
from mla_jax.bench.cases import DIM, LATENT, Arrays, Case, make_arrays
from mla_jax.bench.limits import Limits
from mla_jax.bench.timing import Program, measure

SCALE = DIM**-0.5


def run_case(
    case: Case, limits: Limits, *, implementation: str | Sequence[str] | None, peer: bool, rounds: int
) -> dict[str, Any]:
    """A row: time of one call, beside FlashMLA's if a peer is wanted, and beside the machine's limits.

    Several calls with queries of their own are one executable, which XLA captures into a graph; the schedule is made
    before, as a model makes it once for all layers.

    Raises:
        NotImplementedError: the implementation, or FlashMLA, cannot run here.
    """
    seconds = limits.seconds(case.flops, case.read_bytes)
    calls = max(1, min(16, int(1e-3 / seconds)))
    arrays = make_arrays(case, calls)
    chosen, ours = _program(case, arrays, implementation)
    programs = {"ours": ours} | ({"peer": flash_mla(case, arrays)} if peer else {})
    times = measure(programs, calls, rounds)
    median = times["ours"].median
    row: dict[str, Any] = {
        "case": case.name,
        "implementation": chosen,
        "us": round(median * 1e6, 2),
        "spread_us": times["ours"].spread_us(),
        "tflops": float(f"{case.flops / median / 1e12:.4g}"),
        "gbps": float(f"{case.read_bytes / median / 1e9:.4g}"),
        "percent_of_limit": round(100 * seconds / median, 1),
    }
    if peer:
        theirs = times["peer"].median
        row |= {"peer": "flash_mla", "peer_us": round(theirs * 1e6, 2), "peer_spread_us": times["peer"].spread_us()}
        row["ratio"] = round(theirs / median, 4)
    return row


def _program(case: Case, arrays: Arrays, implementation: str | Sequence[str] | None) -> tuple[str, Program]:
    q, cache = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.queries[0], arrays.cache))
    chosen = case.implementation(implementation)
    schedule = step_schedule(chosen, q, cache, arrays.kv_lens)

    def calls(queries: list[jax.Array], cache: Any, table: Any, lens: Any, schedule: Any) -> list[Any]:
        options = {"d_v": LATENT, "sm_scale": SCALE, "schedule": schedule, "implementation": chosen}
        return [mla_decode(q, cache, table, lens, **options) for q in queries]

    args = (arrays.queries, arrays.cache, arrays.block_table, arrays.kv_lens, schedule)
    compiled = jax.jit(calls).lower(*args).compile()
    return chosen, Program(lambda: compiled(*args))


def peer_cannot_run() -> str | None:
    """Why FlashMLA cannot run here, in one sentence; None if it can."""
    try:
        from flash_mla_jax import cannot_run
    except ImportError as e:
        return f"the peer needs flash_mla_jax and torch: pip install '.[flashmla]' ({e})"
    return cannot_run()


def flash_mla(case: Case, arrays: Arrays) -> Program:
    """The same calls of FlashMLA's own kernels, in a graph that torch captures.

    Raises NotImplementedError in one sentence if they cannot run here.
    """
    if arrays.cache.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"FlashMLA's dense kernel takes caches in bf16 and fp16 here, not {case.format}.")
    reason = peer_cannot_run()
    if reason is not None:
        raise NotImplementedError(f"FlashMLA cannot run: {reason.rstrip('.')}.")
    from flash_mla_jax import replay

    start, wait = replay.dense_decode(arrays.queries, arrays.cache, arrays.block_table, arrays.kv_lens, LATENT, SCALE)
    return Program(start, wait)
