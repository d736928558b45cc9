"""Grouped matrix products on this GPU: right at size, their time beside a dense product, a sweep.

    python tools/gpu/check_grouped.py                  # all three shapes, some five minutes
    python tools/gpu/check_grouped.py --only small     # shapes whose name holds one of these words
    python tools/gpu/check_grouped.py --no-sweep       # what ships, without other launches

Times are those of the device (the median of calls in one profile). The dense product has the same
operations with one matrix. The bound is the larger of operations at the dense rate and bytes at
the rate of a device copy of the same run. The last lines are the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

import numpy as np
from tools.gpu.common import jax, jnp, milliseconds, precompile

from ejkernel.kernels.triton.grouped_matmul import grouped_matmul
from ejkernel.kernels.triton.grouped_matmul.implementation import Product, RowsPlan, WeightsPlan
from ejkernel.kernels.triton.grouped_matmul.tiles import Problem, Tiles, choose, choose_weights
from ejkernel.kernels.triton.targets import current_target
from ejktest import grouped_cases

BF = jnp.bfloat16
BOUND = 6e-3  # relative, of bfloat16 results
# groups, rows, inner, columns
SHAPES = {
    "mixtral": (8, 16384, 4096, 14336),
    "deepseek": (256, 65536, 7168, 2048),
    "small": (128, 8192, 2048, 768),
}
PASSES = ("fwd", "dlhs", "drhs")
KINDS = ("even", "zipf")
# target of a pass, ms
WANTED = {
    "mixtral even": (2.75, 2.8, 2.8),
    "mixtral zipf": (2.8, 2.8, 2.8),
    "deepseek even": (3.0, 3.0, 3.6),
    "deepseek zipf": (3.6, 3.6, 4.0),
    "small even": (0.12, 0.12, 0.12),
    "small zipf": (0.13, 0.13, 0.13),
}
BIG = Tiles(128, 256, 64, 8, 4, 1, 2)
PAIR = Tiles(128, 128, 64, 4, 3, 2, 2)


def _change(t, **fields):
    return dataclasses.replace(t, **fields)


ROWS = [
    BIG,
    _change(BIG, num_stages=3),
    _change(BIG, num_stages=3, parts=1),
    _change(BIG, band=8),
    _change(BIG, band=32),
    Tiles(256, 128, 64, 8, 4, 1, 2, 8),
    Tiles(64, 256, 64, 8, 4, 1, 2, 32),
    Tiles(64, 256, 64, 4, 5, 1, 2, 32),
    PAIR,
    _change(PAIR, num_warps=8),
    Tiles(64, 256, 64, 4, 2, 2, 2, 32),
]
FEW_ROWS = [
    Tiles(64, 256, 64, 8, 4, 1, 2),
    Tiles(64, 256, 64, 4, 5, 1, 2),
    Tiles(64, 256, 64, 4, 4, 1, 2),
    Tiles(64, 256, 128, 8, 2, 1, 2),
    Tiles(64, 256, 64, 4, 2, 2, 2),
    Tiles(64, 128, 64, 4, 4, 2, 1),
    Tiles(64, 128, 128, 4, 3, 1, 1),
    Tiles(64, 128, 128, 4, 2, 2, 1),
    Tiles(64, 128, 64, 4, 2, 3, 1),
    Tiles(64, 128, 64, 4, 3, 3, 2),
    Tiles(32, 256, 64, 4, 3, 2, 2),
    Tiles(128, 256, 64, 8, 4, 1, 2),
]
WEIGHTS = [
    BIG,
    _change(BIG, num_stages=3),
    _change(BIG, num_stages=3, parts=1),
    _change(BIG, band=32),
    Tiles(256, 128, 64, 8, 4, 1, 2, 8),
    PAIR,
    _change(PAIR, num_stages=2, parts=1),
    _change(PAIR, num_warps=8),
    Tiles(128, 128, 32, 4, 4, 2, 1),
    Tiles(64, 256, 64, 4, 2, 2, 2),
    Tiles(128, 64, 64, 4, 2, 3, 1),
]


def sizes_of(kind, groups, rows):
    """Even, or the k-th largest group 1 / k of the largest, in random order."""
    if kind == "even":
        return [rows // groups] * groups
    weights = [1.0 / (i + 1) for i in range(groups)]
    random.Random(0).shuffle(weights)
    total = sum(weights)
    sizes = [int(rows * w / total) for w in weights]
    sizes[weights.index(max(weights))] += rows - sum(sizes)
    return sizes


def problem(name):
    groups, rows, inner, columns = SHAPES[name]
    return Problem(
        rows, inner, columns, groups, groups, False, "bfloat16", "bfloat16", "tf32"
    )  # fmt: skip


def product(name, which, tiles=None):
    """The call of a pass, as it ships or with other tiles."""
    p, target = problem(name), current_target()
    if which == "drhs":
        return Product(p, tiles or choose_weights(p, target), weights=True)
    p = p if which == "fwd" else p.flipped()
    return Product(p, tiles or choose(p, target))


def job(call, name, which):
    """What ``precompile`` takes."""
    groups, rows, inner, columns = SHAPES[name]
    kinds = {
        "fwd": ((rows, inner), (groups, inner, columns)),
        "dlhs": ((rows, columns), (groups, inner, columns)),
        "drhs": ((rows, inner), (rows, columns)),
    }[which]
    avals = [jax.ShapeDtypeStruct(s, BF) for s in kinds]
    avals.append(jax.ShapeDtypeStruct((groups,), jnp.int32))
    kind = WeightsPlan if call.weights else RowsPlan
    return kind(call.problem, call.tiles, 0, False), avals, current_target()


def runner(call, which):
    if which == "drhs":
        return jax.jit(lambda x, y, s: call(x, y, s, None))
    return jax.jit(lambda x, w, s: call(x, w, s, None, None))


def device_ms(fn, *args):
    """Median of the time of the kernels of a call."""
    from ejkernel.ops.compat import kernel_times

    compiled = fn.lower(*args).compile()
    out = jax.block_until_ready(compiled(*args))
    size = sum(x.nbytes for x in jax.tree.leaves(out))
    del out
    try:
        return statistics.median(kernel_times(compiled, args, max(3, min(15, 2**34 // size))))
    except Exception as error:
        print(f"no device times: {type(error).__name__} {str(error)[:100]}", flush=True)
        return milliseconds(compiled, *args)


def copy_rate():
    """Bytes read and written per second by a device copy of 2 GiB."""
    x = jnp.ones((2**30,), BF)
    return 2 * x.nbytes / device_ms(jax.jit(jnp.copy), x) * 1e3


def draw(name):
    groups, rows, inner, columns = SHAPES[name]
    a, b, c = jax.random.split(jax.random.key(1), 3)

    @jax.jit
    def make(a, b, c):
        w = jax.random.normal(b, (groups, inner, columns), BF) * jnp.asarray(inner**-0.5, BF)
        return jax.random.normal(a, (rows, inner), BF), w, jax.random.normal(c, (rows, columns), BF)

    return make(a, b, c)


@jax.jit
def _errors(g, sizes, x, w, dy, out, dx, dw):
    """Relative error of what belongs to group g, of the three results."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])
    inside = ((row < ends[g]) & (row >= ends[g] - sizes[g]))[:, None]
    mine, other = jnp.where(inside, x, 0), jnp.where(inside, dy, 0)
    matrix = w[g]

    def dot(a, b):
        return jnp.dot(a, b, preferred_element_type=jnp.float32)

    def relative(got, want):
        got = got.astype(jnp.float32)
        norm = jnp.linalg.norm(want)
        return jnp.linalg.norm(got - want) / jnp.where(norm > 0, norm, 1)

    return (
        relative(jnp.where(inside, out, 0), dot(mine, matrix)),
        relative(jnp.where(inside, dx, 0), dot(other, matrix.T)),
        relative(dw[g], dot(mine.T, other)),
    )


