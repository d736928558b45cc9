"""Flash attention of this checkout beside that of another, on this GPU, by turns.

    python tools/gpu/compare_flash.py OLD                # OLD holds packages/*/src
    python tools/gpu/compare_flash.py OLD --rounds 5 --only "D128 causal"

One process for each set of sources compiles all calls, then they take turns: a case in one, the
same case in the other, three rounds in changing order. Prints milliseconds (medians) and old over
new: above 1, new is faster. ``--logs DIR`` keeps what the compilers say of registers and spills.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import glob
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = {
    "B1 S16k H16 D128": (1, 16384, 16, 128),
    "B4 S4k H16 D128": (4, 4096, 16, 128),
    "B1 S16k H16 D64": (1, 16384, 16, 64),
    "B2 S8k H8 D256": (2, 8192, 8, 256),
}
BIASED = "B4 S4k H16 D128"
MARK = "@@"


def names() -> list[str]:
    out = []
    for size in SIZES:
        for mask in ("causal", "full"):
            out += [f"{size} {mask} {way}" for way in ("hopper", "triton")]
    out += [f"{BIASED} {mask} triton biased" for mask in ("causal", "full")]
    return [f"{name} {part}" for name in out for part in ("fwd", "fwd+bwd")]


def worker(wanted: list[str]) -> None:
    """Compiles ``wanted``, then answers each line ``name`` with its milliseconds."""
    import jax
    import jax.numpy as jnp

    def attention(name):
        if "triton" in name:
            from ejkernel.kernels.triton.flash_attention import flash_attention
        else:
            from ejkernel.kernels.pallas.gpu.flash_attention import flash_attention
        causal = " causal" in name

        def f(q, k, v, bias=None):
            if bias is None:
                return flash_attention(q, k, v, causal=causal)
            return flash_attention(q, k, v, bias, causal=causal)

        return f

    def shapes(name):
        b, s, h, d = SIZES[" ".join(name.split()[:4])]
        given = [jax.ShapeDtypeStruct((b, s, h, d), jnp.bfloat16)] * 4
        if "biased" in name:
            given.append(jax.ShapeDtypeStruct((1, h, s, s), jnp.bfloat16))
        return given

    def compiled(name):
        f = attention(name)
        if name.endswith("fwd+bwd"):

            def run(q, k, v, do, *bias):
                o, back = jax.vjp(f, q, k, v, *bias)
                return o, back(do)
        else:

            def run(q, k, v, do, *bias):
                return f(q, k, v, *bias)

        return jax.jit(run).lower(*shapes(name)).compile()

    def arrays(name):
        key = jax.random.key(0)
        made = []
        for n, x in enumerate(shapes(name)):
            made.append(jax.random.normal(jax.random.fold_in(key, n), x.shape, x.dtype))
        return jax.block_until_ready(made)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        programs = {name: pool.submit(compiled, name) for name in wanted}
        for name, found in programs.items():
            try:
                found.result()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    print(MARK, json.dumps("ready"), flush=True)
    held, given = "", []
    for line in sys.stdin:
        name = line.strip()
        try:
            program = programs[name].result()
            if name.rsplit(" ", 1)[0] != held:
                given = []
                given, held = arrays(name), name.rsplit(" ", 1)[0]
            jax.block_until_ready(program(*given))
            start = time.perf_counter()
            jax.block_until_ready(program(*given))
            calls = max(2, min(60, int(0.06 / max(time.perf_counter() - start, 1e-5))))
            times = []
            for _ in range(3):
                start = time.perf_counter()
                for _ in range(calls):
                    out = program(*given)
                jax.block_until_ready(out)
                times.append((time.perf_counter() - start) / calls * 1e3)
            print(MARK, json.dumps(statistics.median(times)), flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
            print(MARK, json.dumps(None), flush=True)


class Process:
    """A worker on the sources under ``root``; what else it prints goes to ``log``."""

    def __init__(self, root: pathlib.Path, wanted: list[str], log: pathlib.Path | None) -> None:
        mine = sorted(glob.glob(f"{root}/packages/*/src"))
        if not mine:
            sys.exit(f"{root}: no packages/*/src there")
        kept = [p for p in os.environ.get("PYTHONPATH", "").split(":") if "/packages/" not in p]
        env = os.environ | {"PYTHONPATH": ":".join([*mine, *kept])}
        env |= {"MOSAIC_GPU_DUMP_PTXAS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.log = open(log, "w") if log else None
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(wanted)],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            stderr=None if self.log is None else self.log,
        )  # fmt: skip
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Both workers compile at once: neither may wait for its output to be read."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line[len(MARK) :]))
            elif self.log:
                self.log.write(line)
        self.answers.put("ended")

    def answer(self):
        answer = self.answers.get()
        if answer == "ended":
            sys.exit("a worker ended early: see what it printed, or --logs")
        return answer

    def ask(self, name: str):
        assert self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return self.answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("old", nargs="?", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--logs", type=pathlib.Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return
    if options.old is None:
        parser.error("name a folder with the other sources")
    wanted = [name for name in names() if options.only in name]
    start = time.time()
    pair = {}
    for label, root in (("old", options.old.resolve()), ("new", ROOT)):
        log = options.logs / f"{label}.txt" if options.logs else None
        pair[label] = Process(root, wanted, log)
    for process in pair.values():
        process.answer()
    print(f"compiled in {time.time() - start:.0f}s", flush=True)
    found: dict[tuple[str, str], list[float]] = {(n, w): [] for n in wanted for w in pair}
    for turn in range(options.rounds):
        for name in wanted:
            for label in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                ms = pair[label].ask(name)
                if ms is not None:
                    found[name, label].append(ms)
        print(f"round {turn + 1} after {time.time() - start:.0f}s", flush=True)
    for process in pair.values():
        assert process.process.stdin is not None
        process.process.stdin.close()
        process.process.wait()
    print(f"\n{'case':45s} {'old ms':>8s} {'new ms':>8s} {'old/new':>8s}  by rounds")
    for name in wanted:
        old, new = found[name, "old"], found[name, "new"]
        if not old or not new:
            print(f"{name:45s} {'-' if not old else 'ran':>8s} {'-' if not new else 'ran':>8s}")
            continue
        a, b = statistics.median(old), statistics.median(new)
        each = " ".join(f"{x / y:.3f}" for x, y in zip(old, new, strict=False))
        print(f"{name:45s} {a:8.3f} {b:8.3f} {a / b:8.3f}  {each}")


if __name__ == "__main__":
    main()
