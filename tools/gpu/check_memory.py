"""Small calls of the Triton kernels, for a checker of memory accesses on this GPU.

    python tools/gpu/check_memory.py  # once plainly: the kernels are on disk after it
    compute-sanitizer --tool memcheck --error-exitcode 9 python tools/gpu/check_memory.py --cached
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/gpu/check_memory.py --cached

Lengths are odd, so that every tile at an end is cut. Most calls are not jitted and the allocator is
CUDA's own: each operand and result is an allocation with an end of its own, which a checker can
tell from its neighbours. Exits with 1 when a result is not finite. Parallel processes compile the
kernels first, except with --cached.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.insert(0, __file__.rsplit("/", 3)[0])

import numpy as np
from tools.gpu.common import in_parallel, jax, jnp

from ejkernel.kernels.triton.flash_attention import flash_attention
from ejkernel.kernels.triton.page_attention import page_attention
from ejkernel.kernels.triton.targets import compile_for, current_target
from ejkernel.types import MaskInfo

BF, F32, I8, E4 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn
RNG = np.random.default_rng(0)


def normal(*shape, dtype=BF):
    # NumPy's cast is not one more program to compile
    return jnp.asarray(RNG.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


# name: (q_len, kv_len, heads, kv_heads, d, dv, dtype), options
FLASH = {
    "causal gqa d128": ((131, 131, 4, 2, 128, 128, BF), dict(causal=True)),
    "d256": ((70, 70, 1, 1, 256, 256, BF), dict(causal=True)),
    "d40/24 window": ((67, 133, 2, 2, 40, 24, BF), dict(sliding_window=(20, 5))),
    "bias sinks cap dense": (
        (75, 75, 2, 1, 96, 96, BF),
        dict(causal=True, logits_soft_cap=9.0, bias=True, sinks=True, dense=True),
    ),
    "dropout": ((129, 129, 1, 1, 64, 64, BF), dict(dropout_prob=0.5, dropout_seed=1)),
    "segments": ((100, 100, 2, 2, 64, 64, BF), dict(causal=True, ids=True)),
    "float32": ((65, 65, 1, 1, 64, 64, F32), dict(causal=True)),
}
# Operations outside the kernels are a program each, compiled for its shapes: here there would be
# too many of them, and arrays between kernels share an allocation instead.
JITTED = ("bias sinks cap dense", "dropout", "segments")
# name: (context lengths, heads, kv heads, head dim, page size, cache dtype), options
PAGES = {
    "page 16": (((1, 17, 131), 4, 2, 64, 16, BF), {}),
    "int8": (((70, 0), 4, 1, 128, 16, I8), dict(k_scale=0.1, v_scale=0.1)),
    "float8 window": (((70, 33), 4, 2, 128, 32, E4), dict(sliding_window=20)),
}


def flash(name):
    (q_len, kv_len, h, hk, d, dv, dtype), options = FLASH[name]
    o, b = dict(options), 2
    x = {
        "q": normal(b, q_len, h, d, dtype=dtype),
        "k": normal(b, kv_len, hk, d, dtype=dtype),
        "v": normal(b, kv_len, hk, dv, dtype=dtype),
    }
    if o.pop("bias", False):
        x["bias"] = normal(1, h, q_len, kv_len, dtype=dtype)
    if o.pop("sinks", False):
        x["sinks"] = normal(h, 1, dtype=F32)
    fixed = {}
    if o.pop("ids", False):
        fixed["ids"] = jnp.asarray((np.arange(q_len) // 30)[None].repeat(b, 0).astype(np.int32))
    if o.pop("dense", False):
        seen = RNG.random((b, 1, q_len, kv_len)) < 0.7
        fixed["dense"] = jnp.asarray(seen | np.eye(q_len, kv_len, dtype=bool))

    def whole(x, fixed):
        info = MaskInfo.from_segments(fixed["ids"]) if "ids" in fixed else None

        def run(x):
            return flash_attention(
                x["q"], x["k"], x["v"], x.get("bias"), softmax_aux=x.get("sinks"), mask_info=info,
                attention_mask=fixed.get("dense"), return_lse=True, **o,
            )  # fmt: skip

        out, back = jax.vjp(run, x)
        return out, back(jax.tree.map(jnp.ones_like, out))

    return (jax.jit(whole) if name in JITTED else whole)(x, fixed)


def pages(name):
    (lens, h, hk, d, size, kind), options = PAGES[name]
    counts = [-(-n // size) for n in lens]
    total, columns = sum(counts), max(1, *counts)
    order, tables, at = RNG.permutation(total), np.full((len(lens), columns), -1, np.int32), 0
    for row, n in enumerate(counts):
        tables[row, :n] = order[at : at + n]
        at += n
    caches = []
    for _ in range(2):
        raw = RNG.standard_normal((total, size, hk, d), np.float32)
        caches.append(jnp.asarray((raw * 20 if kind == I8 else raw).astype(jnp.dtype(kind))))
    lengths = jnp.asarray(lens, jnp.int32)
    return page_attention(
        normal(len(lens), h, d), *caches, lengths, jnp.asarray(tables), num_splits=2, **options
    )


CALLS = {f"flash {n}": (flash, n) for n in FLASH} | {f"page {n}": (pages, n) for n in PAGES}


def compile_ahead(call, target) -> None:
    """In a worker: the kernels of a call, into the disk cache."""
    run, name = CALLS[call]
    with compile_for(target):
        jax.jit(lambda: run(name)).trace().lower(lowering_platforms=(target.platform,))


def main() -> None:
    start, failed = time.time(), 0
    print(jax.devices()[0], flush=True)
    if "--cached" not in sys.argv[1:]:
        for error in filter(None, in_parallel((compile_ahead, n, current_target()) for n in CALLS)):
            print(error, flush=True)
        print(f"compiled [{time.time() - start:.1f}s]", flush=True)
    for call, (run, name) in CALLS.items():
        before = time.time()
        out = jax.block_until_ready(run(name))
        good = all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(out))
        failed += not good
        mark = "ok  " if good else "FAIL"
        print(f"{mark} {call} [{time.time() - before:.1f}s]", flush=True)
    print(f"{failed} not finite; {time.time() - start:.0f}s in all", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
