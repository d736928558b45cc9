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
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ejkernel.ops.errors import KernelNotSupported

_running: ContextVar[str] = ContextVar("ejkernel_operation", default="this operation")


@contextlib.contextmanager
def running(operation: str) -> Generator[None]:
    """Attributes operations traced inside the block to ``operation``."""
    token = _running.set(operation)
    try:
        yield
    finally:
        _running.reset(token)


def operation(otherwise: str | None = None) -> str:
    """The operation that is being traced, for what is static in it; without one, ``otherwise``."""
    return _running.get() if otherwise is None else _running.get(otherwise)


def _once_only(name: str, again: str) -> str:
    return (
        f"{name} is differentiable once: its gradient has no derivative {again}; for second order "
        "use attention or scaled_dot_product_attention (mean_pooling and grouped_matmul too) "
        "with platform='xla'"
    )


def _jvp(primals: Any, tangents: Any, *, reason: str, forward: bool) -> Any:
    (x,), (tangent,) = primals, tangents
    bind = partial(_once.bind, reason=reason, forward=forward)
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
    return _once.bind(*args, **params), axes[0]


_once = Primitive("differentiable_once")
_once.def_impl(lambda x, **_: x)
_once.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_once] = _jvp
ad.primitive_transposes[_once] = _transpose
batching.primitive_batchers[_once] = _batch
mlir.register_lowering(_once, lambda _, x, **__: [x])


def _floats(tree: Any, reason: str, forward: bool) -> Any:
    def guard(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return _once.bind(jnp.asarray(x), reason=reason, forward=forward)

    return jax.tree.map(guard, tree)


def differentiable_once(tree: Any, name: str) -> Any:
    """``tree`` as it is, what a kernel without any derivative of its own is about to read."""
    return _floats(tree, _once_only(name, "on this platform"), forward=False)


def not_differentiable(tree: Any, reason: str) -> Any:
    """``tree`` as it is; KernelNotSupported with ``reason`` where a derivative is asked of it."""
    return _floats(tree, reason, forward=False)


def reverse_once(tree: Any, name: str) -> Any:
    """``tree`` as it is, what came out of a loop that JAX differentiates in forward mode only."""
    return _floats(tree, _once_only(name, "in reverse mode"), forward=True)
