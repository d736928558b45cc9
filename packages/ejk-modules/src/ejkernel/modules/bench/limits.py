"""Limits of this machine: the rates of a large matmul and a large copy, measured in the run."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.modules.bench.timing import time_together

ABOVE = (
    "Over 100%: the bound counts every operand once, at the rate of a copy too large for any "
    "cache, and every operation at the rate of one large matmul. A call whose operands stay in a "
    "cache is faster than that copy, on a CPU several times. Where power limits the chip, a matmul "
    "in another dtype, or of values whose bits change less, is faster than that matmul."
)


@dataclass(frozen=True)
class Limits:
    """``flops``: rate of matmuls by dtype, FLOP/s. ``bytes_per_s``: read plus written."""

    flops: dict[str, float]
    bytes_per_s: float

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """Returns the least time for this work: the slower of arithmetic and memory."""
        return max(self._both(flops, moved, dtype))

    def bound(self, flops: float, moved: float, dtype: str) -> str:
        """Returns the binding limit: "arithmetic" or "memory"."""
        arithmetic, memory = self._both(flops, moved, dtype)
        return "arithmetic" if arithmetic >= memory else "memory"

    def _both(self, flops: float, moved: float, dtype: str) -> tuple[float, float]:
        rate = self.flops.get(dtype, max(self.flops.values()))
        return flops / rate, moved / self.bytes_per_s


def measure_limits(dtypes: tuple[str, ...], *, target_s: float = 0.2, rounds: int = 9) -> Limits:
    """Times a matmul in each dtype and a copy, both too large for any cache."""
    cpu = jax.default_backend() == "cpu"
    n = 2048 if cpu else 8192
    megabytes = 128 if cpu else 4096
    pace = {"target_s": target_s, "rounds": rounds}
    rates: dict[str, float] = {}
    narrow = [dtype for dtype in dtypes if jnp.dtype(dtype).itemsize == 1]
    wide = dict.fromkeys([x for x in dtypes if x not in narrow] + ["bfloat16"] * bool(narrow))
    for dtype in wide:
        a, b = (
            jax.random.normal(jax.random.key(i), (n, n), jnp.float32).astype(dtype) for i in (0, 1)
        )
        product = jax.jit(jnp.matmul)
        timed = time_together({"product": lambda f=product, a=a, b=b: f(a, b)}, **pace)
        rates[dtype] = 2 * n**3 / timed["product"].median
    # XLA may convert operands of 8 bits; matrix units take them at twice the rate of 16 bits
    rates |= {dtype: 2 * rates["bfloat16"] for dtype in narrow}
    x = jnp.arange(megabytes * 2**20 // 4, dtype=jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    seconds = time_together({"copy": lambda: copy(x)}, **pace)["copy"].median
    return Limits(rates, 2 * x.nbytes / seconds)
