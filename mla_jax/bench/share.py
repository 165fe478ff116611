"""The cases that one process compiles and times, here or in a process of its own."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from mla_jax.bench.cases import Case
from mla_jax.bench.run import Ready, Wanted, prepare
from mla_jax.bench.timing import Program

Reason = dict[str, str]  # why a case has no times: a sentence under `skipped` or `failed`
Found = dict[int, dict[str, float] | Reason]  # of one round, by case: seconds by program


class Share(Protocol):
    """Cases by their number, compiled and then timed as often as `round` is called."""

    def begin(self, cases: Mapping[int, Case]) -> None:
        """Forget the former cases and compile these."""

    def ready(self) -> Iterator[tuple[int, Ready | Reason]]:
        """Each of the cases when it is compiled, in order."""

    def round(self) -> Found:
        """Time each program of each case once."""


class Here:
    """A `Share` in this process."""

    def __init__(self, wanted: Wanted):
        self._wanted = wanted
        self._cases: Mapping[int, Case] = {}
        self._programs: dict[int, dict[str, Program]] = {}
        self._rounds = 0

    def begin(self, cases: Mapping[int, Case]) -> None:
        """See `Share`."""
        self._programs.clear()
        gc.collect()  # arrays of the former cases
        self._cases = cases

    def ready(self) -> Iterator[tuple[int, Ready | Reason]]:
        """See `Share`."""
        for at, case in self._cases.items():
            try:
                ready, self._programs[at] = prepare(case, self._wanted)
            except Exception as error:
                yield at, _reason(error)
            else:
                yield at, ready

    def round(self) -> Found:
        """See `Share`."""
        found: Found = {}
        self._rounds += 1
        for at, programs in list(self._programs.items()):
            names = list(programs)
            if self._rounds % 2 == 0:  # who comes behind a heavy load finds a slower card: each does as often
                names.reverse()
            try:
                seconds = {name: programs[name].seconds() for name in names}
                found[at] = {name: seconds[name] for name in programs}
            except Exception as error:
                found[at] = _reason(error)
                del self._programs[at]
        return found


class Elsewhere:
    """A `Share` in a process of its own; when that has ended, its cases have failed, and others go on."""

    def __init__(self, wanted: Wanted):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        with _interrupts_ignored():
            context.Process(target=_serve, args=(theirs, wanted), daemon=True).start()
        theirs.close()  # so that reading fails when the process has ended
        self._cases: Mapping[int, Case] = {}

    def begin(self, cases: Mapping[int, Case]) -> None:
        """See `Share`."""
        self._cases = cases
        self._send(cases)

    def ready(self) -> Iterator[tuple[int, Ready | Reason]]:
        """See `Share`."""
        for at in self._cases:
            yield at, self._receive() or _ended()

    def round(self) -> Found:
        """See `Share`."""
        self._send(None)
        found = self._receive()
        return {at: _ended() for at in self._cases} if found is None else found

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._connection.close()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._connection.close()
            return None


def _serve(connection: Any, wanted: Wanted) -> None:
    """Answers an `Elsewhere`, while there is one: cases with each that is ready, None with a round."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share = Here(wanted)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other end is closed: all is done
        while True:
            cases = connection.recv()
            if cases is None:
                connection.send(share.round())
                continue
            share.begin(cases)
            for _, ready in share.ready():
                connection.send(ready)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that start here ignore them from their first moment: the parent gets them too, and says so."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change that
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    # However it ends, and whatever this process is doing: a signal that kills the parent runs no code there.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _ended() -> Reason:
    return {"failed": "its process ended"}


def _reason(error: Exception) -> Reason:
    if isinstance(error, NotImplementedError):
        return {"skipped": str(error)}
    return {"failed": f"{type(error).__name__}: {error}"[:1000]}
