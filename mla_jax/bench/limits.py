"""What the machine can do, measured: bytes that it reads or copies, and products that it makes, in a second."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from mla_jax.bench.cases import Case, draw
from mla_jax.bench.timing import Program, Times

READ, COPY = "read", "copy"  # names of programs; the others are products, by the name of the factors' dtype


@dataclass(frozen=True)
class Limits:
    """In 10⁹ bytes and 10¹² FLOP per second.

    Attributes:
        read_gbps, copy_gbps: of a large array.
        matmul_tflops: by dtype of the factors.
        spread: least and most of all rounds, under the same names.
    """

    read_gbps: float
    copy_gbps: float
    matmul_tflops: dict[str, float]
    spread: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, times: Mapping[str, Times]) -> "Limits":
        """From the rounds of `limit_programs`."""
        size, side = _sizes()
        work = {READ: size / 1e9, COPY: 2 * size / 1e9}
        rates = {name: _rates(work.get(name, 2 * side**3 / 1e12), found) for name, found in times.items()}
        (read, read_spread), (copied, copy_spread) = rates.pop(READ), rates.pop(COPY)
        products = {name: spread for name, (_, spread) in rates.items()}
        spread = {"read_gbps": read_spread, "copy_gbps": copy_spread, "matmul_tflops": products}
        return cls(read, copied, {name: rate for name, (rate, _) in rates.items()}, spread)

    def seconds(self, case: Case) -> float:
        """The least that a call of this case can take."""
        tflops = max(self.matmul_tflops[name] for name in factors(case))
        return max(case.flops / (tflops * 1e12), case.read_bytes / (max(self.read_gbps, self.copy_gbps) * 1e9))


def factors(case: Case) -> list[str]:
    """The dtypes whose products limit a case, by the fastest of them.

    For e4m3 both: kernels multiply queries with keys in e4m3 and may make the other half of the products, those with
    values, in 16 bits; none can do more than all of them in the faster one.
    """
    return sorted({case.query_dtype.name, "bfloat16"} if case.query_dtype.itemsize == 1 else {case.query_dtype.name})


def limit_programs(dtypes: Iterable[str]) -> dict[str, Program]:
    """A sum and a copy of an array far larger than any cache, and a large product in each of these dtypes.

    Of random numbers: products of equal ones take less power, and run faster where power is the limit.
    """
    size, side = _sizes()
    x = draw(jax.random.key(0), (size // 2 // 1024, 1024), jnp.dtype(jnp.bfloat16))
    found = {
        READ: _program(lambda v: jnp.sum(v, axis=1, dtype=jnp.float32), x),
        COPY: _program(jnp.negative, x),
    }
    for name in sorted(set(dtypes)):
        found[name] = _program(_product, draw(jax.random.key(0), (side, side), jnp.dtype(name)))
    return found


def _sizes() -> tuple[int, int]:
    """Bytes that are read; rows and columns that are multiplied."""
    return (2**26, 512) if jax.default_backend() == "cpu" else (2**32, 8192)


def _product(v: jax.Array) -> jax.Array:
    # Rows by rows, the only order in which cuBLAS multiplies e4m3.
    result = jnp.bfloat16 if v.dtype.itemsize == 1 else v.dtype
    return jax.lax.dot_general(v, v, (((1,), (1,)), ((), ())), preferred_element_type=result)


def _program(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Program:
    compiled = jax.jit(function).lower(x).compile()
    return Program(lambda: compiled(x))


def _rates(work: float, times: Times) -> tuple[float, list[float]]:
    """Of the median round; of the slowest and the fastest."""
    median, slowest, fastest = (
        float(f"{work / seconds:.4g}") for seconds in (times.median, max(times.rounds), min(times.rounds))
    )
    return median, [slowest, fastest]
