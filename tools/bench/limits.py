"""What this machine can do today: a large matrix product and a large copy, measured in the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from bench.timing import time_together


@dataclass(frozen=True)
class Limits:
    """``flops``: matrix-product rate by dtype, FLOP/s. ``bytes_per_s``: read plus written."""

    flops: dict[str, float]
    bytes_per_s: float

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """The least time for this work: the slower of arithmetic and memory."""
        rate = self.flops.get(dtype, max(self.flops.values()))
        return max(flops / rate, moved / self.bytes_per_s)

    def asdict(self) -> dict:
        return asdict(self)


def measure_limits(dtypes: tuple[str, ...]) -> Limits:
    cpu = jax.default_backend() == "cpu"
    n = 2048 if cpu else 8192
    megabytes = 128 if cpu else 4096
    rates = {}
    for dtype in dtypes:
        a, b = (
            jax.random.normal(jax.random.key(i), (n, n), jnp.float32).astype(dtype) for i in (0, 1)
        )
        product = jax.jit(jnp.matmul)
        seconds = time_together({"product": lambda f=product, a=a, b=b: f(a, b)})["product"].median
        rates[dtype] = 2 * n**3 / seconds
    x = jnp.arange(megabytes * 2**20 // 4, dtype=jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    seconds = time_together({"copy": lambda: copy(x)})["copy"].median
    return Limits(rates, 2 * x.nbytes / seconds)
