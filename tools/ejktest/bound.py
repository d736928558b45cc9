"""Calls from shapes alone: what a kernel's hooks are asked about, for a device that is not here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import MaskInfo
from ejktest.device import on as on


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x


def bound(call: Any, **arguments: Any) -> SimpleNamespace:
    """Returns what ``supports`` and the other hooks receive, for a ``Call`` of ejk-types.

    Arrays may be abstract.
    """
    a = call.prepare((), arguments)
    arrays = {name: x for name, x in a.items() if _is_array(x) or isinstance(x, MaskInfo)}
    found: dict[str, Any] = {}

    def probe(arrays: dict[str, Any]) -> int:
        canonical = call.bind({**a, **arrays})
        found.update({name: jax.tree.map(_abstract, x) for name, x in canonical.items()})
        return 0

    jax.eval_shape(probe, arrays)
    return SimpleNamespace(arguments=found, facts={})


def struct(*shape, dtype=jnp.bfloat16):
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)
