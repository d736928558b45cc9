"""Wiring of ``Kernel.custom_vjp`` into JAX: flat arrays in, checked and cast gradients out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel.ops.core.flat_tree import FlatTree
from ejkernel.ops.core.invocation import AnyKernel
from ejkernel.ops.core.keys import is_array


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Static:
    """A Python value that travels with the residuals."""

    value: Any

    def tree_flatten(self):
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value, _):
        return cls(value)


def _zero(cotangent: Any) -> Any:
    """A symbolic zero as an array; other cotangents as they are."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(cotangent.shape, jax.dtypes.float0)
    return jnp.zeros(cotangent.shape, cotangent.dtype)


def _split(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str):
    """Splits the result of ``custom_vjp`` into positional gradients and keyword gradients."""
    if not isinstance(result, (tuple, list)):
        raise TypeError(
            f"{name}.custom_vjp must return a tuple with one entry per positional argument, "
            f"got {type(result).__name__}"
        )
    named: Mapping[str, Any] = {}
    if (
        len(result) == 2
        and isinstance(result[0], (tuple, list))
        and isinstance(result[1], Mapping)
        and not (len(args) == 2 and isinstance(args[1], Mapping))
    ):
        result, named = result
    if len(result) != len(args):
        index = min(len(result), len(args))
        raise TypeError(
            f"{name}.custom_vjp returned {len(result)} gradients for {len(args)} positional "
            f"arguments: index {index} is {'missing' if len(result) < len(args) else 'too many'}"
        )
    for key in named:
        if key not in kwargs:
            raise TypeError(
                f"{name}.custom_vjp returned a gradient for {key!r}, which is no keyword argument "
                f"of this call (given: {sorted(kwargs) or 'none'})"
            )
    return tuple(result), named


def _gradient(grad: Any, primal: Any, where: str) -> Any:
    """A gradient fit for ``primal``: None for zero, else its shape and dtype."""
    if grad is None or not jnp.issubdtype(primal.dtype, jnp.inexact):
        return None
    if isinstance(grad, SymbolicZero) or getattr(grad, "dtype", None) == jax.dtypes.float0:
        return None
    shape = getattr(grad, "shape", () if isinstance(grad, (int, float)) else None)
    if shape is None:
        raise TypeError(f"{where}: gradient is a {type(grad).__name__}, expected an array or None")
    if shape != primal.shape:
        raise TypeError(f"{where}: gradient has shape {shape}, expected {primal.shape}")
    return jnp.asarray(grad).astype(primal.dtype)


def _tree_gradients(grad: Any, primal: Any, where: str) -> list[Any]:
    """One gradient per array of ``primal``; ``grad`` has its structure, None where zero."""
    leaves, treedef = jax.tree_util.tree_flatten(primal)
    if grad is None:
        grads = [None] * len(leaves)
    else:
        try:
            grads = treedef.flatten_up_to(grad)
        except (ValueError, TypeError, KeyError) as error:
            raise TypeError(f"{where}: gradient has another structure: {error}") from None
    return [_gradient(g, p, where) for g, p in zip(grads, leaves, strict=True) if is_array(p)]


def call_with_custom_vjp(
    kernel: AnyKernel,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cfg: Any,
) -> Any:
    """``run(*args, cfg=cfg, **kwargs)``, differentiated by ``kernel.custom_vjp``."""
    tree = FlatTree.flatten((args, dict(kwargs)))
    layout = tree.without_arrays()
    name = kernel.name

    def forward(*arrays: Any) -> Any:
        a, k = layout.with_arrays(arrays)
        return run(*a, cfg=cfg, **k)

    def fwd(*primals: Any) -> Any:
        arrays = tuple(p.value for p in primals)
        perturbed = _Static(tuple(bool(p.perturbed) for p in primals))
        return forward(*arrays), (arrays, perturbed)

    def bwd(residuals: Any, cotangents: Any) -> Any:
        arrays, perturbed = residuals
        a, k = layout.with_arrays(arrays)
        cts = tuple(
            _zero(ct)
            for ct in jax.tree_util.tree_leaves(
                cotangents, is_leaf=lambda x: isinstance(x, SymbolicZero)
            )
        )
        positional, named = _split(kernel.custom_vjp(a, cfg, k, cts), a, k, name)
        grads = []
        for index, (grad, primal) in enumerate(zip(positional, a, strict=True)):
            grads += _tree_gradients(grad, primal, f"{name}.custom_vjp, index {index}")
        flags = perturbed.value[len(grads) :]
        for key in sorted(k):  # the order in which a dict is flattened
            label = f"{name}.custom_vjp, argument {key!r}"
            gradients = _tree_gradients(named.get(key), k[key], label)
            needed, flags = flags[: len(gradients)], flags[len(gradients) :]
            if any(needed) and key not in named:
                raise TypeError(
                    f"{name}.custom_vjp returned no gradient for the keyword argument {key!r}, "
                    "which is being differentiated: return (gradients, "
                    f"{{{key!r}: gradient}}), or pass it positionally"
                )
            grads += gradients
        return tuple(grads)

    wired = jax.custom_vjp(forward)
    wired.defvjp(fwd, bwd, symbolic_zeros=True)
    return wired(*tree.arrays)
