"""Lowering of programs without running them, to check configs from files.

A config of a file may need more than the device has, or a feature that this version of a compiler
lacks. Lowering shows both, and nothing later in the life of a call can still be caught: inside
``jax.jit`` kernels are compiled when the user's own program is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.core.keys import is_array
from ejkernel.ops.execution.isolation import Surroundings, outside_trace
from ejkernel.ops.execution.program import resolve
from ejkernel.ops.utils.device import target_device


def lowering_error(function: Callable[..., Any], types: Sequence[Any]) -> Exception | None:
    """Returns the error of lowering ``function`` for the target device outside any trace, or None.

    Args:
        function: takes arrays; what it returns besides arrays is ignored.
        types: of the arrays, each with a shape and a dtype.

    Returns:
        None when it can be lowered, and when the target device is not here.
    """
    target = target_device()
    if not target.present:
        return None

    def arrays_of(*arrays: Any) -> list[Any]:
        return [x for x in jax.tree_util.tree_leaves(function(*arrays)) if is_array(x)]

    # one device: a kernel sees the arrays of one shard
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types]
    try:
        surroundings = Surroundings.capture(target.device)
        outside_trace(lambda: jax.jit(arrays_of).lower(*plain), surroundings)
    except Exception as error:  # of any kernel and compiler
        return error
    return None


def config_error(call: BoundCall, cfg: Any) -> Exception | None:
    """Returns the error of lowering the forward pass of a call with ``cfg``, or None."""
    tree = FlatTree.flatten((call.args, dict(call.kwargs or {})))
    layout = tree.without_arrays()

    def run_forward(*arrays: Any) -> Any:
        args, kwargs = layout.with_arrays(arrays)
        return call.kernel.runner(resolve(call.kernel, call, cfg), cfg)(*args, **kwargs)

    return lowering_error(run_forward, tree.arrays)
