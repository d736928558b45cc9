"""Executors for the operations, and questions about calls without running them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ejkernel.modules._op import Operation
from ejkernel.modules._table import operation_class
from ejkernel.ops import Kernel
from ejkernel.ops.core.route import EXECUTOR_KEYWORDS
from ejkernel.ops.execution.executor import create_default_executor, get_default_executor

if TYPE_CHECKING:
    from ejkernel.ops import Explanation, Platform, Support

__all__ = ["check_call", "create_default_executor", "explain", "get_default_executor", "supports"]


def _kernel(operation: Any) -> Kernel:
    """Returns the kernel of a name, a public function, a Kernel class or a Kernel."""
    if isinstance(operation, type) and issubclass(operation, Operation):
        return operation.shared()
    if isinstance(operation, str) or getattr(operation, "__module__", "").startswith(
        "ejkernel.modules.operations"
    ):
        if not isinstance(operation, Operation):
            name = operation if isinstance(operation, str) else operation.__name__
            return operation_class(name).shared()
    if not isinstance(operation, Kernel):
        raise TypeError(
            f"operation: given {operation!r}, expected a name, a function of ejkernel.modules, "
            "a Kernel class of it, or a Kernel"
        )
    return operation


def supports(
    op_name: str, *args: Any, platform: str | Platform | None = None, **kwargs: Any
) -> Support:
    """Returns whether an operation can do a call, without running it.

    Args:
        op_name: name of the public function, or its name in the registry.
        *args: arguments of the call: arrays, tracers or ``jax.ShapeDtypeStruct``. Without any,
            the question is whether the platform implements the operation at all.
        platform: None = any platform.
        **kwargs: more arguments of the call.

    Returns:
        A Support, truthy iff the call can be done; ``reason``, ``argument`` and ``nearest`` say
        why not and which platform can.

    Raises:
        KernelNotFound: there is no such operation.
        ValueError: there is no such platform.
    """
    return _kernel(op_name).supports(*args, platform=platform, **kwargs)


def explain(operation: Any, *args: Any, print: bool = True, **kwargs: Any) -> Explanation:
    """Say which implementation and config a call would get, and why not the others.

    Args:
        operation: name of an operation, its function, its Kernel class, or any Kernel.
        *args: arguments of the call, as for the operation itself.
        print: whether the explanation is printed too.
        **kwargs: more of them, ``platform``, ``cfg``, ``mesh`` and specs included.

    Returns:
        The Explanation. Nothing is run or tuned.
    """
    return get_default_executor().explain(_kernel(operation), *args, print=print, **kwargs)


def check_call(operation: Any, *args: Any, **kwargs: Any) -> None:
    """Check the values of a call on the host, as a scheduler or a test wants to.

    A call reads no array on a device, so lengths beyond a table are clipped there and wrong pages
    are another sequence's. This reads all integer arrays of a call: lengths, page tables, starts,
    cumulative lengths, group sizes. It also checks what a call relies on or clips: groups and
    bounds inside their arrays, one row for each decoding sequence, and no place of a cache that
    two rows are written to. Segment ids may be any int32. Nothing is run.

    Args:
        operation: name of an operation, its function, or its Kernel class.
        *args: arguments of the call; floats may be ``jax.ShapeDtypeStruct``.
        **kwargs: more of them. ``cfg``, ``platform``, ``mesh`` and specs change no value and are
            left out.

    Raises:
        InvalidArgument, ValueError: a value, shape or dtype that is wrong, by name.
        TypeError: ``operation`` is none, or arguments do not fit it.
        ValueError: an argument is traced, as inside ``jax.jit``, and has no values.
    """
    kernel = _kernel(operation)
    if not isinstance(kernel, Operation):
        raise TypeError(
            f"operation: given {operation!r}, expected an operation of ejkernel.modules"
        )
    for name in EXECUTOR_KEYWORDS:
        kwargs.pop(name, None)
    kernel.check_call(args, kwargs)
