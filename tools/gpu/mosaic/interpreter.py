"""JAX's interpreter of Mosaic GPU kernels, on the CPU, with what it lacks of ours.

A warpgroup is a thread with a vector clock; an access that is not ordered behind another of the
same memory is a race. Beyond what JAX 0.11 does, here

- all programs of a launch run at once, so that what they share in device memory is watched too;
- wgmma reads its operands until it is waited for, past the proxy of the copy engine;
- semaphores, counters, reductions by the copy engine and copies to all programs of a cluster exist;
- instructions of the compiler's own (``inline_mgpu``) have stand-ins in the language of arrays;
- an order can be taken away: ``watched(site)`` names a wait after which a thread knows no more
  than before, or a commit that does nothing.

What it cannot see: threads of one warpgroup against each other, which are one thread here, and
whether the compiler keeps the order. That is compute-sanitizer's part (``check_memory``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from gpu.mosaic.inside import callbacks, gpu, jaxprs, memory, sources, threads, utils
from gpu.mosaic.primitives import HANDLERS, ORDERS
from gpu.mosaic.watch import Kernel, Races, Watch, begin, copied_in

ENGINES = 64  # clocks of copies and of wgmma: two with the same one are not told apart
theirs = jaxprs.JaxprInterpreter.interpret


def interpret(self: Any, jaxpr: Any, token: Any, *args: Any) -> Any:
    """Interprets as JAX does, except for the primitives of ``HANDLERS``."""
    env = utils.JaxprEnv(vars=[*jaxpr.constvars, *jaxpr.invars], values=args)
    for eqn in jaxpr.eqns:
        values, out = env.read_many(eqn.invars), None
        if eqn.primitive in HANDLERS:
            k = Kernel(self, eqn, token, eqn.primitive in ORDERS)
            out = HANDLERS[eqn.primitive](k, values)
            token = k.token
        if out is None:
            operands = zip(eqn.invars, values, strict=True)
            inputs = {v: x for v, x in operands if not hasattr(v, "val")}
            single = jaxpr.replace(
                constvars=[], invars=list(inputs), outvars=eqn.outvars, eqns=[eqn],
                debug_info=jaxpr.debug_info.with_unknown_names(),
            )  # fmt: skip
            token, out = theirs(self, single, token, *inputs.values())
        env.write_many(eqn.outvars, out)
    return token, env.read_many(jaxpr.outvars)


MOST = 28  # programs that a device of JAX's CPU begins before one of them has ended; it allows 32
programs: dict[tuple, tuple] = {}  # of threads: compiled once for all that run them
running: dict[int, int] = {}
starting = threading.Lock()


def run_program(jaxpr: Any, consts: Any, *args: Any) -> None:
    """Runs a thread's program on a device that can begin another."""
    with starting:
        free = (i for i, _ in enumerate(jax.devices("cpu")) if running.get(i, 0) < MOST)
        if (number := next(free, None)) is None:
            raise RuntimeError("more threads than JAX's CPU runs: see XLA_FLAGS in gpu/races.py")
        if (id(jaxpr), number) not in programs:
            with jax.default_device(jax.devices("cpu")[number]):
                traced = jax.jit(threads._run, static_argnums=0).trace(jaxpr, consts, *args)
                programs[id(jaxpr), number] = jaxpr, traced.lower().compile()
        running[number] = running.get(number, 0) + 1
    try:
        programs[id(jaxpr), number][1](consts, *(np.asarray(x) for x in args))
    finally:
        with starting:
            running[number] -= 1


def together(kernel: Any) -> Any:
    """Returns ``plgpu.kernel`` whose programs are one cluster: they run at the same time."""

    def make_kernel(body: Any, **options: Any) -> Any:
        names, sizes = options.pop("grid_names", ()), options.pop("grid", ())
        cluster = (*sizes, *options.pop("cluster", ()))
        names = (*names, *options.pop("cluster_names", ()))
        return kernel(body, cluster=cluster, cluster_names=names, **options)

    return make_kernel


def leave(self: Any) -> None:
    """Ends a warpgroup's use of a barrier; arrivals that nobody waits for may remain."""
    with self.cv:
        self.ref_count -= 1


@contextlib.contextmanager
def watched(planted: str | None = None, limit: float = 300.0) -> Generator[Watch]:
    """Runs the kernels that are called inside in the interpreter and yields what was seen.

    ``planted``: a site whose order is taken away; ``limit``: seconds after which they are stopped.
    """
    watch = begin(planted)
    patches = {
        (jaxprs.JaxprInterpreter, "interpret"): interpret,
        (threads, "_run_jaxpr"): run_program,
        (gpu, "kernel"): together(gpu.kernel),
        (memory.Barrier, "deallocate"): leave,
        (callbacks, "GPURaceDetectionState"): Races,
        (callbacks.AsyncCopyGmemToSmemTask, "post_read"): copied_in,
        # equations keep their own places
        (sources, "user_context"): lambda *_, **__: contextlib.nullcontext(),
    }
    originals = {at: getattr(*at) for at in patches}
    params = gpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=ENGINES)
    timer = threading.Timer(
        limit, lambda: callbacks.fail(TimeoutError(f"not done after {limit} s"), np.int32(0))
    )
    for at, x in patches.items():
        setattr(*at, x)
    timer.start()
    try:
        with gpu.force_gpu_interpret_mode(params):
            yield watch
    finally:
        timer.cancel()
        for at, x in originals.items():
            setattr(*at, x)
