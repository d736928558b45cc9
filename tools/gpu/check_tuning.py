"""Tuning on this GPU: how long one flash shape takes, what CUPTI sees, what a known card does.

python tools/gpu/check_tuning.py     # under two minutes; exit status 1: a target is missed

Prints a line per question. "cold" starts from an empty cache of compiled kernels, "warm" follows
in the same process, as on a machine that has tuned before.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
FOLDER = tempfile.mkdtemp(prefix="ejkernel-tuning-")
os.environ["EJKERNEL_CACHE_DIR"] = FOLDER

import jax  # noqa: E402

import checkout  # noqa: E402
import tune_tables  # noqa: E402
from ejkernel.modules.workloads import call_of  # noqa: E402
from ejkernel.modules.workloads.shapes import SHAPES  # noqa: E402
from ejkernel.ops import (  # noqa: E402
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    kernel_registry,
    target_device,
)
from ejkernel.ops.config.store import read_table  # noqa: E402
from ejkernel.ops.execution import timing  # noqa: E402
from ejkernel.ops.execution.candidates import Workbench  # noqa: E402
from tuned import report  # noqa: E402

SECONDS = 20.0  # the target for one flash shape on a warm machine
failed: list[str] = []


def check(name: str, good: bool, told: str) -> None:
    if not good:
        failed.append(name)
    print(f"{'ok  ' if good else 'FAIL'} {name}: {told}", flush=True)


def the_call(operation: str, name: str):
    return call_of(next(s for s in SHAPES if s.name == name and s.serves(operation)), operation)


def tuning_time() -> None:
    table, winners = Path(FOLDER) / "table.json", set()
    words = ["--ops", "flash_attention", "--cases", "llama3-8b-4k", "--out", str(table)]
    for state in ("cold", "warm", "warm"):
        tune_tables.main([*words, "--again", "--trials"])
        (line,) = report.of_table(*read_table(table)).lines
        (entry,) = (e for e in read_table(table)[1].values() if e.metadata["platform"] == "auto")
        seconds = entry.measured["seconds"]
        check(f"tuning, {state}", state == "cold" or seconds < SECONDS, f"{seconds:.1f} s")
        winners.add(line.winner)
    print("     winners of the three runs: " + "; ".join(sorted(winners)))
    kernel_registry.add_config_table(table)
    known_card(the_call("flash_attention", "llama3-8b-4k"))


def known_card(call) -> None:
    events = []
    chain = ConfigSelectorChain(ConfigCache(), on_event=lambda name, _: events.append(name))
    run = Executor(chain)
    arguments = call.concrete()
    start = time.perf_counter()
    jax.block_until_ready(run(call.kernel, **arguments))
    check("first call on a known card", events == ["persistent"],
          f"{events}, {time.perf_counter() - start:.2f} s with compilation")  # fmt: skip
    half = {k: v[:, : v.shape[1] // 2] if hasattr(v, "shape") else v for k, v in arguments.items()}
    run.choose_config(call.kernel, **half)
    check("half the length", events[-1] == "persistent", events[-1])


def clocks() -> None:
    """A decoding step: what the host sees, what is queued, what the kernels take."""
    call = the_call("page_attention", "decode-b1-8k")
    inv = call.invocation().bound
    kernel = inv.kernel
    cfg = kernel.heuristic_cfg(inv)
    bound = kernel.bind(*kernel.prepare((), call.concrete()))
    ready = Workbench(inv, [cfg], False, bound).compile(cfg).forward
    jax.block_until_ready(ready())
    host = timing.benchmark(ready, 50) * 1e3
    queue = timing.QueueClock().seconds(ready, 200) * 1e6
    clock = timing.KernelClock()
    kernels = [clock.seconds(ready, 20) * 1e6 for _ in range(5)]
    spread = (max(kernels) - min(kernels)) / min(kernels)
    told = f"host {host:.1f} us, queued {queue:.1f} us, kernels {min(kernels):.1f} us"
    check("CUPTI", clock.refusal is None, clock.refusal or f"{told}, spread {spread:.1%}")


def main() -> int:
    checkout.register()
    print(f"{target_device().fingerprint}, jax {jax.__version__}")
    clocks()
    tuning_time()
    print(f"{len(failed)} failed" + (": " + ", ".join(failed) if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
