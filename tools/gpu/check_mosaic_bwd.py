"""Backward of Mosaic GPU flash attention on this GPU: correctness, then speed of tile variants.

    timeout 200 python tools/gpu/check_mosaic_bwd.py             # both, under two minutes
    timeout 200 python tools/gpu/check_mosaic_bwd.py --only d64  # cases whose name has the word
    ... --tiles 64,128,2 --tiles 64,128,3                        # time these tiles too
    ... --no-time, --no-check

The smallest case comes first. The last lines are the tables.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

import numpy as np
from tools.gpu.common import jax, jnp, milliseconds

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import (
    BackwardTiles,
    backward_tiles,
    is_wide,
)
from ejkernel.types.blocks import matrix_range
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
    "segment ranges d128": (
        2, 1024, 1000, 4, 2, 128, 128, {"band": CAUSAL, "segments": 5, "ranges": True},
    ),
    "segments full d128": (1, 1024, 1024, 2, 2, 128, 128, {"segments": 5}),
    "cap causal d128": (1, 512, 512, 2, 2, 128, 128, {"band": CAUSAL, "soft_cap": 5.0}),
    "gqa causal d128": (1, 1024, 1024, 8, 2, 128, 128, {"band": CAUSAL}),
    "gqa full d128": (1, 512, 1024, 8, 2, 128, 128, {}),
    "odd full d128": (1, 1003, 777, 2, 2, 128, 128, {}),
    "odd causal d128": (2, 777, 1003, 2, 2, 128, 128, {"band": Band(None, 226)}),
    "many keys full d128": (1, 1024, 20480, 1, 1, 128, 128, {}),
    "full d64": (2, 1024, 1024, 4, 4, 64, 64, {}),
    "causal d64": (2, 1024, 1024, 4, 4, 64, 64, {"band": CAUSAL}),
    "odd causal d64": (2, 777, 1003, 2, 2, 64, 64, {"band": CAUSAL}),
    "gqa segments cap d64": (
        1, 1024, 1024, 4, 2, 64, 64, {"band": CAUSAL, "segments": 5, "soft_cap": 5.0},
    ),
    "tiny full d256": (1, 128, 128, 1, 1, 256, 256, {}),
    "full d256": (1, 512, 512, 2, 2, 256, 256, {}),
    "causal d256": (2, 1024, 1024, 2, 2, 256, 256, {"band": CAUSAL}),
    "window f16 d256": (
        1, 1024, 1024, 2, 2, 256, 256, {"band": Band(-200, 100), "dtype": "float16"},
    ),
    "empty rows d256": (1, 640, 512, 2, 2, 256, 256, {"band": Band(None, -128)}),
    "segments gqa d256": (2, 1024, 1024, 4, 2, 256, 256, {"band": CAUSAL, "segments": 5}),
    "segment ranges d256": (
        2, 1024, 1000, 4, 2, 256, 256, {"band": CAUSAL, "segments": 5, "ranges": True},
    ),
    "odd gqa cap d256": (1, 777, 1003, 4, 2, 256, 256, {"band": CAUSAL, "soft_cap": 5.0}),
    "causal d192-128": (1, 1024, 1024, 2, 2, 192, 128, {"band": CAUSAL}),
    "odd full d192-128": (1, 777, 1003, 2, 2, 192, 128, {}),
}  # fmt: skip
# name: b, s, h, d, dv, causal
TIMED = {
    "B4 S4k H16 D128 full": (4, 4096, 16, 128, 128, False),
    "B4 S4k H16 D128 causal": (4, 4096, 16, 128, 128, True),
    "B1 S16k H16 D128 full": (1, 16384, 16, 128, 128, False),
    "B1 S16k H16 D128 causal": (1, 16384, 16, 128, 128, True),
    "B8 S2k H32 D64 full": (8, 2048, 32, 64, 64, False),
    "B8 S2k H32 D64 causal": (8, 2048, 32, 64, 64, True),
    "B2 S8k H8 D256 full": (2, 8192, 8, 256, 256, False),
    "B2 S8k H8 D256 causal": (2, 8192, 8, 256, 256, True),
    "B2 S8k H16 D192-128 full": (2, 8192, 16, 192, 128, False),
    "B2 S8k H16 D192-128 causal": (2, 8192, 16, 192, 128, True),
}


def draw(name):
    b, s, t, h, hk, d, dv, options = CASES[name]
    dtype = options.get("dtype", "bfloat16")
    problem = Problem(b, s, t, h, hk, d, dv, dtype, d**-0.5, options.get("soft_cap"))
    rng = np.random.default_rng(len(name))
    shapes = (b, s, h, d), (b, t, hk, d), (b, t, hk, dv), (b, s, h, dv)
    arrays = [rng.standard_normal(x, np.float32).astype(jnp.dtype(dtype)) for x in shapes]
    ids = None
    if count := options.get("segments"):
        cuts = np.sort(rng.integers(1, s, (b, count - 1)), axis=1)
        ids = (np.arange(max(s, t)) >= cuts[..., None]).sum(1).astype(np.int32)
        ids = ids[:, :s], ids[:, :t]
    return problem, options.get("band", Band()), arrays, ids


def visible(problem, band, ids):
    """bool [#b, q, k]."""
    distance = np.arange(problem.kv_len) - np.arange(problem.q_len)[:, None]
    seen = np.ones((1, *distance.shape), bool)
    if band.lo is not None:
        seen &= distance >= band.lo
    if band.hi is not None:
        seen &= distance <= band.hi
    return seen if ids is None else seen & (ids[0][:, :, None] == ids[1][:, None, :])


def table(seen, tiles):
    """Query blocks of each key block, int32 [#b, 1, key blocks, 4]."""
    b, s, t = seen.shape
    blocks = []
    for fill in (False, True):
        pad = [(0, 0), (0, -s % tiles.block_q), (0, -t % tiles.block_kv)]
        x = np.pad(seen, pad, constant_values=fill)
        x = x.reshape(b, -(-s // tiles.block_q), tiles.block_q, -1, tiles.block_kv)
        blocks.append((x.all if fill else x.any)((2, 4)).swapaxes(1, 2))
    any_, all_ = blocks
    all_[..., s // tiles.block_q :] = False
    r = matrix_range(np, any_, all_ & any_)
    return np.stack([r.start, r.full_start, r.full_stop, r.stop], axis=-1)[:, None]


@functools.partial(jax.jit, static_argnames="capped")
def whole_matrices(q, k, v, do, seen, scale, cap, capped):
    """Float32 lse, delta, dq, dk and dv of [heads, length, dim] operands."""
    product = functools.partial(jnp.einsum, precision="highest")
    s = product("hqd,hkd->hqk", q, k) * scale
    slope = 1.0
    if capped:
        tanh = jnp.tanh(s / cap)
        s, slope = cap * tanh, 1 - tanh * tanh
    s = jnp.where(seen, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(seen, jnp.exp(s - jnp.where(lse == -jnp.inf, 0.0, lse)[..., None]), 0.0)
    o = product("hqk,hkd->hqd", p, v)
    delta = jnp.sum(do * o, axis=-1)
    dv = product("hqk,hqd->hkd", p, do)
    ds = p * (product("hqd,hkd->hqk", do, v) - delta[..., None]) * slope * scale
    return lse, delta, product("hqk,hkd->hqd", ds, k), product("hqk,hqd->hkd", ds, q), dv


def reference(problem, band, arrays, ids):
    """(lse, delta, (dq, dk, dv)) in float32; one compiled shape serves most cases."""
    p = problem
    rows = p.batch * p.heads
    heads = 8 if p.kv_len <= 1024 else rows
    s, t, d = (max(1024, p.q_len), max(1024, p.kv_len), 256)

    def filled(x, length):
        group = p.heads // x.shape[2]
        x = np.repeat(x.astype(np.float32), group, axis=2).swapaxes(1, 2)
        x = x.reshape(rows, x.shape[2], x.shape[3])
        pad = (heads - rows, length - x.shape[1], d - x.shape[2])
        return np.pad(x, [(0, n) for n in pad])

    q, k, v, do = (filled(x, n) for x, n in zip(arrays, (s, t, t, s), strict=True))
    mask = np.broadcast_to(visible(p, band, ids), (p.batch, p.q_len, p.kv_len))
    mask = np.repeat(mask, p.heads, axis=0)
    pad = (heads - rows, s - p.q_len, t - p.kv_len)
    mask = np.pad(mask, [(0, n) for n in pad])
    cap = p.soft_cap or 0.0
    out = whole_matrices(q, k, v, do, mask, p.scale, cap, capped=bool(cap))
    lse, delta, dq, dk, dv = (np.asarray(x)[:rows] for x in out)
    lse, delta = (x[:, : p.q_len].reshape(p.batch, p.heads, -1) for x in (lse, delta))

    def back(x, length, dim, kv_heads):
        x = x[:, :length, :dim].reshape(p.batch, kv_heads, -1, length, dim).sum(2)
        return x.swapaxes(1, 2)

    wanted = (
        back(dq, p.q_len, p.dim, p.heads),
        back(dk, p.kv_len, p.dim, p.kv_heads),
        back(dv, p.kv_len, p.value_dim, p.kv_heads),
    )
    return lse, delta, wanted


def lowered(problem, band, ids, ranges, tiles, part=slice(None)):
    """The jitted call lowered, a slice of (dq, dk, dv); ids and ranges are operands."""
    p = problem
    dtype, f32 = jnp.dtype(p.dtype), jnp.float32
    shapes = [
        jax.ShapeDtypeStruct((p.batch, p.q_len, p.heads, p.dim), dtype),
        jax.ShapeDtypeStruct((p.batch, p.kv_len, p.kv_heads, p.dim), dtype),
        jax.ShapeDtypeStruct((p.batch, p.kv_len, p.kv_heads, p.value_dim), dtype),
        jax.ShapeDtypeStruct((p.batch, p.q_len, p.heads, p.value_dim), dtype),
        *[jax.ShapeDtypeStruct((p.batch, p.heads, p.q_len), f32)] * 2,
        *[jax.ShapeDtypeStruct(x.shape, jnp.int32) for x in (*ids, *ranges)],
    ]

    def call(*operands):
        more = list(operands[6:])
        q_ids, kv_ids = (more.pop(0), more.pop(0)) if ids else (None, None)
        return backward(
            problem,
            *operands[:6],
            band=band,
            ranges=more[0] if more else None,
            q_ids=q_ids,
            kv_ids=kv_ids,
            tiles=tiles,
        )[part]

    return jax.jit(call).lower(*shapes)


def extras(name, tiles):
    """ids and ranges of a case, each empty or what is passed."""
    problem, band, _, ids = draw(name)
    ranges = ()
    if CASES[name][-1].get("ranges"):
        seen = visible(problem, band, ids)
        ranges = (table(seen, tiles or backward_tiles(problem)),)
    return ids or (), ranges


class Compiler:
    """Lowers here, compiles beside; the seconds of both are kept."""

    def __init__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(8)

    def start(self, *what):
        start = time.perf_counter()
        try:
            form = lowered(*what)
        except Exception as error:
            failed = concurrent.futures.Future()
            failed.set_exception(error)
            return failed.result, 0.0
        seconds = time.perf_counter() - start

        def compile_it():
            start = time.perf_counter()
            program = form.compile()
            return program, time.perf_counter() - start

        return self.pool.submit(compile_it).result, seconds


def check(name, program, tiles):
    problem, band, arrays, ids = draw(name)
    lse, delta, wanted = reference(problem, band, arrays, ids)
    ids, ranges = extras(name, tiles)
    base = np.where(np.isfinite(lse), lse / unit(problem), np.inf)
    operands = jax.device_put([*arrays, base, delta, *ids, *ranges])
    first = [np.asarray(x) for x in program(*operands)]
    same = all(
        np.array_equal(a, np.asarray(b))
        for _ in range(2)
        for a, b in zip(first, program(*operands), strict=True)
    )
    text, ok = [], same
    for label, x, y in zip(("dq", "dk", "dv"), first, wanted, strict=True):
        x = x.astype(np.float32)
        rms = np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2))
        worst = np.max(np.abs(x - y)) / np.max(np.abs(y))
        ok = ok and bool(rms < 8e-3 and worst < 2e-2)  # false for NaN
        text.append(f"{label} {rms:.1e} {worst:.1e}")
    return ok, "  ".join(text) + ("" if same else "  NOT REPEATABLE")


def correctness(names, tiles):
    compiler, rows, failed = Compiler(), [], 0
    started = {}
    for name in names:
        problem, band, *_ = draw(name)
        started[name] = compiler.start(problem, band, *extras(name, tiles), tiles)
    for name, (ready, lower_s) in started.items():
        start = time.perf_counter()
        try:
            program, compile_s = ready()
            ok, text = check(name, program, tiles)
        except Exception as error:
            ok, text, compile_s = False, f"{type(error).__name__}: {str(error)[:300]}", 0.0
        failed += not ok
        seconds = f"{lower_s:.1f} + {compile_s:.1f} s, then {time.perf_counter() - start:.1f}"
        rows.append(f"{'ok  ' if ok else 'FAIL'} {name:24s} {text}  [{seconds}]")
        print(rows[-1], flush=True)
    return rows, failed


def timing(names, variants):
    compiler = Compiler()
    rows = [f"{'bfloat16, backward alone':27s} {'tiles':>11} {'ms':>8} {'TFLOP/s':>8}"]
    started = []
    for name in names:
        b, s, h, d, dv, causal = TIMED[name]
        problem = Problem(b, s, s, h, h, d, dv, "bfloat16", d**-0.5)
        for tiles in variants:
            tiles = tiles or backward_tiles(problem)
            band = CAUSAL if causal else Band()
            parts = {"": slice(None)}
            if is_wide(problem):  # kernels of their own, which XLA drops when not asked for
                parts |= {" dq": slice(0, 1), " dkv": slice(1, 3)}
            for word, part in parts.items():
                ready, _ = compiler.start(problem, band, (), (), tiles, part)
                started.append((name, word, tiles, problem, ready))
    for name, word, tiles, p, ready in started:
        keys = jax.random.split(jax.random.key(0), 4)
        dims = (p.dim, p.dim, p.value_dim, p.value_dim)
        arrays = [
            jax.random.normal(x, (p.batch, p.q_len, p.heads, d), jnp.bfloat16)
            for x, d in zip(keys, dims, strict=True)
        ]
        base = (np.log(p.q_len) + 0.5) / unit(p)
        base = jnp.full((p.batch, p.heads, p.q_len), base, jnp.float32)
        pairs = p.batch * p.heads * p.q_len**2 / (2 if TIMED[name][-1] else 1)
        flops = 2 * pairs * (3 * p.dim + 2 * p.value_dim)
        flops *= {" dq": 3 / 5, " dkv": 4 / 5}.get(word, 1)  # what each computes, logits too
        label = f"{tiles.block_q},{tiles.block_kv},{tiles.stages}{word}"
        try:
            program, _ = ready()
            ms = milliseconds(program, *arrays, base, jnp.zeros_like(base))
        except Exception as error:
            rows.append(f"{name:27s} {label:>11} {type(error).__name__}: {str(error)[:200]}")
        else:
            rows.append(f"{name:27s} {label:>11} {ms:8.3f} {flops / ms / 1e9:8.0f}")
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
