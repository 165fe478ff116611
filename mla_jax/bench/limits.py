"""What the machine can do, measured: bytes that it reads or copies, and products that it makes, in a second."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mla_jax.bench.timing import Program, measure


@dataclass(frozen=True)
class Limits:
    """In 10⁹ bytes and 10¹² FLOP per second."""

    read_gbps: float
    copy_gbps: float
    matmul_tflops: float

    def seconds(self, flops: float, read_bytes: float) -> float:
        """The least that a call with so much work can take."""
        return max(flops / (self.matmul_tflops * 1e12), read_bytes / (max(self.read_gbps, self.copy_gbps) * 1e9))


def measure_limits(dtype: jnp.dtype, rounds: int = 5) -> Limits:
    """A sum and a copy of an array far larger than any cache, and a large product in dtype (bf16 for 8-bit ones).

    Of random numbers: products of equal ones take less power, and run faster where power is the limit.
    """
    on_cpu = jax.default_backend() == "cpu"
    size, side = (2**26, 512) if on_cpu else (2**32, 8192)  # bytes; rows and columns
    x = _draw((size // 2 // 1024, 1024), jnp.bfloat16)
    a = _draw((side, side), dtype if jnp.dtype(dtype).itemsize > 1 else jnp.bfloat16)
    programs = {
        "read": _program(lambda v: jnp.sum(v, axis=1, dtype=jnp.float32), x),
        "copy": _program(jnp.negative, x),
        "matmul": _program(lambda v: jnp.matmul(v, v), a),
    }
    times = measure(programs, 1, rounds)
    return Limits(
        read_gbps=round(size / times["read"].median / 1e9, 1),
        copy_gbps=round(2 * size / times["copy"].median / 1e9, 1),
        matmul_tflops=round(2 * side**3 / times["matmul"].median / 1e12, 3),
    )


@jax.jit(static_argnums=(0, 1))
def _draw(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def _program(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> Program:
    compiled = jax.jit(function).lower(x).compile()
    return Program(lambda: compiled(x))
