"""Backward of Mosaic GPU flash attention on this GPU: correctness, then speed of tile variants.

    timeout 200 python tools/gpu/check_mosaic_bwd.py             # both, under two minutes
    timeout 200 python tools/gpu/check_mosaic_bwd.py --only d64  # cases whose name has the word
    ... --tiles 64,128,2 --tiles 64,128,3                        # time these tiles too
    ... --no-time, --no-check

The smallest case comes first. The last lines are the tables.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

import numpy as np
from tools.gpu.common import jax, jnp, milliseconds

from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward, backward_tiles
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import BackwardTiles
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Band

CAUSAL = Band(None, 0)
# name: b, q_len, kv_len, h, hk, d, dv, options
CASES = {
    "tiny full d128": (1, 128, 128, 1, 1, 128, 128, {}),
    "tiny causal d128": (1, 128, 128, 1, 1, 128, 128, {"band": CAUSAL}),
    "full d128": (2, 1024, 1024, 4, 4, 128, 128, {}),
    "causal d128": (2, 1024, 1024, 4, 4, 128, 128, {"band": CAUSAL}),
    "full d128 f16": (1, 512, 512, 2, 2, 128, 128, {"dtype": "float16"}),
    "offset d128": (1, 640, 1024, 2, 2, 128, 128, {"band": Band(None, 384)}),
    "empty rows d128": (1, 640, 512, 2, 2, 128, 128, {"band": Band(None, -128)}),
    "window d128": (1, 1024, 1024, 2, 2, 128, 128, {"band": Band(-200, 0)}),
    "both sides window d128": (1, 1024, 1024, 2, 2, 128, 128, {"band": Band(-200, 100)}),
    "segments d128": (2, 1024, 1024, 2, 2, 128, 128, {"band": CAUSAL, "segments": 5}),
    "segments full d128": (1, 1024, 1024, 2, 2, 128, 128, {"segments": 5}),
    "cap causal d128": (1, 512, 512, 2, 2, 128, 128, {"band": CAUSAL, "soft_cap": 5.0}),
    "gqa causal d128": (1, 1024, 1024, 8, 2, 128, 128, {"band": CAUSAL}),
    "gqa full d128": (1, 512, 1024, 8, 2, 128, 128, {}),
    "odd full d128": (1, 1003, 777, 2, 2, 128, 128, {}),
    "odd causal d128": (2, 777, 1003, 2, 2, 128, 128, {"band": Band(None, 226)}),
    "long full d128": (1, 4096, 20480, 1, 1, 128, 128, {}),
    "full d64": (2, 1024, 1024, 4, 4, 64, 64, {}),
    "causal d64": (2, 1024, 1024, 4, 4, 64, 64, {"band": CAUSAL}),
    "odd causal d64": (2, 777, 1003, 2, 2, 64, 64, {"band": CAUSAL}),
    "gqa segments cap d64": (
        1, 1024, 1024, 4, 2, 64, 64, {"band": CAUSAL, "segments": 5, "soft_cap": 5.0},
    ),
    "full d256": (1, 512, 512, 2, 2, 256, 256, {}),
    "causal d256": (2, 1024, 1024, 2, 2, 256, 256, {"band": CAUSAL}),
    "odd gqa cap d256": (1, 777, 1003, 4, 2, 256, 256, {"band": CAUSAL, "soft_cap": 5.0}),
    "causal d192-128": (1, 1024, 1024, 2, 2, 192, 128, {"band": CAUSAL}),
    "odd full d192-128": (1, 777, 1003, 2, 2, 192, 128, {}),
}  # fmt: skip
# name: b, s, h, d, causal
TIMED = {
    "B4 S4k H16 D128 full": (4, 4096, 16, 128, False),
    "B4 S4k H16 D128 causal": (4, 4096, 16, 128, True),
    "B1 S16k H16 D128 full": (1, 16384, 16, 128, False),
    "B1 S16k H16 D128 causal": (1, 16384, 16, 128, True),
    "B8 S2k H32 D64 full": (8, 2048, 32, 64, False),
    "B8 S2k H32 D64 causal": (8, 2048, 32, 64, True),
    "B2 S8k H8 D256 full": (2, 8192, 8, 256, False),
    "B2 S8k H8 D256 causal": (2, 8192, 8, 256, True),
}


def draw(name):
    b, s, t, h, hk, d, dv, options = CASES[name]
    dtype = options.get("dtype", "bfloat16")
    problem = Problem(b, s, t, h, hk, d, dv, dtype, d**-0.5, options.get("soft_cap"))
    rng = np.random.default_rng(len(name))
    shapes = (b, s, h, d), (b, t, hk, d), (b, t, hk, dv), (b, s, h, dv)
    arrays = [jnp.asarray(rng.standard_normal(x, np.float32), dtype) for x in shapes]
    ids = None
    if count := options.get("segments"):
        cuts = np.sort(rng.integers(1, s, (b, count - 1)), axis=1)
        ids = jnp.asarray((np.arange(s) >= cuts[..., None]).sum(1), jnp.int32)
    return problem, options.get("band", Band()), arrays, ids


@functools.partial(jax.jit, static_argnums=(0, 1))
def reference(problem, band, q, k, v, do, ids):
    """Float32 gradients, lse and delta by whole matrices."""
    q, k, v, do = (x.astype(jnp.float32) for x in (q, k, v, do))
    k, v = (jnp.repeat(x, problem.group, axis=2) for x in (k, v))
    product = functools.partial(jnp.einsum, precision="highest")
    s = product("bqhd,bkhd->bhqk", q, k) * problem.scale
    slope = 1.0
    if problem.soft_cap is not None:
        tanh = jnp.tanh(s / problem.soft_cap)
        s, slope = problem.soft_cap * tanh, 1 - tanh * tanh
    distance = jnp.arange(problem.kv_len) - jnp.arange(problem.q_len)[:, None]
    seen = jnp.ones(s.shape, bool)
    if band.lo is not None:
        seen &= distance >= band.lo
    if band.hi is not None:
        seen &= distance <= band.hi
    if ids is not None:
        seen &= (ids[:, :, None] == ids[:, None, :])[:, None]
    s = jnp.where(seen, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(seen, jnp.exp(s - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]), 0.0)
    o = product("bhqk,bkhd->bqhd", p, v)
    delta = jnp.einsum("bqhd,bqhd->bhq", do, o)
    dv = product("bhqk,bqhd->bkhd", p, do)
    ds = p * (product("bqhd,bkhd->bhqk", do, v) - delta[..., None]) * slope * problem.scale
    dq, dk = product("bhqk,bkhd->bqhd", ds, k), product("bhqk,bqhd->bkhd", ds, q)
    grouped = (problem.batch, problem.kv_len, problem.kv_heads, problem.group, -1)
    dk, dv = (x.reshape(grouped).sum(3) for x in (dk, dv))
    return lse, delta, (dq, dk, dv)


def check(name, tiles):
    problem, band, (q, k, v, do), ids = draw(name)
    lse, delta, wanted = reference(problem, band, q, k, v, do, ids)
    f = jax.jit(
        lambda q, k, v, do, lse, delta: backward(
            problem, q, k, v, do, lse, delta, band=band, q_ids=ids, kv_ids=ids, tiles=tiles
        )
    )
    first = jax.block_until_ready(f(q, k, v, do, lse, delta))
    same = all(
        bool(jnp.array_equal(a, b))
        for _ in range(2)
        for a, b in zip(first, f(q, k, v, do, lse, delta), strict=True)
    )
    text, ok = [], same
    for label, x, y in zip(("dq", "dk", "dv"), first, wanted, strict=True):
        x = np.asarray(x.astype(jnp.float32))
        y = np.asarray(y)
        rms = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
        worst = np.max(np.abs(x - y)) / np.max(np.abs(y))
        ok = ok and bool(rms < 8e-3 and worst < 2e-2)  # false for NaN
        text.append(f"{label} {rms:.1e} {worst:.1e}")
    return ok, "  ".join(text) + ("" if same else "  NOT REPEATABLE")


def correctness(names, tiles):
    rows, failed = [], 0
    for name in names:
        start = time.time()
        try:
            ok, text = check(name, tiles)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {str(error)[:300]}"
        failed += not ok
        rows.append(f"{'ok  ' if ok else 'FAIL'} {name:24s} {text}  [{time.time() - start:.1f}s]")
        print(rows[-1], flush=True)
    return rows, failed


def timing(names, variants):
    rows = [f"{'bfloat16, backward alone':26s} {'tiles':>16} {'ms':>8} {'TFLOP/s':>8}"]
    for name in names:
        b, s, h, d, causal = TIMED[name]
        problem = Problem(b, s, s, h, h, d, d, "bfloat16", d**-0.5)
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, do = (jax.random.normal(x, (b, s, h, d), jnp.bfloat16) for x in keys)
        lse = jnp.full((b, h, s), np.log(s) + 0.5, jnp.float32)
        delta = jnp.zeros((b, h, s), jnp.float32)
        flops = 2.5 * 4 * b * h * s * s * d / (2 if causal else 1)
        for tiles in variants:
            tiles = tiles or backward_tiles(problem)
            label = f"{tiles.block_q},{tiles.block_kv},{tiles.stages}"
            band = CAUSAL if causal else Band()
            try:
                f = jax.jit(functools.partial(backward, problem, band=band, tiles=tiles))
                ms = milliseconds(f, q, k, v, do, lse, delta)
            except Exception as error:
                rows.append(f"{name:26s} {label:>16} {type(error).__name__}: {str(error)[:200]}")
            else:
                rows.append(f"{name:26s} {label:>16} {ms:8.3f} {flops / ms / 1e9:8.0f}")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--tiles", action="append", default=[], help="block_q,block_kv,stages")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    args = parser.parse_args()

    def wanted(names):
        return [n for n in names if not args.only or any(w in n.lower() for w in args.only)]

    variants = [None, *(BackwardTiles(*map(int, t.split(","))) for t in args.tiles)]
    rows, failed = ([], 0) if args.no_check else correctness(wanted(CASES), None)
    times = [] if args.no_time else timing(wanted(TIMED), variants)
    print("\n".join(["", *rows, "", *times]))
    print(f"{len(rows)} cases, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
