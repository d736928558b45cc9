"""Eager call overhead: the public function against the jitted kernel it ends in, microseconds."""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp

from bench import report
from ejkernel.modules import flash_attention
from ejkernel.modules.bench.timing import time_together


def main(args: argparse.Namespace) -> int:
    """A call small enough that dispatch is what is timed; each call waits for its result."""
    q = jnp.ones((1, 16, 1, 16), jnp.float32)
    jitted = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True))
    times = time_together(
        {
            "eager": lambda: jax.block_until_ready(flash_attention(q, q, q, causal=True)),
            "jitted": lambda: jax.block_until_ready(jitted(q, q, q)),
        },
        rounds=max(args.rounds, 15),
        target_s=args.target_s,
    )
    micro = {name: t.median * 1e6 for name, t in times.items()}
    micro["overhead"] = micro["eager"] - micro["jitted"]
    report.write_json(args.out, "overhead", micro)
    for name, value in micro.items():
        print(f"{name}: {value:.1f} us")
    print(f"jaxpr under jit: {jax.make_jaxpr(jitted)(q, q, q)}"[:400], file=sys.stderr)
    return 0