def correctness(name, kind, arrays):
    """Worst relative error of a few groups, and whether a second run has the same bits."""
    groups, rows, _, _ = SHAPES[name]
    sizes = sizes_of(kind, groups, rows)
    x, w, dy = arrays
    s = jnp.asarray(sizes, jnp.int32)
    runs = [runner(product(name, which), which) for which in PASSES]
    given = ((x, w), (dy, w), (x, dy))
    out = [run(*a, s) for run, a in zip(runs, given, strict=True)]
    order = np.argsort(sizes)
    chosen = {0, groups - 1, int(order[0]), int(order[-1]), int(order[groups // 2])}
    worst = np.zeros(3)
    for g in chosen:
        found = _errors(g, s, x, w, dy, *out)
        worst = np.maximum(worst, [float(e) for e in found])
    same = [
        bool(jnp.array_equal(run(*a, s), first))
        for run, a, first in zip(runs, given, out, strict=True)
    ]
    ok = bool((worst <= BOUND).all()) and all(same)
    text = " ".join(f"{p}={e:.1e}" for p, e in zip(PASSES, worst, strict=True))
    return ok, f"{'ok  ' if ok else 'FAIL'} {name} {kind}: {text} repeats={all(same)}"


def edges():
    """Awkward groups against the oracle; lines of those that fail."""
    start, lines = time.time(), []
    grouped_cases.compile_ahead(current_target())
    print(f"compiled edges in {time.time() - start:.0f}s", flush=True)
    for case in grouped_cases.CASES:
        found = grouped_cases.errors(grouped_matmul, *case)
        if max(found.values()) > grouped_cases.KINDS[case[1]][-1]:
            lines.append(f"FAIL {case}: {found}")
    print(f"edges: {len(lines)} of {len(grouped_cases.CASES)} failed", *lines, sep="\n", flush=True)
    return lines


def text(t):
    return (
        f"{t.block_m}x{t.block_n}x{t.block_k} w{t.num_warps} s{t.num_stages} c{t.per_core} "
        f"p{t.parts} b{t.band}"
    )


def bound_ms(name, which, kind, flops_rate, bytes_rate):
    groups, rows, inner, columns = SHAPES[name]
    used = sum(s > 0 for s in sizes_of(kind, groups, rows))
    held = groups if which == "drhs" else used
    moved = 2 * (rows * (inner + columns) + held * inner * columns)
    return max(2 * rows * inner * columns / flops_rate, moved / bytes_rate) * 1e3


def sweep_tiles(name, which):
    if which == "drhs":
        return WEIGHTS
    groups, rows, _, _ = SHAPES[name]
    return FEW_ROWS if rows // groups < 128 else ROWS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words; names hold one of them")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=330.0, help="stop sweeping after these")
    options = parser.parse_args()
    start, target = time.time(), current_target()
    print(jax.devices()[0], target, jax.__version__, flush=True)
    names = [n for n in SHAPES if any(w in n for w in options.only.split(","))]

    jobs = {}
    for name in names:
        for which in PASSES:
            shipped = product(name, which)
            jobs[name, which, shipped.tiles] = shipped
            if not options.no_sweep:
                for t in sweep_tiles(name, which):
                    jobs.setdefault((name, which, t), product(name, which, t))
    errors = precompile([job(call, name, which) for (name, which, _), call in jobs.items()])
    errors = dict(zip(jobs, errors, strict=True))
    for key, error in errors.items():
        if error:
            print("not compiled:", *key[:2], text(key[2]), error, flush=True)
    print(f"compiled {len(jobs)} kernels in {time.time() - start:.0f}s", flush=True)

    failed, rows, best = [], [], []
    if not options.no_check:
        failed += edges()
    rate = copy_rate()
    print(f"copy {rate / 1e12:.2f} TB/s", flush=True)
    for name in names:
        groups, m, k, n = SHAPES[name]
        x, w, dy = arrays = draw(name)
        dense = {
            "fwd": device_ms(jax.jit(jnp.dot), x, w[0]),
            "dlhs": device_ms(jax.jit(lambda a, b: a @ b.T), dy, w[0]),
            "drhs": device_ms(jax.jit(lambda a, b: a.T @ b), x, dy),
        }
        flops_rate = 2 * m * k * n / min(dense.values()) * 1e3 if name != "small" else 690e12
        given = {"fwd": (x, w), "dlhs": (dy, w), "drhs": (x, dy)}
        for kind in KINDS:
            if not options.no_check:
                ok, line = correctness(name, kind, arrays)
                print(line, flush=True)
                failed += [] if ok else [line]
            s = jnp.asarray(sizes_of(kind, groups, m), jnp.int32)
            for i, which in enumerate(PASSES):
                shipped = product(name, which)
                ms = device_ms(runner(shipped, which), *given[which], s)
                limit = bound_ms(name, which, kind, flops_rate, rate)
                want = WANTED[f"{name} {kind}"][i]
                rows.append(
                    f"{name + ' ' + kind + ' ' + which:20s} {ms:8.4f} {want:7.3f} "
                    f"{'ok  ' if ms <= want else 'MISS'} {limit / ms:7.1%} {dense[which]:8.4f}  "
                    f"{text(shipped.tiles)}"
                )
                print(rows[-1], flush=True)
                found = [(ms, shipped.tiles)]
                for t in [] if options.no_sweep else sweep_tiles(name, which):
                    late = time.time() - start > options.seconds
                    if t == shipped.tiles or errors.get((name, which, t)) or late:
                        continue
                    try:
                        call = product(name, which, t)
                        found.append((device_ms(runner(call, which), *given[which], s), t))
                    except Exception as error:
                        print(name, which, text(t), str(error)[:120], flush=True)
                if not options.no_sweep:
                    found.sort(key=lambda f: f[0])
                    best.append(f"{name} {kind} {which}:")
                    best += [f"   {ms:8.4f}  {text(t)}" for ms, t in found]
                    print("\n".join(best[-len(found) - 1 :]), flush=True)
        del x, w, dy, arrays, given
    print("\n" + "\n".join(best))
    print(f"copy {rate / 1e12:.2f} TB/s; percent: of the larger bound at that and the dense rate")
    print(f"{'case':20s} {'ms':>8} {'target':>7}      {'bound':>7} {'dense':>8}  launch")
    print("\n".join([*rows, *failed]))
    print(f"{len(failed)} failed; {time.time() - start:.0f}s in all", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
