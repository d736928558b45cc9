"""Resident memory after eager calls of ever new shapes, MiB, each operation in a new process.

A model that is called outside ``jax.jit`` with a sequence one token longer each time compiles a
program for each length. JAX keeps up to 4,096 of them, and on a CPU the process may end before
that, as each takes memory maps; the library keeps ``PROGRAMS_LIMIT``. What still grows after that
are JAX's own traces of the functions of jax.numpy, for which it has no limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from bench import report

CALLS = {
    "flash_attention": "flash_attention(q, q, q, causal=True)",
    "flash_attention, gradients": "jax.vjp(causal, q, q, q)[1](q)",
    "gla_attention": "gla_attention(q, q, q)",
    "jax.jit of jax.nn": "plain(q)",
}

PROGRAM = """
import sys
from functools import partial
import jax, numpy as np
from ejkernel.modules import flash_attention, gla_attention

causal = partial(flash_attention, causal=True)
plain = jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q, is_causal=True))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

def call(length):
    q = jax.device_put(np.ones((1, length, 2, 16), np.float32))
    jax.block_until_ready(eval(sys.argv[1]))

call(16)
start = resident()
every = max(1, int(sys.argv[2]) // 8)
for i in range(1, int(sys.argv[2]) + 1):
    call(16 + i)
    if i % every == 0:
        print(i, round(resident() - start), flush=True)
"""


def main(args: argparse.Namespace) -> int:
    """Prints the growth of resident memory over the first call by the number of shapes."""
    if not sys.platform.startswith("linux"):
        print("shapes: resident memory is read from /proc, which only Linux has", file=sys.stderr)
        return 2
    table = {}
    for name, call in CALLS.items():
        command = [sys.executable, "-c", PROGRAM, call, str(args.shapes)]
        out = subprocess.run(command, capture_output=True, text=True)
        if out.returncode > 0:
            raise SystemExit(f"{name}:\n{out.stderr[-2000:]}")
        table[name] = dict(map(int, line.split()) for line in out.stdout.splitlines())
        text = ", ".join(f"{i} shapes {mb} MiB" for i, mb in table[name].items())
        # a process without memory maps left is ended by a signal
        print(f"{name}: {text}" + (f", ended by signal {-out.returncode}" * (out.returncode < 0)))
    report.write_json(args.out, "shapes", table)
    return 0
