"""Flash attention on this GPU: correctness at size, timing against cuDNN, tile sweeps.

    python tools/gpu/check_flash.py            # correctness and timing, under four minutes
    python tools/gpu/check_flash.py --quick    # fewer of both, about a minute
    python tools/gpu/check_flash.py --sweep    # time candidate tiles of every kernel
    python tools/gpu/check_flash.py --extras   # only what options cost against the plain call

``flash_variants.py`` beside this file times those options kernel by kernel, in variants.

The last lines are the tables. Exits with 1 when a case fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from tools.gpu.common import base_of, in_parallel, jax, jnp, milliseconds, precompile

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.common.dropout_rows import row_words
from ejkernel.kernels.triton.flash_attention import flash_attention, plans, tiles
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Band, Rules
from ejktest.ahead import lower, lower_case
from ejktest.attention_at_size import BF, CASES, F32, bound, check, draw

Tiles = tiles.Tiles


QUICK = (
    "full d128", "causal d128", "causal d64", "full d64", "causal d256", "odd causal", "window",
    "gqa 8:2", "segments", "d96", "sinks cap window", "dropout", "bias", "float32",
)  # fmt: skip


def lower_timed(name, target):
    b, s, h, hk, d, causal = TIMED[name]
    shapes = jax.eval_shape(lambda: draw(1, b, s, s, h, hk, d, d, BF))
    lower(pair(lambda q, k, v: flash_attention(q, k, v, causal=causal))[1], target, *shapes)


def correctness(names):
    rows, failed = [], 0
    for name in names:
        start = time.time()
        try:
            errors, same = check(name, flash_attention)
            ok = same and all(e <= bound(name) for e in errors.values())
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
    "cap, dropout": dict(logits_soft_cap=30.0, dropout_prob=0.1, dropout_seed=3),
    "bias 1,h": dict(bias=(1, 16)),
    "bias b,h": dict(bias=(4, 16)),
    "bias 1,1": dict(bias=(1, 1)),
}


def extra(name):
    """(forward, forward and backward) with an option, and its operands after q, k, v, do."""
    o = dict(EXTRAS[name])
    more = {}
    if o.pop("sinks", False):
        more["softmax_aux"] = jnp.zeros((16, 1))
    if "bias" in o:
        more["bias"] = jnp.zeros((*o.pop("bias"), 4096, 4096), BF)

    def attend(q, k, v, more):
        return flash_attention(q, k, v, causal=True, **more, **o)

    def both(q, k, v, do, more):
        out, back = jax.vjp(lambda *x: attend(*x, more), q, k, v)
        return out, back(do)

    return jax.jit(lambda q, k, v, do, more: attend(q, k, v, more)), jax.jit(both), more


def lower_extra(name, target):
    """In a worker: compile the kernels of a row into the disk cache."""
    given = jax.eval_shape(lambda: draw(1, 4, 4096, 4096, 16, 16, 128, 128, BF))
    _, both, more = extra(name)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), more)
    lower(both, target, *given, shapes)


def extras():
    """Cost of options: B4 S4096 H16 D128 causal; 16k with a window and with packed documents."""
    q, k, v, do = draw(1, 4, 4096, 4096, 16, 16, 128, 128, BF)
    rows, base = [], None
    for name in EXTRAS:
        *f, more = extra(name)
        ms = [milliseconds(x, q, k, v, do, more) for x in f]
        base = base or ms
        rows.append(
            f"{name:16s} fwd {ms[0]:.3f} ms ({base[0] / ms[0]:.2f}x)  "
            f"f+b {ms[1]:.3f} ms ({base[1] / ms[1]:.2f}x)"
        )
        print(rows[-1], flush=True)
        del more
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
        (64, 128, 4, 2), (64, 64, 4, 3), (32, 128, 4, 3), (64, 64, 4, 3, 168), (32, 64, 4, 3),
        (32, 64, 4, 4), (32, 64, 4, 4, 128),
    ],
    ("dkv cap", 128): [(64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3)],
    ("dkv dropout", 128): [(64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3)],
    ("dkv", 128): [
        (64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 1), (32, 128, 8, 2),
        (128, 64, 8, 2), (32, 64, 4, 2), (64, 64, 4, 3),
    ],
    ("dkv", 256): [
        (64, 64, 8, 1), (64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 1), (64, 32, 4, 1),
        (32, 64, 4, 2), (32, 128, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (64, 32, 8, 2),
    ],
}  # fmt: skip
TYPES = {"base": jnp.float32, "delta": jnp.float32, "words": jnp.uint32}
KINDS = {"fwd": plans.ForwardPlan, "dq": plans.DqPlan, "dkv": plans.DkvPlan}


def make_plan(kind, d, tile, causal):
    b, s, h = SWEEP[d]
    kind, _, option = kind.partition(" ")
    options = {"cap": dict(soft_cap=30.0), "dropout": dict(dropout=0.1)}.get(option, {})
    p = Problem(b, s, s, h, h, d, d, "bfloat16", d**-0.5, seed_batches=b, **options)
    shapes = {n: (b, s, h, d) for n in ("q", "k", "v")}
    if kind != "fwd":
        shapes |= {"do": (b, s, h, d), "base": (b, h, s), "delta": (b, h, s)}
    if option == "dropout":
        shapes["words"] = (b, h, 2, s)
    rules = Rules(Band(None, 0) if causal else Band())
    plan = KINDS[kind](p, rules, Tiles(*tile), tuple(shapes.items()))
    avals = [jax.ShapeDtypeStruct(x, TYPES.get(n, jnp.bfloat16)) for n, x in shapes.items()]
    return plan, avals


def sweep(only=None, causal=True):
    target = current_target()
    jobs = {}
    for (kind, d), candidates in CANDIDATES.items():
        if only and f"{kind}{d}".replace(" ", "-") not in only:
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
        for kind in ("dq", "dkv", "dkv cap"):
            base = base_of(make_plan(kind, d, (64, 64), causal)[0].problem, lse)
            operands[kind] = (q, k, v, do, base, delta)
        words = row_words(jnp.asarray([[3, 0, 0]], jnp.int32), b, h, s)
        operands["dkv dropout"] = (*operands["dkv"], words)
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
                rows.append(
                    f"{label} {ms:7.3f} ms {products[kind.split()[0]] * flops / ms / 1e9:6.0f} TF"
                )
            except Exception as error:
                rows.append(f"{label} {type(error).__name__}: {str(error)[:100]}")
            print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sweep", nargs="*", help="kernels to sweep, e.g. fwd128 dkv64; none: all")
    parser.add_argument("--full", action="store_true", help="sweep without a causal mask")
    parser.add_argument("--only", nargs="*", help="names of correctness cases; implies --no-time")
    parser.add_argument("--extras", action="store_true", help="only the cost of options")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    options = parser.parse_args()
    start = time.time()
    print(jax.devices()[0], current_target(), jax.__version__, flush=True)
    if options.sweep is not None:
        print("\n".join(sweep(options.sweep, not options.full)))
        return
    if options.extras:
        in_parallel([(lower_extra, n, current_target()) for n in EXTRAS])
        extras()
        return
    names, timed = (QUICK, QUICK_TIMED) if options.quick else (tuple(CASES), tuple(TIMED))
    if options.only:
        names, options.no_time = tuple(options.only), True
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
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
