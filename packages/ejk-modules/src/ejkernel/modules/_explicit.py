"""Arguments whose types carry a sharding: the mesh they lie on, and what is spread over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax

from ejkernel.modules._specs import Argument, Layout, mesh_axes, spread
from ejkernel.modules.compat import explicit_axes, typed_sharding
from ejkernel.ops.core.keys import ARRAYS


def explicit_mesh(values: Any) -> Any:
    """The mesh over which an array in ``values`` carries its sharding, None without one."""
    for x in jax.tree_util.tree_leaves(values):
        sharding = typed_sharding(x) if isinstance(x, ARRAYS) else None
        if sharding is not None and explicit_axes(sharding.mesh):
            return sharding.mesh
    return None


def read_types(layout: Layout, arrays: Iterable[tuple[Argument, Any]]) -> Layout:
    """Fill ``layout.spread`` from the types of the arrays.

    Returns:
        What every word is spread over in the first array that has it: the outputs' layout.

    Raises:
        ValueError: as ``read_specs``, naming the array.
    """
    own = replace(layout, spread=dict(layout.spread))
    seen = set(own.spread)
    for argument, x in arrays:
        for word, axes in zip(argument.words, _axes(layout, x), strict=False):
            word = word.lstrip("#")
            if word not in layout.legal:  # an axis of one device splits nothing
                axes = tuple(axis for axis in axes if layout.mesh_sizes[axis] > 1)
            spread(layout, argument.name, word, axes)
            if word not in seen and axes:
                own.spread[word] = axes
            seen.add(word)
    return own


def own_spec(layout: Layout, argument: Argument, x: Any) -> Any:
    """The spec in the type of ``x``, without what may not be spread."""
    alone = replace(layout, spread={})
    read_types(alone, [(argument, x)])
    return alone.spec(argument.words, argument.shape)


def _axes(layout: Layout, x: Any) -> Sequence[tuple[str, ...]]:
    sharding = typed_sharding(x)
    entries = () if sharding is None else sharding.spec
    return [tuple(a for a in mesh_axes(e) if a in layout.mesh_sizes) for e in entries]
