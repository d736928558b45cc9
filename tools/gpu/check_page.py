"""Paged decoding on this GPU: correctness at size, time against the bytes it must read.

    python tools/gpu/check_page.py             # correctness, times, launch variants: < 3 minutes
    python tools/gpu/check_page.py --quick     # a few of each, under a minute
    python tools/gpu/check_page.py --only int8,e4m3  # what contains one of these words in its name

A time is that of one step in a chain of steps inside one program: the output of one step is the
query of the next, so neither dispatch from Python nor a merge of equal calls enters. The bound is
keys and values read once, at the rate of a device copy measured in the same run (bytes read plus
written). The last lines are the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

import numpy as np
from tools.gpu.common import jax, jnp, precompile, relative
from tools.gpu.page_cases import (
    AGAINST,
    BF,
    BOUND,
    CASES,
    E4,
    E5,
    F32,
    I8,
    QUICK,
    QUICK_TIMED,
    TIMED,
    draw,
    oracle,
)  # fmt: skip

from ejkernel.kernels.triton.page_attention import page_attention, tiles
from ejkernel.kernels.triton.targets import current_target
from ejkernel.ops.differentiate import Work
from ejktest.bound import bound


def sinks_of(s, o):
    return jax.random.normal(jax.random.key(3), (s.h, o["sinks"]), F32) if "sinks" in o else None


def runner(s, o):
    """The call of a case as a jitted function of its five arrays."""
    aux = sinks_of(s, o)
    return jax.jit(
        lambda *x: page_attention(
            *x, softmax_aux=aux, sliding_window=o.get("window"), logits_soft_cap=o.get("cap"),
            k_scale=o.get("ks"), v_scale=o.get("vs"), num_splits=o.get("num_splits"),
        )
    )  # fmt: skip


def operands(s):
    """Types of the five arrays of a shape."""
    pages = sum(-(-n // s.ps) for n in s.lens) + 3
    columns = max(1, max(-(-n // s.ps) for n in s.lens))
    b = len(s.lens)
    shapes = (b, s.h, s.d), (pages, s.ps, s.hk, s.d), (pages, s.ps, s.hk, s.dv), (b,), (b, columns)
    kinds = s.q, s.kv, s.kv, jnp.int32, jnp.int32
    return [jax.ShapeDtypeStruct(x, jnp.dtype(t)) for x, t in zip(shapes, kinds, strict=True)]


def kernels(fn, avals):
    """(plan, operand types, target) of every kernel call in the trace of ``fn``."""
    found, target = [], current_target()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if "plan" in eqn.params:
                found.append((eqn.params["plan"], [x.aval for x in eqn.invars], target))
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(fn)(*avals).jaxpr)
    return [
        (plan, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given], target)
        for plan, given, target in found
    ]


def compile_all(groups):
    """Compile lists of kernels in parallel; the first error of each group, or None."""
    start = time.time()
    unique = {plan: job for jobs in groups for job in jobs for plan in (job[0],)}
    errors = dict(zip(unique, precompile(unique.values()), strict=True))
    print(f"compiled {len(unique)} kernels in {time.time() - start:.0f}s", flush=True)
    return [next((errors[j[0]] for j in jobs if errors[j[0]]), None) for jobs in groups]


def check(name):
    """(relative error, same bits twice, unseen memory without effect)."""
    s, o = CASES[name]
    q, k, v, lens, tables = draw(s, len(name))
    plain = dict(window=o.get("window"), cap=o.get("cap"), ks=o.get("ks", 1.0), vs=o.get("vs", 1.0))
    aux = sinks_of(s, o)
    truth = jax.jit(lambda *x: oracle(s, *x, aux=aux, **plain))(q, k, v, lens, tables)
    run = runner(s, o)
    first, second = run(q, k, v, lens, tables), run(q, k, v, lens, tables)
    same = bool(jnp.array_equal(first, second))
    clean = True
    if jnp.dtype(s.kv) != I8:
        seen = np.zeros(k.shape[:2], bool)
        for n, row in zip(s.lens, np.asarray(tables), strict=True):
            j = np.arange(n)
            seen[row[j // s.ps], j % s.ps] = True
        hide = jnp.asarray(~seen)[:, :, None, None]
        spoil = jax.jit(lambda x: jnp.where(hide, jnp.asarray(jnp.nan, x.dtype), x))
        clean = bool(jnp.array_equal(first, run(q, spoil(k), spoil(v), lens, tables)))
    return relative(first, truth), same, clean


def every_code(kind):
    """Numbers read inexactly, of all that 8 bits can say: each is the only key of its row."""
    codes = np.arange(256, dtype=np.uint8).view(np.dtype(kind))
    v = jnp.asarray(codes.reshape(16, 1, 1, 16))
    q, k = jnp.ones((16, 1, 16), BF), jnp.zeros_like(v)
    lens, tables = jnp.ones(16, jnp.int32), jnp.arange(16)[:, None]
    got = jax.jit(lambda *x: page_attention(*x, num_splits=1))(q, k, v, lens, tables)
    got, want = np.asarray(got, np.float32).ravel(), codes.astype(np.float32)
    # a number that is not finite spoils the row of 16 only by itself
    return int((~((got == want) | (np.isnan(got) & ~np.isfinite(want)))).sum())


def correctness(names):
    rows, failed = [], 0
    for kind in (I8, E4, E5):
        wrong = every_code(kind)
        failed += wrong > 0
        mark = "FAIL" if wrong else "ok  "
        rows.append(f"{mark} every {jnp.dtype(kind).name}: {wrong} of 256 inexact")
        print(rows[-1], flush=True)
    compile_all([kernels(runner(*CASES[n]), operands(CASES[n][0])) for n in names])
    for name in names:
        start, s = time.time(), CASES[name][0]
        bound = BOUND[jnp.dtype(s.q).name]
        if jnp.dtype(s.q) == F32 and s.d > 128:
            bound = 2e-3  # one tf32 product instead of three
        try:
            error, same, clean = check(name)
            ok = same and clean and error <= bound
            text = f"o={error:.1e}" + ("" if same else " NOT REPEATABLE")
            text += "" if clean else " READS UNSEEN MEMORY"
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {str(error)[:300]}"
        failed += not ok
        rows.append(f"{'ok  ' if ok else 'FAIL'} {name:18s} {text}  [{time.time() - start:.1f}s]")
        print(rows[-1], flush=True)
    return rows, failed


def chain(s, tile, steps):
    """``steps`` decoding steps, each asking with the answer of the one before."""
    problem = tile_problem(s)
    work = Work(page_attention, problem, tile, current_target())

    def run(q, k, v, lens, tables):
        for _ in range(steps):
            arrays = dict(q=q, k=k, v=v, lens=lens, tables=tables)
            (q,), _ = page_attention.forward(work, arrays)
        return q

    return jax.jit(run)


def tile_problem(s):
    names = ("query", "key_cache", "value_cache", "context_lens", "block_tables")
    call = bound(page_attention.call, **dict(zip(names, operands(s), strict=True)))
    return page_attention.problem(call.arguments)


def step_ms(s, tile, args):
    """Median over rounds of the time of one step."""
    steps = max(4, min(32, int(4e-3 / (s.bytes / 4e12))))
    fn = chain(s, tile, steps)
    jax.block_until_ready(fn(*args))
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([fn(*args) for _ in range(3)])
        rounds.append((time.perf_counter() - start) / steps / 3 * 1e3)
    return statistics.median(rounds)


def copy_rate():
    """Bytes read and written per second by a device copy of 2 GiB."""
    x = jnp.ones((2**30,), jnp.bfloat16)

    def ms(n):
        out = x
        start = time.perf_counter()
        for _ in range(n):
            out = jnp.copy(out)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    ms(3)
    return 2 * x.nbytes / statistics.median(((ms(12) - ms(2)) / 10) for _ in range(5))


def describe(t):
    return f"b{t.block} w{t.num_warps} s{t.num_stages} c{t.per_core} n{t.splits or '-'}"


def timing(names, rate, seconds):
    """Times with the heuristic launch."""
    rows = [f"{'heuristic launch':20s} {'ms':>8} {'TB/s':>6} {'of copy':>8}  launch"]
    for name in names:
        s = TIMED[name]
        t = tiles.choose(tile_problem(s), current_target())
        try:
            ms = step_ms(s, t, draw(s))
        except Exception as error:
            rows.append(f"{name:20s} {type(error).__name__}: {str(error)[:150]}")
            print(rows[-1], flush=True)
            continue
        seconds[name] = ms
        got = s.bytes / ms * 1e3
        rows.append(f"{name:20s} {ms:8.4f} {got / 1e12:6.2f} {got / rate:8.1%}  {describe(t)}")
        print(rows[-1], flush=True)
    return rows


def variants(s):
    """Launches near the heuristic one, itself first, the others in random order."""
    problem, limit = tile_problem(s), current_target().shared_limit
    base = tiles.choose(problem, current_target())
    out = set()
    for block in (base.block // 2, base.block, base.block * 2):
        for warps, per_core in ((2, 4), (4, 1), (4, 2), (4, 3), (8, 1), (8, 2)):
            if block < 16 or block // warps < 8:
                continue
            fits = [
                n
                for n in (2, 3, 4, 5, 6, 8)
                if per_core * tiles.held_bytes(problem, block, n) <= limit
            ]
            out |= {tiles.Tiles(block, warps, n, per_core) for n in fits[-2:]}
    for splits in (1, 2, 4, 16, 33, 66):
        if 4096 >= len(s.lens) * splits * s.hk >= 128:
            out.add(dataclasses.replace(base, splits=splits))
    out = sorted(out - {base}, key=describe)
    np.random.default_rng(0).shuffle(out)
    return [base, *out]


def sweep(names, rate, limit):
    """The best launches by time; compiles them in parallel first. ``limit``: seconds of timing."""
    jobs = [(n, t) for n in names for t in variants(TIMED[n])]
    errors = compile_all([kernels(chain(TIMED[n], t, 1), operands(TIMED[n])) for n, t in jobs])
    rows, start = [], time.time()
    for i, name in enumerate(names):
        s, found, tried = TIMED[name], [], 0
        args = draw(s)
        for (other, t), error in zip(jobs, errors, strict=True):
            if other != name or error or time.time() > start + limit * (i + 1) / len(names):
                continue
            tried += 1
            try:
                found.append((step_ms(s, t, args), t))
            except Exception as error:
                print(name, describe(t), type(error).__name__, str(error)[:100], flush=True)
        found.sort(key=lambda x: x[0])
        fixed = [x for x in found[6:] if x[1].splits][:1]
        text = [
            f"  {ms:8.4f} ms {s.bytes / ms * 1e3 / rate:7.1%}  {describe(t)}"
            for ms, t in [*found[:6], *fixed]
        ]
        rows += [f"{name}: best of {tried}", *text]
        print("\n".join(rows[-len(text) - 1 :]), flush=True)
    return rows


def verdict(ms, rate):
    """The figures asked for, from the heuristic launches."""

    def of_copy(name):
        return TIMED[name].bytes / ms[name] * 1e3 / rate

    targets = (
        ("B64 8k page 16 of copy, >= 0.85", lambda: of_copy("B64 8k page 16"), 0.85),
        ("B64 8k page 64 of copy, >= 0.85", lambda: of_copy("B64 8k page 64"), 0.85),
        ("B1 128k of copy, >= 0.75", lambda: of_copy("B1 128k page 16"), 0.75),
        ("even / uneven, >= 0.87", lambda: ms["B64 4k even"] / ms["B64 4k uneven"], 1 / 1.15),
        *(
            (f"{name} against bf16, >= 1.7", lambda n=name, o=other: ms[o] / ms[n], 1.7)
            for name, other in AGAINST.items()
        ),
    )
    rows = []
    for text, get, least in targets:
        try:
            value = get()
        except KeyError:
            continue
        rows.append(f"{'ok  ' if value >= least else 'MISS'} {text:40s} {value:.3f}")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="words; names hold one of them")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--sweep-seconds", type=float, default=60.0, help="of timing")
    options = parser.parse_args()
    start = time.time()
    print(jax.devices()[0], current_target(), jax.__version__, flush=True)
    rows, table, best, failed, ms = [], [], [], 0, {}
    words = options.only.split(",")

    def asked(names):
        return [n for n in names if any(w in n for w in words)]

    if not options.no_check:
        rows, failed = correctness(asked(QUICK if options.quick else CASES))
    if not options.no_time:
        rate = copy_rate()
        print(f"copy {rate / 1e12:.2f} TB/s", flush=True)
        wanted = asked(QUICK_TIMED if options.quick else TIMED)
        names = [n for n in TIMED if n in {*wanted, *map(AGAINST.get, wanted)}]
        heuristic = [
            (TIMED[n], tiles.choose(tile_problem(TIMED[n]), current_target())) for n in names
        ]
        compile_all([kernels(chain(s, t, 1), operands(s)) for s, t in heuristic])
        table = timing(names, rate, ms)
        if not options.no_sweep and not options.quick:
            swept = ("B64 8k page 16", "B1 128k page 16", "B64 8k int8", "B64 8k e4m3")
            chosen = [n for n in swept if n in wanted] or wanted[:2]
            best = sweep(chosen, rate, options.sweep_seconds)
        table = [f"copy {rate / 1e12:.2f} TB/s", *table, "", *verdict(ms, rate)]
    bad = [r for r in rows if r.startswith("FAIL")]
    print("\n" + "\n".join([*best, "", *table, "", *bad]))
    print(f"{failed} of {len(rows)} correctness cases failed; {time.time() - start:.0f}s in all")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
