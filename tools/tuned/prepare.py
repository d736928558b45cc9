"""Compile Triton candidates for a GPU that is not here, so that tuning there only runs them.

The code goes into the cache that every process reads (``$EJKERNEL_CACHE_DIR/triton``); its keys
hold the kernel's source, its types and options, the architecture and Triton's version, no path
and no machine, so the folder may be copied to the GPU's machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules.bench.case import forward_and_backward
from ejkernel.modules.cli.tuning import Task
from ejkernel.ops import Autotuner
from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.platforms import Platform


def compile_candidates(tasks: Iterable[Task], end: float) -> tuple[int, list[str]]:
    """Compiles until ``end``; returns the number of calls that are done, and what failed."""
    done, failed = 0, []
    for task in tasks:
        if time.monotonic() > end:
            break
        started, count = time.monotonic(), 0
        call = task.inv.bound
        for cfg in Autotuner().candidates(call):
            if call.kernel.config_platform(cfg) is not Platform.TRITON:
                continue
            try:
                lower(call, cfg)
                count += 1
            except Exception as error:  # the tuner will see it again, and say so
                failed.append(f"{task.name} {cfg!r}: {type(error).__name__}: {error}")
        done += 1
        print(f"{task.name:<46} {count} candidates {time.monotonic() - started:6.1f} s", flush=True)
    return done, failed


def lower(inv: Invocation, cfg: Any) -> None:
    """Lowers the forward pass, and both passes if the call is trained, for CUDA."""
    kernel = inv.kernel
    resolved = kernel.implementation(inv, kernel.config_platform(cfg))
    runner = kernel.runner(resolved, cfg)
    tree = FlatTree.flatten((inv.abstract_args, inv.abstract_kwargs))
    floats = [i for i, x in enumerate(tree.arrays) if _is_differentiable(x.dtype)]

    def forward(*arrays: Any) -> Any:
        args, kwargs = tree.with_arrays(arrays)
        return runner(*args, **kwargs)

    def smooth(*arrays: Any) -> Any:
        return [x for x in jax.tree.leaves(forward(*arrays)) if _is_differentiable(x.dtype)]

    passes = [forward]
    if kernel.trained and resolved.differentiable and floats:
        passes.append(forward_and_backward(smooth, tuple(floats)))
    for function in passes:
        jax.jit(function).trace(*tree.arrays).lower(lowering_platforms=("cuda",))


def _is_differentiable(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and np.dtype(dtype).itemsize > 1
