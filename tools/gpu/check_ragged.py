"""Ragged attention over pages on this GPU: correctness at size, times against what is asked.

    python tools/gpu/check_ragged.py                  # correctness, then times
    python tools/gpu/check_ragged.py --only int8,8k   # what contains one of these words in its name
    python tools/gpu/check_ragged.py --no-check --tiles  # times, of other launches too

A time is that of one step in a chain of steps inside one program: the output of one step is the
query of the next; steps of v3 hand their cache on, which must not be copied. The last lines are
the table: milliseconds of reading and of writing steps, those asked for on one H200, FLOP/s and
bytes/s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

sys.path.insert(0, __file__.rsplit("/", 3)[0])

from tools.gpu.common import jax, jnp

from ejkernel.kernels.triton import (
    ragged_decode_attention,
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ejkernel.kernels.triton.targets import current_target
from ejktest import ragged_cases as cases


def check(name):
    """Errors of both operations, and whether two runs have the same bits."""
    m = cases.CASES[name]
    x = cases.draw(m, len(name))
    f, args = cases.writing(ragged_page_attention_v3, m, x)
    step = jax.jit(f)
    out, cache = step(*args)
    again, cache2 = step(*args)
    found = {"v3": cases.error(m, x, cache, out)}
    same = bool(jnp.array_equal(out, again))
    same &= bool(jnp.array_equal(jnp.asarray(cache).view("uint8"), cache2.view("uint8")))
    if not m.packed:
        f, args = cases.reading(ragged_page_attention, m, x | {"cache": cache})
        found["v2"] = cases.error(m, x, cache, jax.jit(f)(*args))
    return found, same


def chain_ms(step, carry, *args, few=2, many=12):
    """Milliseconds of ``carry = step(carry, *args)`` inside one program."""

    def run(n):
        def repeat(carry, *args):
            return jax.lax.scan(lambda c, _: (step(c, *args), None), carry, None, length=n)[0]

        fn = jax.jit(repeat)
        jax.block_until_ready(fn(carry, *args))
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(fn(carry, *args))
            rounds.append(time.perf_counter() - start)
        return statistics.median(rounds)

    return (run(many) - run(few)) / (many - few) * 1e3


def timed(m, cfg=None):
    """Milliseconds of a reading and of a writing step."""
    x = cases.draw(m)
    f, args = cases.reading(ragged_page_attention, m, x)
    read = chain_ms(lambda q, *rest: f(q, *rest, cfg=cfg), *args)
    g, (q, keys, values, cache, *rest) = cases.writing(ragged_page_attention_v3, m, x)

    def step(carry, *rest):
        return g(carry[0], keys, values, carry[1], *rest, cfg=cfg)

    return read, chain_ms(step, (q, cache), *rest)


def contiguous():
    """One token for each of 64 sequences over 8k contiguous keys."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (64, 32, 128), jnp.bfloat16)
    k, v = (jax.random.normal(x, (64, 8192, 8, 128), jnp.bfloat16) for x in keys[1:])
    ends = jnp.full((64,), 8192, jnp.int32)
    return chain_ms(ragged_decode_attention, q, k, v, ends * 0, ends)


LAUNCHES = (  # tokens of 4 heads, warps, stages
    (32, 8, 2), (32, 8, 3), (32, 8, 4), (16, 4, 2), (16, 4, 3), (16, 8, 3), (64, 8, 2),
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="words; names hold one of them")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--tiles", action="store_true", help="time other launches too")
    options = parser.parse_args()
    print(jax.devices()[0], current_target(), jax.__version__, flush=True)
    words, failed, table = options.only.split(","), 0, []
    for name in [] if options.no_check else cases.CASES:
        if not any(w in name for w in words):
            continue
        found, same = check(name)
        good = same and max(found.values()) <= cases.BOUND[cases.CASES[name].q]
        failed += not good
        text = ", ".join(f"{n} {e:.2e}" for n, e in found.items())
        print("ok  " if good else "FAIL", f"{name}: {text}, same bits: {same}", flush=True)
    for name, (m, bar) in {} if options.no_time else cases.TIMED.items():
        if not any(w in name for w in words):
            continue
        read, write = timed(m)
        table.append(
            f"{name:40s} {read:8.4f} {write:8.4f} {bar:7.2f}  "
            f"{m.flops / read / 1e9:6.0f} TFLOP/s {m.bytes / read / 1e9:6.2f} TB/s"
        )
        print(table[-1], flush=True)
        for queries, warps, stages in LAUNCHES if options.tiles and len(set(m.rows)) > 1 else ():
            cfg = dict(num_queries_per_block=queries, num_warps=warps, num_stages=stages)
            try:
                table.append(
                    f"    {queries} tokens, {warps} warps, {stages} stages: {timed(m, cfg)}"
                )
            except Exception as error:
                table.append(f"    {cfg}: {type(error).__name__}: {str(error)[:100]}")
            print(table[-1], flush=True)
    if not options.no_time:
        table.append(f"{'contiguous, 64 of 8k':40s} {contiguous():8.4f} {'':8s} {0.5:7.2f}")
    print("\n" + f"{'ms on one H200':40s} {'reads':>8} {'writes':>8} {'asked':>7}")
    print("\n".join(table) + f"\n{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
