"""Small calls of the Triton kernels, for a checker of memory accesses on this GPU.

    python tools/gpu/check_memory.py                  # once plainly: compiles, and checks values
    compute-sanitizer --tool memcheck --error-exitcode 9 python tools/gpu/check_memory.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/gpu/check_memory.py

Lengths are odd, so that every tile at an end is cut. Calls are not jitted and the allocator is
CUDA's own: each operand and result is an allocation with an end of its own, which a checker can
tell from its neighbours. Exits with 1 when a result is not finite.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
sys.path.insert(0, __file__.rsplit("/", 3)[0])

import numpy as np
from tools.gpu.common import jax, jnp

from ejkernel.kernels.triton.flash_attention import flash_attention
from ejkernel.kernels.triton.page_attention import page_attention
from ejkernel.types import MaskInfo

BF, F32, I8, E4 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn
RNG = np.random.default_rng(0)


def normal(*shape, dtype=BF):
    return jnp.asarray(RNG.standard_normal(shape, np.float32), dtype)


# name: (q_len, kv_len, heads, kv_heads, d, dv, dtype), options
FLASH = {
    "full d64": ((67, 133, 2, 2, 64, 64, BF), {}),
    "causal gqa d128": ((131, 131, 4, 2, 128, 128, BF), dict(causal=True)),
    "d256": ((70, 70, 1, 1, 256, 256, BF), dict(causal=True)),
    "d80 window": ((97, 97, 2, 1, 80, 80, BF), dict(sliding_window=(20, 5))),
    "d40/24": ((65, 65, 1, 1, 40, 24, BF), {}),
    "everything": (
        (75, 75, 2, 1, 96, 96, BF),
        dict(causal=True, logits_soft_cap=9.0, dropout_prob=0.2, dropout_seed=3)
        | dict(bias=True, sinks=True, ids=True, dense=True),
    ),
    "bias": ((66, 130, 2, 2, 64, 64, BF), dict(bias=True)),
    "dropout": ((129, 129, 1, 1, 64, 64, BF), dict(dropout_prob=0.5, dropout_seed=1)),
    "packed": ((100, 100, 2, 2, 64, 64, BF), dict(causal=True, cu=(0, 33, 34, 100))),
    "float32": ((65, 65, 1, 1, 64, 64, F32), dict(causal=True)),
    "one query": ((1, 131, 2, 1, 128, 128, BF), {}),
}
# name: (context lengths, heads, kv heads, head dim, page size, cache dtype), options
PAGES = {
    "page 16": (((1, 17, 131), 4, 2, 64, 16, BF), {}),
    "page 1": (((5, 3), 2, 2, 64, 1, BF), {}),
    "int8": (((70, 0), 4, 1, 128, 16, I8), dict(k_scale=0.1, v_scale=0.1)),
    "float8 window": (((70, 33), 4, 2, 128, 32, E4), dict(sliding_window=20)),
}


def flash(name):
    (q_len, kv_len, h, hk, d, dv, dtype), options = FLASH[name]
    o, b = dict(options), 1 if "cu" in options else 2
    x = {
        "q": normal(b, q_len, h, d, dtype=dtype),
        "k": normal(b, kv_len, hk, d, dtype=dtype),
        "v": normal(b, kv_len, hk, dv, dtype=dtype),
    }
    if o.pop("bias", False):
        x["bias"] = normal(1, h, q_len, kv_len, dtype=dtype)
    if o.pop("sinks", False):
        x["sinks"] = normal(h, 1, dtype=F32)
    if o.pop("ids", False):
        ids = jnp.asarray(np.arange(q_len) // 30, jnp.int32)[None].repeat(b, 0)
        o["mask_info"] = MaskInfo.from_segments(ids)
    if o.pop("dense", False):
        o["attention_mask"] = jnp.asarray(RNG.random((b, 1, q_len, kv_len)) < 0.7)
    if "cu" in o:
        o["cum_seqlens_q"] = jnp.asarray(o.pop("cu"), jnp.int32)

    def run(x):
        return flash_attention(
            x["q"], x["k"], x["v"], x.get("bias"), softmax_aux=x.get("sinks"), **o
        )

    out, back = jax.vjp(run, x)
    return out, back(jnp.ones_like(out))


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
        caches.append(jnp.asarray(raw * 20 if kind == I8 else raw).astype(kind))
    lengths = jnp.asarray(lens, jnp.int32)
    return page_attention(
        normal(len(lens), h, d), *caches, lengths, jnp.asarray(tables), num_splits=2, **options
    )


def main() -> None:
    start, failed = time.time(), 0
    print(jax.devices()[0], flush=True)
    for kind, names, run in (("flash", FLASH, flash), ("page", PAGES, pages)):
        for name in names:
            before = time.time()
            out = jax.block_until_ready(run(name))
            good = all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(out))
            failed += not good
            mark = "ok  " if good else "FAIL"
            print(f"{mark} {kind} {name} [{time.time() - before:.1f}s]", flush=True)
    print(f"{failed} not finite; {time.time() - start:.0f}s in all")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
