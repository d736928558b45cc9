"""Seconds a new process waits for its first call, over what JAX's own compile of the like takes.

    python tools/gpu/first_call.py             # three processes a case: two minutes
    python tools/gpu/first_call.py --limit 1.5 # exits with 1 when a warm call is slower than that

Each row is one kind of call. "cold" starts with an empty cache of compiled kernels, "warm" is
another process with the cache that the first one left, "JAX" is a third that compiles plain
attention of the same sizes. The clock starts with jax imported and the device in use, and ends
with the result: it counts the import of the package, tracing, compiling, loading and running.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkout

checkout.use()

CASES = ("flash forward", "flash forward and backward", "page_attention")


def arrays(case):
    import jax
    import jax.numpy as jnp

    if case == "page_attention":
        b, pages, size, h, hk, d = 8, 512, 16, 32, 8, 128
        cache = jnp.ones((pages, size, hk, d), jnp.bfloat16)
        lens = jnp.full((b,), 1000, jnp.int32)
        tables = jnp.arange(b * 64, dtype=jnp.int32).reshape(b, 64) % pages
        given = jnp.ones((b, h, d), jnp.bfloat16), cache, cache, lens, tables
    else:
        given = (jnp.ones((2, 1024, 16, 128), jnp.bfloat16),) * 3
    return jax.block_until_ready(given)


def ours(case):
    if case == "page_attention":
        from ejkernel.kernels.triton.page_attention import page_attention

        return page_attention
    from ejkernel.kernels.triton.flash_attention import flash_attention

    return lambda q, k, v: flash_attention(q, k, v, causal=True)


def plain(case):
    import jax

    def paged(q, k, v, lens, tables):
        b, columns = tables.shape
        k, v = (x[tables].reshape(b, columns * x.shape[1], *x.shape[2:]) for x in (k, v))
        return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lens)[:, 0]

    def causal(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    return paged if case == "page_attention" else causal


def child(case: str, kind: str) -> None:
    import jax
    import jax.numpy as jnp

    given = arrays(case)
    jax.block_until_ready(jnp.dot(given[0][0, 0], given[0][0, 0].T))
    start = time.perf_counter()
    f = plain(case) if kind == "JAX" else ours(case)
    if case.endswith("backward"):
        inner = f
        f = jax.grad(lambda *x: inner(*x).astype(jnp.float32).sum(), (0, 1, 2))
    jax.block_until_ready(jax.jit(f)(*given))
    print(f"seconds {time.perf_counter() - start:.3f}")


def seconds(case: str, kind: str, cache: str) -> float:
    env = os.environ | {"EJKERNEL_CACHE_DIR": cache, "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, __file__, "--child", case, kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{case}, {kind}:\n{done.stderr[-2000:]}")
    return float(done.stdout.split("seconds ")[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help="most seconds over JAX's own, warm")
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    print(f"{'first call, seconds':28s} {'JAX':>6} {'cold':>6} {'warm':>6} {'warm over JAX':>14}")
    slow = 0
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            cold, warm, jax_own = (seconds(case, kind, cache) for kind in ("cold", "warm", "JAX"))
        slow += options.limit is not None and warm - jax_own > options.limit
        print(
            f"{case:28s} {jax_own:6.2f} {cold:6.2f} {warm:6.2f} {warm - jax_own:14.2f}", flush=True
        )
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
