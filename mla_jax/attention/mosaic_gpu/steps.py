"""Work in steps, between which products are issued.

A warp that issues a product waits until the tensor cores have taken it, which is when those before it are nearly done:
so issuing a block's products takes as long as the products themselves, and what is to be computed meanwhile must be
done between them. Steps are generators, which run while the kernel is traced.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

type Steps[Result] = Generator[None, None, Result]


def no_steps() -> Steps[None]:
    """Nothing to do."""
    yield from ()


def interleave(issue: Sequence[Callable[[], Any]], steps: Steps[Any]) -> Any:
    """Issue some products, take a step, and so on until nothing of either is left; returns what the steps return."""
    result, over = None, False
    for some in issue:
        some()
        if not over:
            result, over = _next(steps)
    return result if over else finish(steps)


def finish[Result](steps: Steps[Result]) -> Result:
    """Take the steps that are left."""
    result, over = None, False
    while not over:
        result, over = _next(steps)
    return cast(Result, result)


def _next(steps: Steps[Any]) -> tuple[Any, bool]:
    """Take a step: what the steps return, and whether that was the last one."""
    try:
        next(steps)
    except StopIteration as end:
        return end.value, True
    return None, False
