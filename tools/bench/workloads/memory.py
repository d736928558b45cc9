"""Peak memory of flash_attention forward and backward by length, MiB, each in a new process."""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench import report

LENGTHS = (4096, 8192, 16384)

PROGRAM = """
import resource, sys, jax, jax.numpy as jnp
from ejkernel.modules import flash_attention
s = int(sys.argv[1])
q, k, v = (jax.random.normal(key, (1, s, 8, 64)) for key in jax.random.split(jax.random.key(0), 3))
def loss(q, k, v):
    return jnp.sum(flash_attention(q, k, v, causal=True) ** 2)
step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(step(q, k, v))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(step.memory_analysis().temp_size_in_bytes / 2**20, (after - before) / 2**10)
"""


def main(args: argparse.Namespace) -> int:
    table = {}
    for s in LENGTHS:
        out = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(s)], check=True, capture_output=True, text=True
        )
        planned, seen = map(float, out.stdout.split()[-2:])
        table[s] = {"planned_temp_mb": planned, "resident_growth_mb": seen}
        print(f"S={s}: compiler's temporaries {planned:.1f} MiB, resident growth {seen:.1f} MiB")
    report.write_json(args.out, "memory", table)
    return 0
