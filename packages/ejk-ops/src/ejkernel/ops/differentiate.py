"""One ``custom_vjp`` for every kernel, and the mesh axes over which arrays vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.batch_invariance import batch_invariant
from ejkernel.ops.compat import Tracer
from ejkernel.ops.errors import warn_once
from ejkernel.ops.execution.lowering import lowering_error
from ejkernel.ops.execution.program_cache import bounded_jit
from ejkernel.ops.execution.progress import first_line
from ejkernel.ops.second_order import attribute_to, differentiable_once
from ejkernel.ops.varying import vary_alike

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """The static part of a call while it is traced; hashable.

    Attributes:
        kernel: the kernel that does it.
        problem: static properties of the call.
        options: its arguments that take no array, in a NamedTuple.
        tiles: how each pass is launched.
        target: the device it is made for.
        operation: the function that the user called, for errors.
        batch_invariant: whether no sum may depend on the batch, also where gradients are traced
            later.
        fallback: tiles for calls whose gradients cannot be lowered with ``tiles``, which then come
            from a file; None: that is an error.
    """

    kernel: Any
    problem: Any
    options: Any
    tiles: Any
    target: Any
    operation: str = ""
    fallback: Any = None
    batch_invariant: bool = False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(work: Work, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Returns the outputs of ``work.kernel.forward``, differentiated by ``work.kernel.backward``.

    ``arrays`` are ``same_axes(arrays)``. A kernel that keeps much for its gradients has a forward
    pass ``without_gradients`` too.
    """
    forward = getattr(work.kernel, "without_gradients", work.kernel.forward)
    return forward(work, arrays)[0]


def _once(work: Work, tree: Any) -> Any:
    """Returns the arrays; raises where a second derivative would need the kernel's derivative."""
    return tree if work.kernel.forward_again else differentiable_once(tree, work.operation)


def _forward(work: Work, arrays: Arrays) -> Any:
    arrays, work = _once(work, arrays), _with_lowerable_tiles(work, arrays)
    outputs, saved = work.kernel.call.name_residuals(*work.kernel.forward(work, arrays))
    return outputs, (arrays, outputs, saved)


def _backward(work: Work, residuals: Any, cotangents: tuple[jax.Array, ...]) -> tuple[Arrays]:
    cotangents, work = _once(work, cotangents), _with_lowerable_tiles(work, residuals[0])
    with attribute_to(work.operation), batch_invariant(work.batch_invariant):
        gradients: Mapping[str, Any] = work.kernel.backward(work, *residuals, cotangents)
    arrays = residuals[0]
    unknown = gradients.keys() - arrays.keys()
    if unknown:
        raise TypeError(f"{work.kernel!r} has gradients of {sorted(unknown)}, which it did not get")
    return ({name: _cast_gradient(gradients.get(name), x) for name, x in arrays.items()},)


def _with_lowerable_tiles(work: Work, arrays: Arrays) -> Work:
    """Returns ``work``; with its fallback tiles where gradients cannot be lowered with its own."""
    if work.fallback in (None, work.tiles):
        return work
    leaves, structure = jax.tree_util.tree_flatten(arrays)
    return _choose_by_lowering(
        work, structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    )


@lru_cache(maxsize=512)
def _choose_by_lowering(work: Work, structure: Any, types: tuple[Any, ...]) -> Work:
    def passes(work: Work, *leaves: Any) -> Any:
        arrays = jax.tree_util.tree_unflatten(structure, leaves)
        with attribute_to(work.operation):
            outputs, saved = work.kernel.forward(work, arrays)
            ones = tuple(map(jnp.ones_like, outputs))
            return work.kernel.backward(work, arrays, outputs, saved, ones)

    other = replace(work, tiles=work.fallback, fallback=None)
    error = lowering_error(partial(passes, work), types)
    if error is None or lowering_error(partial(passes, other), types) is not None:
        return work
    reason = first_line(f"{type(error).__name__}: {error}")
    warn_once(
        ("stored tiles", work),
        f"a stored config of {work.operation} is not used where it is differentiated: {reason}; "
        f"tiles {work.tiles}",
    )
    return other


def _cast_gradient(gradient: Any, primal: Any) -> Any:
    """Returns a gradient in the dtype of its primal; None is zero."""
    return None if gradient is None else gradient.astype(primal.dtype)


differentiable.defvjp(_forward, _backward)


@bounded_jit
def _compiled(arrays: Arrays, *, work: Work) -> tuple[Any, ...]:
    with attribute_to(work.operation):
        if work.kernel.has_backward:
            return differentiable(work, arrays)
        return work.kernel.forward(work, arrays)[0]


def compiled(work: Work, arrays: Arrays) -> tuple[Any, ...]:
    """Returns the outputs of one program.

    JAX keeps its derivative and traces it once, outside ``jit`` too.
    """
    return _compiled(arrays, work=work)


def same_axes(arrays: Arrays) -> Arrays:
    """Returns the arrays as ``differentiable`` takes them.

    Inside ``shard_map`` all of them vary over the same mesh axes, so that JAX sums the gradients of
    replicated arrays.
    """
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), arrays)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))
    return vary_alike(arrays) if traced else arrays
