"""Paged decoding on this GPU: correctness at size, time against the bytes it must read.

    python tools/gpu/check_page.py             # correctness, times, launch variants: < 3 minutes
    python tools/gpu/check_page.py --quick     # a few of each, under a minute
    python tools/gpu/check_page.py --only int8 # times and variants whose name contains a word

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

from ejkernel.kernels.triton.page_attention import core, page_attention, tiles
from ejkernel.kernels.triton.page_attention.interface import problem_of
from ejkernel.kernels.triton.targets import current_target

BF, HALF, F32 = jnp.bfloat16, jnp.float16, jnp.float32
I8, E4, E5 = jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call: contexts, heads, sizes, dtypes."""

    lens: tuple
    h: int = 32
    hk: int = 8
    d: int = 128
    dv: int = 128
    ps: int = 16
    q: object = BF
    kv: object = BF

    @property
    def bytes(self):
        """Of keys and values inside the contexts."""
        return sum(self.lens) * self.hk * (self.d + self.dv) * jnp.dtype(self.kv).itemsize


def draw(s: Shape, seed=0):
    """q, caches of exactly the pages needed and three more, lengths, shuffled tables."""
    rng = np.random.default_rng(seed)
    columns = max(1, max(-(-n // s.ps) for n in s.lens))
    counts = [-(-n // s.ps) for n in s.lens]
    pages = sum(counts) + 3
    order = rng.permutation(pages)
    tables = np.full((len(s.lens), columns), -1, np.int32)
    start = 0
    for row, n in zip(tables, counts, strict=True):
        row[:n] = order[start : start + n]
        start += n
    tables[tables < 0] = rng.choice([-1, 2**30, -(2**31), pages], (tables < 0).sum())
    a, b, c = jax.random.split(jax.random.key(seed), 3)

    @jax.jit
    def make(a, b, c):
        q = jax.random.normal(a, (len(s.lens), s.h, s.d), F32).astype(s.q)
        k = jax.random.normal(b, (pages, s.ps, s.hk, s.d), BF)
        v = jax.random.normal(c, (pages, s.ps, s.hk, s.dv), BF)
        if s.kv == I8:
            k, v = (jnp.clip(jnp.round(x * 40), -128, 127) for x in (k, v))
        return q, k.astype(s.kv), v.astype(s.kv)

    return (*make(a, b, c), jnp.asarray(s.lens, jnp.int32), jnp.asarray(tables))


def oracle(s, q, k, v, lens, tables, *, window=None, cap=None, aux=None, ks=1.0, vs=1.0):
    """Row by row in float32 with full products."""
    high = dict(precision="highest")
    t = tables.shape[1] * s.ps

    def row(x):
        q, n, table = x
        table = jnp.clip(table, 0, k.shape[0] - 1)
        kk = k[table].reshape(t, s.hk, s.d).astype(F32)
        vv = v[table].reshape(t, s.hk, s.dv).astype(F32)
        j = jnp.arange(t)
        seen = j < n
        if window is not None:
            seen &= j >= n - 1 - window
        kk, vv = (jnp.where(seen[:, None, None], x, 0.0) for x in (kk, vv))
        g = q.astype(F32).reshape(s.hk, -1, s.d)
        x = jnp.einsum("hgd,thd->hgt", g, kk, **high) * (s.d**-0.5 * ks)
        x = cap * jnp.tanh(x / cap) if cap else x
        x = jnp.where(seen, x, -jnp.inf)
        m = jnp.max(x, -1, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp(x - m)
        total = p.sum(-1, keepdims=True)
        if aux is not None:
            total += jnp.exp(aux.reshape(s.hk, -1, aux.shape[1]) - m).sum(-1, keepdims=True)
        p = p / jnp.where(total == 0.0, 1.0, total)
        return jnp.einsum("hgt,thd->hgd", p, vv, **high).reshape(s.h, s.dv) * vs

    return jax.lax.map(row, (q, lens, tables))


UNEVEN = (4096, 16, 1, 0, 777, 2048, 3000, 65)
CASES = {
    "page 16": (Shape(UNEVEN), {}),
    "page 64": (Shape(UNEVEN, ps=64), {}),
    "page 1": (Shape(UNEVEN[4:], ps=1), {}),
    "page 3": (Shape(UNEVEN[4:], ps=3), {}),
    "page 256": (Shape(UNEVEN, ps=256), {}),
    "long single": (Shape((100001,)), {}),
    "no context": (Shape((0, 0, 0)), {}),
    "batch 1500": (Shape(tuple(i % 97 for i in range(1500)), h=8, hk=2, d=64, dv=64), {}),
    "splits 1": (Shape(UNEVEN), dict(num_splits=1)),
    "splits 5": (Shape(UNEVEN), dict(num_splits=5)),
    "splits 1 sinks": (Shape(UNEVEN), dict(num_splits=1, sinks=2)),
    "window": (Shape(UNEVEN), dict(window=300)),
    "cap": (Shape(UNEVEN), dict(cap=5.0)),
    "sinks": (Shape(UNEVEN), dict(sinks=3)),
    "window cap sinks": (Shape(UNEVEN, ps=64), dict(window=1000, cap=20.0, sinks=1)),
    "mha": (Shape(UNEVEN, h=8, hk=8), {}),
    "mqa 8": (Shape(UNEVEN, h=8, hk=1), {}),
    "mqa 32": (Shape(UNEVEN, h=32, hk=1), {}),
    "mqa 64": (Shape(UNEVEN, h=64, hk=1), {}),
    "mqa 128": (Shape(UNEVEN, h=128, hk=1), {}),
    "group 5": (Shape(UNEVEN, h=10, hk=2), {}),
    "d16": (Shape(UNEVEN, d=16, dv=16), {}),
    "d64": (Shape(UNEVEN, d=64, dv=64), {}),
    "d80": (Shape(UNEVEN, d=80, dv=80), {}),
    "d96": (Shape(UNEVEN, d=96, dv=96), {}),
    "d112": (Shape(UNEVEN, d=112, dv=112), {}),
    "d192/128": (Shape(UNEVEN, d=192, dv=128), {}),
    "d256": (Shape(UNEVEN, d=256, dv=256), {}),
    "d256 mqa 64": (Shape(UNEVEN, h=64, hk=1, d=256, dv=256), {}),
    "float16": (Shape(UNEVEN, q=HALF, kv=HALF), {}),
    "float32": (Shape(UNEVEN, q=F32, kv=F32), {}),
    "float32 d256": (Shape(UNEVEN, q=F32, kv=F32, d=256, dv=256), {}),
    "int8": (Shape(UNEVEN, kv=I8), dict(ks=0.025, vs=0.03)),
    "int8 page 1": (Shape(UNEVEN[4:], kv=I8, ps=1, d=72, dv=40), dict(ks=0.025, vs=0.03)),
    "e4m3": (Shape(UNEVEN, kv=E4), dict(ks=0.5, vs=2.0)),
    "e5m2": (Shape(UNEVEN, kv=E5), dict(ks=0.5, vs=2.0)),
    "e4m3 d64 window": (Shape(UNEVEN, kv=E4, d=64, dv=64), dict(window=77)),
    "float32 q, int8": (Shape(UNEVEN, q=F32, kv=I8), dict(ks=0.025, vs=0.03)),
}
QUICK = (
    "page 16", "page 64", "page 1", "long single", "splits 1", "splits 5", "window cap sinks",
    "mqa 64", "d80", "d256", "float32", "int8", "e4m3",
)  # fmt: skip
# output rounding is 2e-3 in bfloat16; probabilities rounded to it add as much
BOUND = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-5}


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


def correctness(names):
    rows, failed = [], 0
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


def uneven(batch=64, mean=4096, low=16, high=16384):
    """Contexts between low and high whose mean is exactly ``mean``."""
    rng = np.random.default_rng(1)
    n = np.exp(rng.uniform(np.log(low), np.log(high), batch))
    n[:2] = low, high
    for _ in range(100):
        n[2:] = np.clip(n[2:] * (batch * mean - n[:2].sum()) / n[2:].sum(), low, high)
    n = n.astype(int)
    n[np.argmax((n > low + batch) & (n < high - batch))] += batch * mean - n.sum()
    return tuple(int(x) for x in n)


EVEN = (8192,) * 64
TIMED = {
    "B64 8k page 16": Shape(EVEN),
    "B64 8k page 64": Shape(EVEN, ps=64),
    "B64 8k page 1": Shape(EVEN, ps=1),
    "B64 8k page 256": Shape(EVEN, ps=256),
    "B1 128k page 16": Shape((131072,)),
    "B1 128k page 64": Shape((131072,), ps=64),
    "B64 4k even": Shape((4096,) * 64),
    "B64 4k uneven": Shape(uneven()),
    "B64 8k int8": Shape(EVEN, kv=I8),
    "B64 8k e4m3": Shape(EVEN, kv=E4),
    "B64 8k e5m2": Shape(EVEN, kv=E5),
    "B64 8k int8 page 64": Shape(EVEN, kv=I8, ps=64),
    "B64 8k D64": Shape(EVEN, d=64, dv=64),
    "B16 8k D256": Shape((8192,) * 16, d=256, dv=256),
    "B64 8k MQA 64": Shape(EVEN, h=64, hk=1),
    "B256 512": Shape((512,) * 256),
    "B8 1k": Shape((1024,) * 8),
}
QUICK_TIMED = (
    "B64 8k page 16", "B64 8k page 64", "B1 128k page 16", "B64 4k even", "B64 4k uneven",
    "B64 8k int8", "B64 8k e4m3",
)  # fmt: skip


def chain(s, tile, steps):
    """``steps`` decoding steps, each asking with the answer of the one before."""
    problem = tile_problem(s)
    static = core.Static(problem, tile)

    def run(q, k, v, lens, tables):
        for _ in range(steps):
            q = core.attend(static, q, k, v, lens, tables, None, None, None)
        return q

    return jax.jit(run)


def tile_problem(s):
    names = ("query", "key_cache", "value_cache", "context_lens", "block_tables")
    return problem_of(dict(zip(names, operands(s), strict=True)))


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
        ("int8 against bf16, >= 1.7", lambda: ms["B64 8k page 16"] / ms["B64 8k int8"], 1.7),
        ("e4m3 against bf16, >= 1.7", lambda: ms["B64 8k page 16"] / ms["B64 8k e4m3"], 1.7),
    )
    rows = []
    for text, get, least in targets:
        try:
            value = get()
        except KeyError:
            continue
        rows.append(f"{'ok  ' if value >= least else 'MISS'} {text:36s} {value:.3f}")
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="word in the names of what is timed and swept")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--sweep-seconds", type=float, default=60.0, help="of timing")
    options = parser.parse_args()
    start = time.time()
    print(jax.devices()[0], current_target(), jax.__version__, flush=True)
    rows, table, best, failed, ms = [], [], [], 0, {}
    if not options.no_check:
        rows, failed = correctness(QUICK if options.quick else CASES)
    if not options.no_time:
        rate = copy_rate()
        print(f"copy {rate / 1e12:.2f} TB/s", flush=True)
        names = [n for n in (QUICK_TIMED if options.quick else TIMED) if options.only in n]
        heuristic = [
            (TIMED[n], tiles.choose(tile_problem(TIMED[n]), current_target())) for n in names
        ]
        compile_all([kernels(chain(s, t, 1), operands(s)) for s, t in heuristic])
        table = timing(names, rate, ms)
        if not options.no_sweep and not options.quick:
            swept = ("B64 8k page 16", "B1 128k page 16", "B64 8k int8", "B64 8k e4m3")
            chosen = [n for n in swept if options.only in n] or names[:2]
            best = sweep(chosen, rate, options.sweep_seconds)
        table = [f"copy {rate / 1e12:.2f} TB/s", *table, "", *verdict(ms, rate)]
    bad = [r for r in rows if r.startswith("FAIL")]
    print("\n" + "\n".join([*best, "", *table, "", *bad]))
    print(f"{failed} of {len(rows)} correctness cases failed; {time.time() - start:.0f}s in all")


if __name__ == "__main__":
    main()
