"""Compile Triton candidates for a card that is not here, so that tuning there only runs them.

The code goes into the cache that every process reads (``$EJKERNEL_CACHE_DIR/triton``); its keys
hold the kernel's source, its types and options, the architecture and Triton's version, no path
and no machine, so the folder may be carried to the card.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.bench.case import forward_and_backward
from ejkernel.ops import Autotuner
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.parts import Parts
from ejkernel.ops.platforms import Platform
from tuned.calls import TableCall


def prepare(todo: Iterable[TableCall], tuner: Autotuner, end: float) -> tuple[int, list[str]]:
    """Lower the Triton candidates of the calls in turn; ``(how many calls, what failed)``."""
    done, failed = 0, []
    for call in todo:
        if time.monotonic() > end:
            break
        started, count = time.monotonic(), 0
        inv = call.inv.bound
        for cfg in tuner.candidates(inv):
            if call.inv.kernel.config_platform(cfg) is not Platform.TRITON:
                continue
            try:
                lower(inv, cfg)
                count += 1
            except Exception as error:  # the tuner will see it again, and say so
                failed.append(f"{call.name} {cfg!r}: {type(error).__name__}: {error}")
        done += 1
        print(f"{call.name:<46} {count} candidates {time.monotonic() - started:6.1f} s", flush=True)
    return done, failed


def lower(inv: Invocation, cfg: Any) -> None:
    """Lower the forward pass, and both passes of what is trained, for CUDA."""
    kernel = inv.kernel
    resolved = kernel.implementation(inv, kernel.config_platform(cfg))
    runner = kernel.runner(resolved, cfg)
    parts = Parts.of((inv.abstract_args, inv.abstract_kwargs))
    arrays = parts.arrays
    floats = [i for i, x in enumerate(arrays) if _differentiable(x.dtype)]

    def run(*given: Any) -> Any:
        args, kwargs = parts.around(given)
        return runner(*args, **kwargs)

    def smooth(*given: Any) -> Any:
        return [x for x in jax.tree.leaves(run(*given)) if _differentiable(x.dtype)]

    passes = [run]
    if kernel.trained and resolved.differentiable and floats:
        passes.append(forward_and_backward(smooth, tuple(floats)))
    for one in passes:
        jax.jit(one).trace(*arrays).lower(lowering_platforms=("cuda",))


def _differentiable(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and np.dtype(dtype).itemsize > 1
