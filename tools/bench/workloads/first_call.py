"""Seconds that a new process waits for its first call, over what JAX's own compile takes.

Three processes a case, on a GPU some two minutes: "cold" has an empty cache of compiled kernels,
"warm" the cache that the first one left, "JAX" compiles plain attention of the same sizes. With jax
imported and the device in use, the clock runs while the package is imported, and from the call to
its result: tracing, compiling, loading and running.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

CASES = (
    ("flash_attention", "short-d128-s1024-b32", "fwd"),
    ("flash_attention", "short-d128-s1024-b32", "fwd+bwd"),
    ("page_attention", "decode-b8-1k", "fwd"),
)


def child(operation: str, name: str, mode: str, kind: str) -> None:
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.dot(jnp.ones((128, 128)), jnp.ones((128, 128))))
    start = time.perf_counter()
    from ejkernel.modules.bench.case import forward_and_backward, ours
    from ejkernel.modules.bench.peers import peers_of
    from ejkernel.modules.workloads import call_of
    from ejkernel.modules.workloads.find import shapes_of
    from ejkernel.ops import policy_override

    imported = 0.0 if kind == "JAX" else time.perf_counter() - start
    call = call_of(shapes_of(operation, name)[0], operation)
    arrays = jax.block_until_ready(tuple(call.make().values()))
    f = peers_of(call)["jax-xla"] if kind == "JAX" else ours(call)
    assert not isinstance(f, str), f
    if mode == "fwd+bwd":
        f = forward_and_backward(f, tuple(call.names.index(n) for n in call.gradients))
    start = time.perf_counter()
    with policy_override(autotune=False):
        jax.block_until_ready(jax.jit(f)(*arrays))
    print(f"seconds {time.perf_counter() - start + imported:.3f}")


def seconds(case: tuple[str, ...], kind: str, cache: str) -> float:
    env = os.environ | {"EJKERNEL_CACHE_DIR": cache, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-m", "bench.workloads.first_call", *case, kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(case)}, {kind}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split("seconds ")[1])


def main(args: argparse.Namespace) -> int:
    """Exit status 1: a warm call took longer than ``--limit`` seconds over JAX's own."""
    from bench import report  # imports the package, which a child does by the clock

    times = {}
    print(f"{'first call, seconds':56s} {'JAX':>6} {'cold':>6} {'warm':>6} {'warm over JAX':>14}")
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm, plain = (seconds(case, kind, cache) for kind in ("cold", "warm", "JAX"))
        name, over = " ".join(case), warm - plain
        times[name] = {"jax": plain, "cold": cold, "warm": warm, "over": over}
        print(f"{name:56s} {plain:6.2f} {cold:6.2f} {warm:6.2f} {over:14.2f}", flush=True)
    report.write_json(args.out, "first_call", times)
    return int(args.limit is not None and any(x["over"] > args.limit for x in times.values()))


if __name__ == "__main__":
    child(*sys.argv[1:])
