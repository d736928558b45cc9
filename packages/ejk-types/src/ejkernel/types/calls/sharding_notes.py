"""Sentences about a sharded call: the axes that stay sharded, and the collectives it causes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from ejkernel.types.attention.context.masks import index_rules
from ejkernel.types.attention.context.ring import Plan, Ring
from ejkernel.types.attention.context.strategy import choose_strategy
from ejkernel.types.calls.axes import AXES, bare
from ejkernel.types.calls.layout import Layout, MeshAxes
from ejkernel.types.calls.sharding import ShardingRule


def sharding_notes(
    rule: ShardingRule,
    axes: Mapping[str, Sequence[tuple[str, ...]]],
    arrays: Mapping[str, Any],
    a: Mapping[str, Any],
) -> tuple[str, ...]:
    """Returns the notes on a call under plain ``jit``; none where no array is sharded.

    ``axes``: words of the axes of the arrays of each argument; ``arrays``: the arguments that are
    arrays or masks, abstract or not; ``a``: the canonical arguments.
    """
    named = [
        (name, rule.words(words, x.shape), words, x)
        for name, forms in axes.items()
        if name in arrays
        for words, x in zip(forms, jax.tree.leaves(arrays[name]), strict=True)
    ]
    split = [_mesh_axes(x) for *_, x in named]
    mesh_sizes = next((dict(x.sharding.mesh.shape) for *_, x in named if _is_on_mesh(x)), {})
    if not any(map(any, split)):
        return ()
    entries = [(words, mesh_axes) for (_, words, *_), mesh_axes in zip(named, split, strict=True)]
    layout = rule.layout(mesh_sizes, entries)
    used = {axis for mesh_axes in layout.spread.values() for axis in mesh_axes}
    words = sorted(layout.spread, key=lambda word: list(AXES).index(bare(word)))
    spread = ", ".join(f"{word} over {' and '.join(layout.axes(word))}" for word in words)
    notes = [f"sharded: {spread or 'no axis'}"]
    if layout.spread.keys() & set(rule.sequence):
        notes.append(_sequence_note(layout, rule, a))
    for (name, words, forms, x), mesh_axes in zip(named, split, strict=True):
        present = set().union(*map(layout.axes, words))
        for form, word, now in zip(forms, words, mesh_axes, strict=True):
            moved = set(now).difference(layout.axes(word))
            if moved:
                collective = "all-to-all" if moved <= present else "all-gather"
                size = _size(x, _parts(present, mesh_sizes))
                axis = form.lstrip("#")
                notes.append(f"{collective} of {name}, {size} on each device: {axis} stays whole")
        missing = used - present
        if missing and jnp.issubdtype(x.dtype, jnp.floating) and np.dtype(x.dtype).itemsize > 1:
            size = _size(x, _parts(present, mesh_sizes))
            over = " and ".join(sorted(missing))
            notes.append(f"backward: all-reduce of the gradient of {name}, {size}, over {over}")
    return tuple(notes)


def _sequence_note(layout: Layout, rule: ShardingRule, a: Mapping[str, Any]) -> str:
    """Returns how devices share the sequence of a call."""
    n, axes = layout.parts(rule.sequence[0]), layout.axes(rule.sequence[0])
    over = f"over {' and '.join(axes)}"
    if "key" not in a:  # keys of latent rows are expanded on each device
        return f"context_parallel {over}: auto is chosen from the expanded keys"
    local = {}
    for name in ("query", "key", "value"):
        b, length, heads, dim = a[name].shape
        word = "heads" if name == "query" else "kv_heads"
        shape = (b // layout.parts("batch"), length // n, heads // layout.parts(word), dim)
        local[name] = jax.ShapeDtypeStruct(shape, a[name].dtype)
    ring, rules = Ring(axes[0], n, False), index_rules(a["mask_info"].terms)
    plan = Plan.make(ring, rules, local["query"].shape[1], local["key"].shape[1])
    choice = choose_strategy({**local, "bias": a.get("bias")}, ring, plan, rules)
    return f"context_parallel {over}: auto is {choice.strategy}: {choice.reason}"


def _is_on_mesh(x: Any) -> bool:
    """Returns whether an array is sharded over a mesh whose axes are the compiler's."""
    sharding = getattr(x, "sharding", None)
    automatic = isinstance(sharding, NamedSharding) and not sharding.mesh.empty
    return automatic and set(sharding.mesh.axis_types) == {AxisType.Auto}


def _mesh_axes(x: Any) -> list[MeshAxes]:
    """Returns the mesh axes of more than one device over which each axis of an array is split."""
    if not _is_on_mesh(x):
        return [()] * len(x.shape)
    sizes = x.sharding.mesh.shape
    entries = [e if isinstance(e, tuple) else () if e is None else (e,) for e in x.sharding.spec]
    entries += [()] * (len(x.shape) - len(entries))
    return [tuple(axis for axis in entry if sizes[axis] > 1) for entry in entries]


def _parts(axes: set[str], mesh_sizes: Mapping[str, int]) -> int:
    return math.prod(mesh_sizes[axis] for axis in axes)


def _size(x: Any, parts: int) -> str:
    """Returns the size of a part of an array in words."""
    size = math.prod(x.shape) * np.dtype(x.dtype).itemsize / parts
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
