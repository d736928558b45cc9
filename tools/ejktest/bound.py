"""Calls from shapes alone: what a kernel's hooks are asked about, for a device that is not here."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.core.invocation import BoundCall
from ejkernel.types import MaskInfo
from ejktest.device import on as on


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x


def bound(call: Any, **arguments: Any) -> BoundCall:
    """Returns the bound call that a registry hands to ``supports`` and the other hooks.

    Args:
        call: a ``Call`` of ejk-types.
        **arguments: its arguments; arrays may be abstract.
    """
    a = call.prepare((), arguments)
    arrays = {name: x for name, x in a.items() if _is_array(x) or isinstance(x, MaskInfo)}
    structs: dict[str, Any] = {}

    def probe(arrays: dict[str, Any]) -> int:
        canonical = call.bind({**a, **arrays})
        structs.update({name: jax.tree.map(_abstract, x) for name, x in canonical.items()})
        return 0

    jax.eval_shape(probe, arrays)
    kernel: Any = SimpleNamespace(name=call.name, signature=inspect.signature(call.signature))
    return BoundCall(kernel, (), structs)


def struct(*shape, dtype=jnp.bfloat16):
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)
