"""Errors that name the operation where it, or its gradient, cannot be differentiated.

``differentiable_once``, ``reverse_once`` and ``not_differentiable`` are identities. What they go
through is a primitive of our own, because an error at this point is a rule for transposition under
``vmap``, for which JAX's public functions have no form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ejkernel.ops.errors import KernelNotSupported

_current: ContextVar[str] = ContextVar("ejkernel_operation", default="this operation")


@contextlib.contextmanager
def attribute_to(operation: str) -> Generator[None]:
    """Attributes operations traced inside the block to ``operation``."""
    token = _current.set(operation)
    try:
        yield
    finally:
        _current.reset(token)


def current_operation(otherwise: str | None = None) -> str:
    """Returns the name of the operation that is being traced; without one, ``otherwise``."""
    return _current.get() if otherwise is None else _current.get(otherwise)


def _second_order_reason(name: str, again: str) -> str:
    return (
        f"{name} is differentiable once: its gradient has no derivative {again}; for second order "
        "use attention or scaled_dot_product_attention (mean_pooling and grouped_matmul too) "
        "with platform='xla'"
    )


def _jvp(primals: Any, tangents: Any, *, reason: str, forward: bool) -> Any:
    (x,), (tangent,) = primals, tangents
    bind = partial(_guard.bind, reason=reason, forward=forward)
    if isinstance(tangent, ad.Zero):
        return bind(x), tangent
    if not forward:
        raise KernelNotSupported(reason)
    return bind(x), bind(tangent)


def _transpose(cotangent: Any, x: Any, *, reason: str, forward: bool) -> Any:
    if not isinstance(cotangent, ad.Zero):
        raise KernelNotSupported(reason)
    return (cotangent,)


def _batch(args: Any, axes: Any, **params: Any) -> Any:
    return _guard.bind(*args, **params), axes[0]


_guard = Primitive("differentiable_once")
_guard.def_impl(lambda x, **_: x)
_guard.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_guard] = _jvp
ad.primitive_transposes[_guard] = _transpose
batching.primitive_batchers[_guard] = _batch
mlir.register_lowering(_guard, lambda _, x, **__: [x])


def _guard_floats(tree: Any, reason: str, forward: bool) -> Any:
    """Returns ``tree``, whose floats raise ``reason`` where they are differentiated."""

    def guard(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return _guard.bind(jnp.asarray(x), reason=reason, forward=forward)

    return jax.tree.map(guard, tree)


def differentiable_once(tree: Any, name: str) -> Any:
    """Returns the arrays that a kernel without any derivative of its own is about to read."""
    return _guard_floats(tree, _second_order_reason(name, "on this platform"), forward=False)


def not_differentiable(tree: Any, reason: str) -> Any:
    """Returns ``tree``; a derivative of it raises KernelNotSupported with ``reason``.

    Arrays of NumPy stay: they are constants of the program, which kernels may read.
    """

    def guard(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else _guard_floats(x, reason, forward=False)

    return jax.tree.map(guard, tree)


def reverse_once(tree: Any, name: str) -> Any:
    """Returns what came out of a loop that JAX differentiates in forward mode only."""
    return _guard_floats(tree, _second_order_reason(name, "in reverse mode"), forward=True)
