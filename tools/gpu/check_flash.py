"""Flash attention on this GPU: correctness at size, timing against cuDNN, tile sweeps.

    python tools/gpu/check_flash.py            # correctness and timing, under four minutes
    python tools/gpu/check_flash.py --quick    # fewer of both, about a minute
    python tools/gpu/check_flash.py --sweep    # time candidate tiles of every kernel

The last lines are the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from tools.gpu.common import (
    in_parallel,
    jax,
    jnp,
    milliseconds,
    precompile,
    reference,
    relative,
)

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.flash_attention import flash_attention, plans, tiles
from ejkernel.kernels.triton.flash_attention.problem import Band, Problem
from ejkernel.kernels.triton.flash_attention.structure import Rules
from ejkernel.kernels.triton.targets import compile_for, current_target
from ejkernel.types import MaskInfo

Tiles = tiles.Tiles


def draw(seed, b, q, k, h, hk, d, dv, dtype):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((b, q, h, d), (b, k, hk, d), (b, k, hk, dv), (b, q, h, dv))
    return [
        jax.random.normal(x, s, jnp.float32).astype(dtype)
        for x, s in zip(keys, shapes, strict=False)
    ]


def index(q, k):
    return jnp.arange(q)[:, None], jnp.arange(k)[None, :]


def segments(b, n, seed=0):
    """Sorted document ids with a tail of padding."""
    cuts = jax.random.randint(jax.random.key(seed), (b, 6), 0, n)
    ids = jnp.sum(jnp.arange(n)[None, :, None] >= jnp.sort(cuts, 1)[:, None, :], -1)
    return jnp.where(jnp.arange(n)[None] >= n - n // 10, -1, ids).astype(jnp.int32)


def hash_keep(seed, b, h, q, k, p):
    """The dropout mask of the contract, bool [b, h, q, k]."""
    u = jnp.uint32
    P1, P2, P3, P4, P5 = map(u, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))
    m1, m2 = u(0x85EBCA6B), u(0xC2B2AE35)

    def fmix(x):
        x = (x ^ (x >> 16)) * m1
        x = (x ^ (x >> 13)) * m2
        return x ^ (x >> 16)

    bb, hh = jnp.arange(b, dtype=u)[:, None], jnp.arange(h, dtype=u)[None]
    a = fmix(fmix(fmix(u(seed) + P1) + bb * P2) + hh * P3)
    r = fmix(a[..., None] + jnp.arange(q, dtype=u) * P4)
    s = fmix(r ^ P1)
    x = r[..., None] + jnp.arange(k, dtype=u) * P5
    x = (x ^ (x >> 16)) * m1
    x = x ^ s[..., None]
    x = (x ^ (x >> 13)) * m2
    x = x ^ (x >> 16)
    return (x >> 8) >= round(p * 2**24)


# name: (b, q, k, h, hk, d, dv, dtype), options
BF, HALF, F32 = jnp.bfloat16, jnp.float16, jnp.float32
CASES = {
    "full d128": ((2, 1024, 1024, 4, 4, 128, 128, BF), {}),
    "causal d128": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True)),
    "full d64": ((2, 1024, 1024, 4, 4, 64, 64, BF), {}),
    "causal d64": ((2, 1024, 1024, 4, 4, 64, 64, BF), dict(causal=True)),
    "full d256": ((2, 1024, 1024, 4, 4, 256, 256, BF), {}),
    "causal d256": ((2, 1024, 1024, 4, 4, 256, 256, BF), dict(causal=True)),
    "odd causal": ((2, 1037, 1037, 4, 4, 128, 128, BF), dict(causal=True)),
    "odd full d64": ((3, 1000, 777, 4, 2, 64, 64, BF), {}),
    "offset q<k": ((2, 300, 1100, 4, 4, 64, 64, BF), dict(causal=True, causal_offset=800)),
    "offset -200": ((2, 1024, 1024, 4, 4, 64, 64, BF), dict(causal=True, causal_offset=-200)),
    "window": ((2, 2048, 2048, 4, 4, 128, 128, BF), dict(causal=True, sliding_window=300)),
    "window both": ((2, 1500, 1500, 4, 4, 64, 64, BF), dict(sliding_window=(100, 257))),
    "gqa 8:2": ((2, 1024, 1024, 8, 2, 128, 128, BF), dict(causal=True)),
    "mqa": ((2, 1024, 1024, 8, 1, 64, 64, BF), {}),
    "segments": ((2, 2048, 2048, 4, 4, 128, 128, BF), dict(causal=True, segments=True)),
    "d80": ((2, 1024, 1024, 4, 4, 80, 80, BF), dict(causal=True)),
    "d96": ((2, 1024, 1024, 4, 4, 96, 96, BF), {}),
    "d112 odd": ((2, 999, 999, 4, 4, 112, 112, BF), dict(causal=True)),
    "d192/128": ((2, 1024, 1024, 4, 4, 192, 128, BF), dict(causal=True)),
    "d32": ((2, 1024, 1024, 4, 4, 32, 32, BF), {}),
    "sinks": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, sinks=True)),
    "cap": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, cap=30.0)),
    "sinks cap window": (
        (2, 1030, 1030, 4, 2, 64, 64, BF),
        dict(causal=True, sliding_window=200, cap=20.0, sinks=True),
    ),
    "dropout": ((2, 1024, 1024, 4, 4, 128, 128, BF), dict(causal=True, dropout=0.1)),
    "bias": ((2, 1000, 1100, 4, 4, 64, 64, BF), dict(bias=(1, 4))),
    "bias shared": ((2, 1024, 1024, 4, 2, 128, 128, BF), dict(causal=True, bias=(2, 1))),
    "dense mask": ((2, 1024, 1024, 4, 4, 64, 64, BF), dict(dense=True)),
    "negative scale": ((2, 512, 512, 4, 4, 64, 64, BF), dict(scale=-0.1)),
    "float16": ((2, 1024, 1024, 4, 4, 128, 128, HALF), dict(causal=True)),
    "float32": ((2, 1024, 1024, 4, 4, 64, 64, F32), dict(causal=True)),
    "float32 highest": ((1, 512, 512, 2, 2, 64, 64, F32), dict(causal=True, precision="highest")),
    "float32 d128": ((2, 1000, 1000, 4, 4, 128, 128, F32), dict(causal=True)),
    # as many operands as a call can have: their order is the launcher's business
    "everything d96": (
        (2, 517, 517, 4, 2, 96, 96, BF),
        dict(causal=True, segments=True, dense=True, bias=(1, 4), sinks=True, dropout=0.1, cap=9.0),
    ),
    "one query": ((4, 1, 2048, 8, 2, 128, 128, BF), {}),
}
QUICK = (
    "full d128", "causal d128", "causal d64", "full d64", "causal d256", "odd causal", "window",
    "gqa 8:2", "segments", "d96", "sinks cap window", "dropout", "bias", "float32",
)  # fmt: skip
# relative error of a whole array; float32 products at default precision are TF32
BOUND = {"bfloat16": 8e-3, "float16": 2e-3, "float32": 5e-3}


def inputs(name):
    """(differentiable arrays, other arrays) of a case."""
    shape, o = CASES[name]
    b, q_len, kv_len, h = shape[:4]
    q, k, v, do = draw(len(name), *shape)
    diff, fixed = {"q": q, "k": k, "v": v}, {"do": do}
    if "bias" in o:
        size = (*o["bias"], q_len, kv_len)
        diff["bias"] = jax.random.normal(jax.random.key(7), size, jnp.float32)
    if "sinks" in o:
        diff["sinks"] = jax.random.normal(jax.random.key(8), (h, 2), jnp.float32)
    if "segments" in o:
        fixed["ids"] = segments(b, q_len)
    if "dense" in o:
        fixed["dense"] = jax.random.bernoulli(jax.random.key(5), 0.6, (b, 1, q_len, kv_len))
    fixed["dlse"] = jax.random.normal(jax.random.key(9), (b, q_len, h), jnp.float32)
    return diff, fixed


def with_gradients(f):
    """o, lse and the gradients of a function (diff, fixed) -> (o, lse), as one jitted function."""

    def whole(x, fixed):
        (out, lse), back = jax.vjp(lambda x: f(x, fixed), x)
        dlse = jnp.where(jnp.isfinite(lse), fixed["dlse"], 0.0)
        return {"o": out, "lse": lse, **back((fixed["do"].astype(out.dtype), dlse))[0]}

    return jax.jit(whole)


def kernel(name):
    """This case through the Triton kernels."""
    o = CASES[name][1]
    names = ("causal", "causal_offset", "sliding_window", "precision")
    kwargs = {n: o[n] for n in names if n in o}

    def ours(x, fixed):
        info = MaskInfo.from_segments(fixed["ids"]) if "ids" in fixed else None
        return flash_attention(
            x["q"], x["k"], x["v"], x.get("bias"), softmax_aux=x.get("sinks"), mask_info=info,
            attention_mask=fixed.get("dense"), softmax_scale=o.get("scale"),
            logits_soft_cap=o.get("cap"), dropout_prob=o.get("dropout", 0.0), dropout_seed=11,
            return_lse=True, **kwargs,
        )  # fmt: skip

    return with_gradients(ours)


def truth(name):
    """This case in float32 on whole matrices."""
    (b, q_len, kv_len, h, *_), o = CASES[name]

    def theirs(x, fixed):
        i, j = index(q_len, kv_len)
        at = i + o.get("causal_offset", 0)
        mask = jnp.ones((1, 1, q_len, kv_len), bool)
        if o.get("causal"):
            mask &= j <= at
        if "sliding_window" in o:
            w = o["sliding_window"]
            left, right = w if isinstance(w, tuple) else (w, w)
            mask &= (j >= at - left) & (j <= at + right)
        if "ids" in fixed:
            ids = fixed["ids"]
            mask = mask & ((ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0))[:, None]
        if "dense" in fixed:
            mask = mask & fixed["dense"]
        drop = o.get("dropout", 0.0)
        keep = (hash_keep(11, b, h, q_len, kv_len, drop), drop) if drop else None
        return reference(
            x["q"], x["k"], x["v"], mask=mask, scale=o.get("scale"), bias=x.get("bias"),
            sinks=x.get("sinks"), cap=o.get("cap"), keep=keep,
        )  # fmt: skip

    return with_gradients(theirs)


def check(name):
    """Relative errors of o, lse and every gradient; whether two runs agree bit for bit."""
    diff, fixed = jax.jit(inputs, static_argnums=0)(name)
    mine = kernel(name)
    first, second = mine(diff, fixed), mine(diff, fixed)
    exact = truth(name)({n: x.astype(jnp.float32) for n, x in diff.items()}, fixed)
    errors = {n: relative(first[n], exact[n]) for n in first}
    same = all(bool(jnp.array_equal(first[n], second[n], equal_nan=True)) for n in first)
    return errors, same


def lower_case(name, target):
    """In a worker: compile the kernels of a case into the disk cache."""
    with compile_for(target):
        shapes = jax.eval_shape(lambda: inputs(name))
        kernel(name).trace(*shapes).lower(lowering_platforms=(target.platform,))


def lower_timed(name, target):
    b, s, h, hk, d, causal = TIMED[name]
    with compile_for(target):
        shapes = jax.eval_shape(lambda: draw(1, b, s, s, h, hk, d, d, BF))
        f = pair(lambda q, k, v: flash_attention(q, k, v, causal=causal))[1]
        f.trace(*shapes).lower(lowering_platforms=(target.platform,))


def correctness(names):
    rows, failed = [], 0
    for name in names:
        start = time.time()
        bound = BOUND[jnp.dtype(CASES[name][0][-1]).name]
        if CASES[name][1].get("precision") == "highest":
            bound = 1e-5
        try:
            errors, same = check(name)
            ok = same and all(e <= bound for e in errors.values())
            text = " ".join(f"{n}={e:.1e}" for n, e in errors.items())
            text += "" if same else " NOT REPEATABLE"
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {str(error)[:300]}"
        failed += not ok
        rows.append(f"{'ok  ' if ok else 'FAIL'} {name:18s} {text}  [{time.time() - start:.1f}s]")
        print(rows[-1], flush=True)
    return rows, failed


# b, s, h, hk, d, causal
TIMED = {
    "B4 S4k H16 D128 full": (4, 4096, 16, 16, 128, False),
    "B4 S4k H16 D128 causal": (4, 4096, 16, 16, 128, True),
    "B1 S16k H16 D128 full": (1, 16384, 16, 16, 128, False),
    "B1 S16k H16 D128 causal": (1, 16384, 16, 16, 128, True),
    "B2 S8k H32/8 D128 causal": (2, 8192, 32, 8, 128, True),
    "B8 S2k H32 D64 full": (8, 2048, 32, 32, 64, False),
    "B8 S2k H32 D64 causal": (8, 2048, 32, 32, 64, True),
    "B2 S8k H8 D256 full": (2, 8192, 8, 8, 256, False),
    "B2 S8k H8 D256 causal": (2, 8192, 8, 8, 256, True),
    "B32 S512 H16 D128 causal": (32, 512, 16, 16, 128, True),
    "B32 S1k H16 D128 causal": (32, 1024, 16, 16, 128, True),
}
QUICK_TIMED = (
    "B4 S4k H16 D128 full", "B4 S4k H16 D128 causal", "B8 S2k H32 D64 causal",
    "B2 S8k H8 D256 causal",
)  # fmt: skip


def cudnn(q, k, v, causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def pair(f):
    """(forward, forward and backward) as jitted functions of q, k, v, do."""

    def both(q, k, v, do):
        out, back = jax.vjp(f, q, k, v)
        return out, back(do)

    return jax.jit(lambda q, k, v, do: f(q, k, v)), jax.jit(both)


def timing(names):
    rows = [
        f"{'bfloat16, TFLOP/s':26s} {'fwd':>6} {'cuDNN':>6} {'ratio':>6}   "
        f"{'f+b':>6} {'cuDNN':>6} {'ratio':>6}   {'fwd ms':>7} {'f+b ms':>7}"
    ]
    for name in names:
        b, s, h, hk, d, causal = TIMED[name]
        args = draw(1, b, s, s, h, hk, d, d, BF)
        flops = 4 * b * h * s * s * d / (2 if causal else 1)
        mine = pair(lambda q, k, v, c=causal: flash_attention(q, k, v, causal=c))
        peer = pair(lambda q, k, v, c=causal: cudnn(q, k, v, c))
        try:
            ms = [milliseconds(f, *args) for f in (*mine, *peer)]
        except Exception as error:
            rows.append(f"{name:26s} {type(error).__name__}: {str(error)[:150]}")
            continue
        rate = [n * flops / t / 1e9 for n, t in zip((1, 3.5, 1, 3.5), ms, strict=False)]
        rows.append(
            f"{name:26s} {rate[0]:6.0f} {rate[2]:6.0f} {rate[0] / rate[2]:6.2f}   "
            f"{rate[1]:6.0f} {rate[3]:6.0f} {rate[1] / rate[3]:6.2f}   {ms[0]:7.3f} {ms[1]:7.3f}"
        )
        print(rows[-1], flush=True)
    return rows


EXTRAS = {
    "plain causal": {},
    "cap": dict(logits_soft_cap=30.0),
    "sinks": dict(sinks=True),
    "dropout": dict(dropout_prob=0.1, dropout_seed=3),
    "bias 1,h": dict(bias=True),
}


def extras():
    """Cost of options: B4 S4096 H16 D128 causal; 16k with a window and with packed documents."""
    q, k, v, do = draw(1, 4, 4096, 4096, 16, 16, 128, 128, BF)
    rows, base = [], None
    for name, options in EXTRAS.items():
        o = dict(options)
        sinks = jnp.zeros((16, 1)) if o.pop("sinks", False) else None
        bias = jnp.zeros((1, 16, 4096, 4096), BF) if o.pop("bias", False) else None
        f = pair(
            lambda q, k, v, o=o, sinks=sinks, bias=bias: flash_attention(
                q, k, v, bias, softmax_aux=sinks, causal=True, **o
            )
        )
        ms = [milliseconds(x, q, k, v, do) for x in f]
        base = base or ms
        rows.append(
            f"{name:16s} fwd {ms[0]:.3f} ms ({base[0] / ms[0]:.2f}x)  "
            f"f+b {ms[1]:.3f} ms ({base[1] / ms[1]:.2f}x)"
        )
        print(rows[-1], flush=True)
    q, k, v, do = draw(1, 1, 16384, 16384, 16, 16, 128, 128, BF)
    cu = jnp.arange(9, dtype=jnp.int32) * 2048
    base = None
    for name, o in (
        ("16k causal", {}),
        ("16k window 1024", dict(sliding_window=1024)),
        ("16k 8 documents", dict(cum_seqlens_q=cu)),
    ):
        f = pair(lambda q, k, v, o=o: flash_attention(q, k, v, causal=True, **o))
        ms = [milliseconds(x, q, k, v, do) for x in f]
        base = base or ms
        rows.append(
            f"{name:16s} fwd {ms[0]:.3f} ms ({base[0] / ms[0]:.2f}x)  "
            f"f+b {ms[1]:.3f} ms ({base[1] / ms[1]:.2f}x)"
        )
        print(rows[-1], flush=True)
    return rows


SWEEP = {
    64: (8, 2048, 32),
    128: (4, 4096, 16),
    256: (2, 8192, 8),
}
CANDIDATES = {
    ("fwd", 64): [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 4, 4), (64, 128, 4, 3),
        (64, 64, 4, 3), (128, 128, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3), (192, 128, 4, 2),
    ],
    ("fwd", 128): [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (64, 128, 4, 2),
        (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3),
    ],
    ("fwd", 256): [
        (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 128, 8, 2),
        (64, 32, 4, 3), (128, 64, 8, 1),
    ],
    ("dq", 64): [
        (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2), (64, 64, 4, 3),
        (128, 128, 8, 3), (64, 64, 4, 2),
    ],
    ("dq", 128): [
        (128, 64, 8, 2), (128, 128, 8, 2), (128, 128, 8, 1), (64, 128, 4, 2), (64, 64, 4, 2),
        (128, 64, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3),
    ],
    ("dq", 256): [
        (128, 64, 8, 1), (64, 64, 4, 1), (64, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2),
        (64, 64, 8, 1),
    ],
    ("dkv", 64): [
        (128, 128, 8, 2), (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (128, 64, 4, 2),
        (64, 128, 4, 2), (64, 64, 4, 3), (32, 128, 4, 3),
    ],
    ("dkv", 128): [
        (64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 1), (32, 128, 8, 2),
        (128, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 3),
    ],
    ("dkv", 256): [
        (64, 64, 8, 1), (64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 1), (64, 32, 4, 1),
        (32, 64, 4, 2), (32, 128, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (64, 32, 8, 2),
    ],
}  # fmt: skip
KINDS = {"fwd": plans.ForwardPlan, "dq": plans.DqPlan, "dkv": plans.DkvPlan}


def make_plan(kind, d, tile, causal):
    b, s, h = SWEEP[d]
    p = Problem(b, s, s, h, h, d, d, "bfloat16", d**-0.5, seed_batches=b)
    shapes = {n: (b, s, h, d) for n in ("q", "k", "v")}
    if kind != "fwd":
        shapes |= {"do": (b, s, h, d), "lse": (b, h, s), "delta": (b, h, s)}
    rules = Rules(Band(None, 0) if causal else Band())
    plan = KINDS[kind](p, rules, Tiles(*tile), tuple(shapes.items()))
    avals = [
        jax.ShapeDtypeStruct(x, jnp.float32 if n in ("lse", "delta") else jnp.bfloat16)
        for n, x in shapes.items()
    ]
    return plan, avals


def sweep(only=None, causal=True):
    target = current_target()
    jobs = {}
    for (kind, d), candidates in CANDIDATES.items():
        if only and f"{kind}{d}" not in only:
            continue
        for tile in candidates:
            try:
                dataclasses.replace(Tiles(*tile))
                if tile[0] & (tile[0] - 1):
                    continue
                jobs[kind, d, tile] = (*make_plan(kind, d, tile, causal), target)
            except Exception as error:
                print(kind, d, tile, error)
    start = time.time()
    errors = dict(zip(jobs, precompile(jobs.values()), strict=False))
    print(f"compiled {len(jobs)} in {time.time() - start:.0f}s", flush=True)
    rows = []
    for d, (b, s, h) in SWEEP.items():
        q, k, v, do = draw(2, b, s, s, h, h, d, d, BF)
        o, lse = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=causal, return_lse=True))(
            q, k, v
        )
        lse = lse.swapaxes(1, 2)
        delta = jnp.einsum("bqhd,bqhd->bhq", do.astype(F32), o.astype(F32))
        operands = {"fwd": (q, k, v)}
        operands["dq"] = operands["dkv"] = (q, k, v, do, lse, delta)
        flops = 2 * b * h * s * s * d / (2 if causal else 1)
        products = {"fwd": 2, "dq": 3, "dkv": 4}
        for (kind, dd, tile), (plan, _, _) in jobs.items():
            if dd != d:
                continue
            label = f"{kind:3s} d{d:3d} {tile!s:20s}"
            if errors[kind, d, tile]:
                rows.append(f"{label} {errors[kind, d, tile]}")
                continue
            try:
                ms = milliseconds(
                    jax.jit(lambda *x, plan=plan: call(plan, *x)), *operands[kind], seconds=0.1
                )
                rows.append(f"{label} {ms:7.3f} ms {products[kind] * flops / ms / 1e9:6.0f} TF")
            except Exception as error:
                rows.append(f"{label} {type(error).__name__}: {str(error)[:100]}")
            print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", nargs="*", help="kernels to sweep, e.g. fwd128 dkv64; none: all")
    parser.add_argument("--full", action="store_true", help="sweep without a causal mask")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    start = time.time()
    print(jax.devices()[0], current_target(), jax.__version__, flush=True)
    if options.sweep is not None:
        print("\n".join(sweep(options.sweep, not options.full)))
        return
    names, timed = (QUICK, QUICK_TIMED) if options.quick else (tuple(CASES), tuple(TIMED))
    jobs = [] if options.no_check else [(lower_case, n) for n in names]
    jobs += [] if options.no_time else [(lower_timed, n) for n in timed]
    in_parallel([(job, n, current_target()) for job, n in jobs])
    print(f"compiled in {time.time() - start:.0f}s", flush=True)
    rows, failed = [], 0
    if not options.no_check:
        rows, failed = correctness(names)
    table = [] if options.no_time else timing(timed)
    more = [] if options.no_time or options.quick else extras()
    print("\n" + "\n".join([*rows, "", *table, "", *more]))
    print(f"{failed} of {len(rows)} correctness cases failed; {time.time() - start:.0f}s in all")


if __name__ == "__main__":
    main()
