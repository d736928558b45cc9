"""Hopper flash attention on this GPU: correctness at size, speed beside cuDNN and Triton.

    python tools/gpu/check_mosaic.py                 # everything, about four minutes
    python tools/gpu/check_mosaic.py --no-time       # correctness
    python tools/gpu/check_mosaic.py --no-check      # speed, then what options cost
    python tools/gpu/check_mosaic.py --only d64      # cases whose name has one of the words

The last lines are the tables; the exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from tools.gpu.common import jax, jnp, milliseconds

from ejkernel.kernels.pallas.gpu.flash_attention import flash_attention
from ejkernel.kernels.pallas.gpu.flash_attention.implementation import DIMS, DTYPES
from ejkernel.types.structure import Unsupported
from ejktest.attention_at_size import BF, CASES, bound, check, draw


def supported(name) -> bool:
    (*_, d, dv, dtype), o = CASES[name]
    fits = (d, dv) in DIMS and jnp.dtype(dtype).name in DTYPES
    return fits and not {"bias", "dropout", "dense"} & o.keys()


def correctness(names):
    rows, failed = [], 0

    def run(name):
        start = time.time()
        try:
            errors, same = check(name, flash_attention)
            ok = same and all(e <= bound(name) for e in errors.values())
            text = " ".join(f"{n}={e:.1e}" for n, e in errors.items())
            text += "" if same else " NOT REPEATABLE"
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {str(error)[:300]}"
        return ok, f"{'ok  ' if ok else 'FAIL'} {name:18s} {text}  [{time.time() - start:.1f}s]"

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for ok, row in pool.map(run, names):
            failed += not ok
            rows.append(row)
            print(row, flush=True)
    return rows, failed


# b, s, h, hk, d, causal
TIMED = {
    "B4 S4k H16 D128 full": (4, 4096, 16, 16, 128, False),
    "B4 S4k H16 D128 causal": (4, 4096, 16, 16, 128, True),
    "B2 S8k H16 D128 full": (2, 8192, 16, 16, 128, False),
    "B2 S8k H16 D128 causal": (2, 8192, 16, 16, 128, True),
    "B1 S16k H16 D128 full": (1, 16384, 16, 16, 128, False),
    "B1 S16k H16 D128 causal": (1, 16384, 16, 16, 128, True),
    "B2 S8k H32/8 D128 causal": (2, 8192, 32, 8, 128, True),
    "B4 S4k H32 D64 full": (4, 4096, 32, 32, 64, False),
    "B4 S4k H32 D64 causal": (4, 4096, 32, 32, 64, True),
    "B1 S16k H32 D64 full": (1, 16384, 32, 32, 64, False),
    "B1 S16k H32 D64 causal": (1, 16384, 32, 32, 64, True),
    "B2 S8k H8 D256 full": (2, 8192, 8, 8, 256, False),
    "B2 S8k H8 D256 causal": (2, 8192, 8, 8, 256, True),
    "B32 S512 H16 D128 causal": (32, 512, 16, 16, 128, True),
    "B32 S1k H16 D128 causal": (32, 1024, 16, 16, 128, True),
}


def cudnn(q, k, v, **o):
    return jax.nn.dot_product_attention(q, k, v, is_causal=o["causal"], implementation="cudnn")


def triton(q, k, v, **o):
    from ejkernel.kernels.triton.flash_attention import flash_attention

    return flash_attention(q, k, v, **o)


def pair(f, **o):
    """(forward, forward and backward) as jitted functions of q, k, v, do."""

    def both(q, k, v, do):
        out, back = jax.vjp(lambda q, k, v: f(q, k, v, **o), q, k, v)
        return out, back(do)

    return jax.jit(lambda q, k, v, do: f(q, k, v, **o)), jax.jit(both)


def timing(names, peers):
    head = f"{'bfloat16, TFLOP/s':26s}" + "".join(f"{p:>9} fwd   f+b" for p in ("here", *peers))
    rows = [head + "   ratios to cuDNN"]
    for name in names:
        b, s, h, hk, d, causal = TIMED[name]
        args = draw(1, b, s, s, h, hk, d, d, BF)
        flops = 4 * b * h * s * s * d / (2 if causal else 1)
        cells, rates = "", []
        for f in (flash_attention, *(peers[p] for p in peers)):
            both = []
            for n, g in zip((1, 3.5), pair(f, causal=causal), strict=True):
                try:
                    both.append(n * flops / milliseconds(g, *args) / 1e9)
                except Exception as error:
                    both.append(float("nan"))
                    print(name, f"{type(error).__name__}: {str(error)[:150]}", flush=True)
            rates.append(both)
            cells += f"{both[0]:13.0f} {both[1]:5.0f}"
        ratios = [a / b for a, b in zip(*rates[:2], strict=True)] if peers else []
        rows.append(f"{name:26s}{cells}   " + " ".join(f"{r:5.2f}" for r in ratios))
        print(rows[-1], flush=True)
    return rows


def options():
    """What each option costs beside the plain call, forward and forward with backward."""
    b, s, h, d = 1, 16384, 16, 128
    args = draw(1, b, s, s, h, h, d, d, BF)
    sinks = jax.random.normal(jax.random.key(8), (h, 1), jnp.float32)
    ends = jnp.arange(0, s + 1, s // 8, dtype=jnp.int32)
    cases = {
        "plain causal": ({}, 1.0),
        "soft cap": ({"logits_soft_cap": 30.0}, 1.0),
        "sinks": ({"softmax_aux": sinks}, 1.0),
        "window 1024": ({"sliding_window": (1024, 0)}, 1024 / (s / 2)),
        "8 documents": ({"cum_seqlens_q": ends}, 1 / 8),
    }
    rows, plain = [f"{'S16k H16 D128 causal':22s}    fwd ms    f+b ms   speed at equal work"], None
    for name, (o, work) in cases.items():
        try:
            ms = [milliseconds(g, *args) for g in pair(flash_attention, causal=True, **o)]
        except Exception as error:
            rows.append(f"{name:22s} {type(error).__name__}: {str(error)[:150]}")
            continue
        plain = plain or ms
        ratios = [work * p / m for p, m in zip(plain, ms, strict=True)]
        rows.append(f"{name:22s} {ms[0]:9.3f} {ms[1]:9.3f}   {ratios[0]:5.2f} {ratios[1]:5.2f}")
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="words, separated by commas")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--peers", default="cudnn,triton")
    args = parser.parse_args()
    words = args.only.split(",") if args.only else [""]

    def wanted(names):
        return [n for n in names if any(w.lower() in n.lower() for w in words)]

    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    tables, failed = [], 0
    if not args.no_check:
        rows, failed = correctness([n for n in wanted(CASES) if supported(n)])
        tables.append(rows)
        try:
            flash_attention(*draw(1, 1, 64, 64, 2, 2, 64, 64, jnp.float32)[:3])
            tables.append(["FAIL float32 was not refused"])
            failed += 1
        except Unsupported:
            pass
    if not args.no_time:
        peers = {p: {"cudnn": cudnn, "triton": triton}[p] for p in args.peers.split(",") if p}
        tables.append(timing(wanted(TIMED), peers))
        if not args.only:
            tables.append(options())
    print()
    print("\n\n".join("\n".join(rows) for rows in tables))
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
