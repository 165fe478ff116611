"""Runs the cases of a benchmark, in this process or in several that compile at once and then measure in turns."""

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mla_jax.bench.cases import Case
from mla_jax.bench.limits import Limits
from mla_jax.bench.run import Prepared, Wanted, prepare, time_prepared

PATIENCE = 600  # seconds in which all processes must have compiled
Row = dict[str, Any]


def run_cases(cases: Sequence[Case], limits: Limits, wanted: Wanted, jobs: int) -> Iterator[Row]:
    """A row per case as they come; one of a case that cannot run says why under `skipped`, or under `failed`."""
    if jobs == 1:
        for case in cases:
            prepared = _prepare(case, limits, wanted)
            yield _time(prepared, limits, wanted)
        return
    yield from _run_in_processes(cases, limits, wanted, min(jobs, len(cases)))


def _run_in_processes(cases: Sequence[Case], limits: Limits, wanted: Wanted, jobs: int) -> Iterator[Row]:
    # Most of the time goes into tracing and lowering, in Python: threads would not help. And nobody measures before
    # all have compiled, since short programs are late on a machine whose cores are busy.
    context = multiprocessing.get_context("spawn")
    compiled, turn, rows = context.Barrier(jobs), context.Lock(), context.Queue()
    shares = [list(cases[i::jobs]) for i in range(jobs)]
    workers = [
        context.Process(target=_work, args=(share, limits, wanted, compiled, turn, rows), daemon=True)
        for share in shares
    ]
    for worker in workers:
        worker.start()
    missing = [case.name for case in cases]
    while missing:
        try:
            row = rows.get(timeout=1)
        except queue.Empty:
            # One that was killed holds its turn for ever, and the others would wait for it.
            if any(worker.exitcode for worker in workers):
                for worker in workers:
                    worker.terminate()
                break
            if any(worker.is_alive() for worker in workers):
                continue
            break
        missing.remove(row["case"])
        yield row
    yield from ({"case": name, "failed": "its process, or one that it waited for, ended"} for name in missing)
    for worker in workers:
        worker.join(timeout=10)


def _work(share: list[Case], limits: Limits, wanted: Wanted, compiled: Any, turn: Any, rows: Any) -> None:
    prepared = [_prepare(case, limits, wanted) for case in share]
    with contextlib.suppress(threading.BrokenBarrierError):  # a process has ended, or is late
        compiled.wait(PATIENCE)
    with turn:
        for one in prepared:
            rows.put(_time(one, limits, wanted))


def _prepare(case: Case, limits: Limits, wanted: Wanted) -> Prepared | Row:
    try:
        return prepare(case, limits, wanted)
    except Exception as error:
        return _reason(case, error)


def _time(prepared: Prepared | Row, limits: Limits, wanted: Wanted) -> Row:
    if not isinstance(prepared, Prepared):
        return prepared
    try:
        return time_prepared(prepared, limits, wanted.rounds)
    except Exception as error:
        return _reason(prepared.case, error)


def _reason(case: Case, error: Exception) -> Row:
    if isinstance(error, NotImplementedError):
        return {"case": case.name, "skipped": str(error)}
    return {"case": case.name, "failed": f"{type(error).__name__}: {error}"[:1000]}
