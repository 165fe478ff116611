"""A case's programs, from `prepare`, which compiles them, and the row that their times make."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.attention.api import mla_decode, step_schedule
from mla_jax.bench.cases import DIM, LATENT, Arrays, Case, make_arrays
from mla_jax.bench.limits import Limits
from mla_jax.bench.settings import parse_settings
from mla_jax.bench.timing import Program, Times

SCALE = DIM**-0.5
OURS, PEER = "ours", "peer"  # names of programs; the others are settings of the kernel


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is timed of every case.

    Attributes:
        implementation: of `mla_decode`; None is the fastest that can run.
        peer: FlashMLA, too.
        settings: of the Hopper kernel, to compare with its usual ones; see `bench.settings`.
        rounds: measurements.
    """

    implementation: str | Sequence[str] | None = None
    peer: bool = False
    settings: tuple[str, ...] = ()
    rounds: int = 15


@dataclasses.dataclass(frozen=True)
class Ready:
    """What is known of a case before it is timed.

    Attributes:
        implementation: that was chosen.
        differences: of each program's output from the peer's, if there is one.
    """

    implementation: str
    differences: dict[str, float]


def prepare(case: Case, wanted: Wanted) -> tuple[Ready, dict[str, Program]]:
    """Compile the programs of a case, and compare what they compute with the peer's.

    Several calls with queries of their own are one executable, which XLA captures into a graph; the schedule is made
    before, as a model makes it once for all layers.

    Raises:
        NotImplementedError: the implementation, its settings, or FlashMLA, cannot run here.
    """
    arrays = make_arrays(case, case.calls)
    chosen = case.implementation(wanted.implementation)
    programs = {OURS: _usual(case, arrays, chosen)}
    programs |= _with_settings(arrays, chosen, wanted.settings)
    if wanted.peer:
        programs[PEER] = flash_mla(case, arrays)
    for program in programs.values():
        program.warm_up()
    return Ready(chosen, _differences(programs) if wanted.peer else {}), programs


def row_of(case: Case, ready: Ready, times: Mapping[str, Times], limits: Limits) -> dict[str, Any]:
    """Time of one call, beside FlashMLA's if there is a peer, and beside the machine's limits."""
    median = times[OURS].median
    row: dict[str, Any] = {
        "case": case.name,
        "implementation": ready.implementation,
        "us": times[OURS].us,
        "spread_us": times[OURS].spread_us(),
        "rounds": len(times[OURS].rounds),
        "tflops": float(f"{case.flops / median / 1e12:.4g}"),
        "gbps": float(f"{case.read_bytes / median / 1e9:.4g}"),
        "percent_of_limit": round(100 * limits.seconds(case) / median, 1),
    }
    if PEER in times:
        row |= {"peer": "flash_mla", "peer_us": times[PEER].us, "peer_spread_us": times[PEER].spread_us()}
        row |= {"ratio": round(times[PEER].median / median, 4), "difference_from_peer": ready.differences[OURS]}
    others = [
        {"settings": name, "us": found.us, "spread_us": found.spread_us()}
        | ({"difference_from_peer": ready.differences[name]} if ready.differences else {})
        for name, found in times.items()
        if name not in (OURS, PEER)
    ]
    return row | ({"settings": others} if others else {})


def _usual(case: Case, arrays: Arrays, chosen: str) -> Program:
    """Calls as users make them."""
    q, cache = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays.queries[0], arrays.cache))
    schedule = step_schedule(chosen, q, cache, arrays.kv_lens)

    def call(q: Any, cache: Any, table: Any, lens: Any, schedule: Any) -> Any:
        options = {"d_v": LATENT, "sm_scale": SCALE, "schedule": schedule, "implementation": chosen}
        return mla_decode(q, cache, table, lens, **options)

    args = _arguments(arrays, schedule)
    compiled = _compile(call, args)
    return Program(lambda: compiled(*args), calls=len(arrays.queries))


def _with_settings(arrays: Arrays, chosen: str, settings: Sequence[str]) -> dict[str, Program]:
    """Calls of the Hopper kernel with other settings."""
    if not settings:
        return {}
    if chosen != "mosaic_gpu":
        raise NotImplementedError(f"settings are for mosaic_gpu, and {chosen} is timed.")
    from mla_jax.attention.mosaic_gpu import launch

    q = arrays.queries[0]

    @functools.cache
    def compiled(config: Any) -> Any:
        def call(q: Any, cache: Any, table: Any, lens: Any, schedule: Any) -> Any:
            scale = jnp.full((1,), SCALE, jnp.float32)
            return launch.decode_with(config, q, cache, table, lens, scale, None, schedule, causal=q.shape[1] > 1)

        return _compile(call, _arguments(arrays, launch.schedule_for(q, arrays.kv_lens)))

    def program(text: str) -> Program:
        config = parse_settings(text, launch.config_for(q))
        args = _arguments(arrays, launch.schedule_for(q, arrays.kv_lens, config))
        kernel = compiled(dataclasses.replace(config, request_overhead=1))  # which is the schedule's matter
        return Program(lambda: kernel(*args), calls=len(arrays.queries))

    return {text: program(text) for text in settings}


def _arguments(arrays: Arrays, schedule: Any) -> tuple[Any, ...]:
    return arrays.queries, arrays.cache, arrays.block_table, arrays.kv_lens, schedule


def _compile(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One executable of a call for each query."""

    def calls(queries: list[jax.Array], *shared: Any) -> list[Any]:
        return [call(q, *shared) for q in queries]

    return jax.jit(calls).lower(*args).compile()


def _differences(programs: dict[str, Program]) -> dict[str, float]:
    """How far the first output of each program lies from the peer's: the RMS of the difference over that of theirs."""

    def output(program: Program) -> np.ndarray:
        result = program.start()
        program.wait(result)
        out = result[0][0]
        return np.asarray(out if isinstance(out, jax.Array) else out.float().cpu(), np.float32)

    theirs = output(programs[PEER])
    size = np.linalg.norm(theirs)
    mine = {name: output(program) for name, program in programs.items() if name != PEER}
    return {name: float(f"{np.linalg.norm(out - theirs) / size:.2g}") for name, out in mine.items()}


def peer_cannot_run() -> str | None:
    """Why FlashMLA cannot run here, in one sentence; None if it can."""
    try:
        from flash_mla_jax import cannot_run
    except ImportError as e:
        return f"the peer needs flash_mla_jax and torch: pip install '.[flashmla]' ({e})"
    return cannot_run()


def flash_mla(case: Case, arrays: Arrays) -> Program:
    """The same calls of FlashMLA's own kernels, in a graph that torch captures.

    Of its bf16 kernel for fp8_ds_mla, which its other kernels read with a list of tokens for each query only.

    Raises NotImplementedError in one sentence if they cannot run here.
    """
    if arrays.cache.dtype == jnp.float32:
        raise NotImplementedError(f"FlashMLA's dense kernels take no caches in {case.format}.")
    reason = peer_cannot_run()
    if reason is not None:
        raise NotImplementedError(f"FlashMLA cannot run: {reason.rstrip('.')}.")
    from flash_mla_jax import replay

    if arrays.cache.dtype == jnp.uint8:
        arrays = make_arrays(dataclasses.replace(case, format="bf16"), len(arrays.queries))
    start, wait = replay.dense_decode(arrays.queries, arrays.cache, arrays.block_table, arrays.kv_lens, LATENT, SCALE)
    return Program(start, wait, len(arrays.queries))
