"""Sentences about a sharded call: the axes that stay sharded, and the collectives it causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ejkernel.types.attention.context.masks import index_rules
from ejkernel.types.attention.context.ring import Plan, Ring
from ejkernel.types.attention.context.strategy import choose_strategy
from ejkernel.types.attention.device_merge import MergeBytes
from ejkernel.types.calls.axes import AXES, bare
from ejkernel.types.calls.layout import Layout, MeshAxes
from ejkernel.types.calls.sharding import ShardingRule, Words


def sharding_notes(
    rule: ShardingRule,
    axes: Mapping[str, Sequence[tuple[str, ...]]],
    arrays: Mapping[str, Any],
    output: Sequence[str] = (),
    a: Mapping[str, Any] | None = None,
    describe: Callable[[Layout], str] | None = None,
) -> tuple[str, ...]:
    """Returns the notes on a call under plain ``jit``; none where no array is sharded.

    ``axes``: words of the axes of the arrays of each argument; ``arrays``: the arguments that are
    arrays or masks, abstract or not; ``output``: words of the axes of the first output; ``a``: the
    canonical arguments; ``describe``: returns the note on a sequence whose devices pass states on.
    """
    placed = [
        _Placed(name, rule.words(forms, x.shape), forms, _mesh_axes(x), x)
        for name, several in axes.items()
        if name in arrays
        for forms, x in zip(several, jax.tree.leaves(arrays[name]), strict=True)
    ]
    if not any(any(p.mesh_axes) for p in placed):
        return ()
    mesh_sizes = next(dict(p.array.sharding.mesh.shape) for p in placed if _is_on_mesh(p.array))
    try:
        layout = rule.layout(mesh_sizes, [(p.words, p.mesh_axes) for p in placed])
    except ValueError as error:
        return (f"refused: {error}",)
    used = {axis for mesh_axes in layout.spread.values() for axis in mesh_axes}
    words = sorted(layout.spread, key=lambda word: list(AXES).index(bare(word)))
    spread = ", ".join(f"{word} over {' and '.join(layout.axes(word))}" for word in words)
    notes = [f"sharded: {spread or 'no axis'}"]
    if a is not None and layout.spread.keys() & set(rule.sequence):
        notes.append(_sequence_note(layout, rule, a) if describe is None else describe(layout))
    if layout.summed_axes:
        shape = [rule.sizes.get(word, 1) for word in output]
        full = jax.ShapeDtypeStruct(tuple(shape), placed[0].array.dtype)
        over, size = " and ".join(sorted(layout.summed_axes)), _size(full, layout, output)
        notes.append(f"all-reduce of the output, {size}, over {over}: devices have terms of it")
    moved: dict[str, float] = {}
    for p in placed:
        moves, sums = _move_notes(p, layout), _gradient_notes(p, layout, used)
        notes += moves + sums
        if moves:
            moved[p.name] = _bytes(p.array) / _count_parts(layout, p.words)
    idle = [axis for axis, size in mesh_sizes.items() if size > 1 and axis not in used]
    if idle:
        notes.append(f"not sharded over {' and '.join(idle)}: devices along it compute the same")
    if moved or idle:
        words_by_name = [(p.name, p.words) for p in placed]
        notes += _better_layout(rule, layout, idle, words_by_name, moved)
    return tuple(notes)


class _Placed(NamedTuple):
    """An array and how it lies on the mesh.

    Attributes:
        name: of its argument.
        words, forms: the words of its axes, as the rule and as the signature have them.
        mesh_axes: the mesh axes over which each axis is split.
        array: the array.
    """

    name: str
    words: Words
    forms: tuple[str, ...]
    mesh_axes: list[MeshAxes]
    array: Any


def _move_notes(p: _Placed, layout: Layout) -> list[str]:
    """Returns the notes on axes of an array that are split and have to be whole."""
    notes, present = [], _present_axes(layout, p.words)
    for form, word, mesh_axes in zip(p.forms, p.words, p.mesh_axes, strict=True):
        moved = set(mesh_axes).difference(layout.axes(word))
        if moved:
            collective = "all-to-all" if moved <= present else "all-gather"
            axis, size = form.lstrip("#"), _size(p.array, layout, p.words)
            notes.append(f"{collective} of {p.name}, {size} on each device: {axis} stays whole")
    return notes


def _gradient_notes(p: _Placed, layout: Layout, used: set[str]) -> list[str]:
    """Returns the note on the sum of an array's gradient over devices that all have the array."""
    missing, dtype = used - _present_axes(layout, p.words), p.array.dtype
    if not (missing and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1):
        return []
    size, over = _size(p.array, layout, p.words), " and ".join(sorted(missing))
    return [f"backward: all-reduce of the gradient of {p.name}, {size}, over {over}"]


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
    packed = (
        " (on GPUs ring_packed)" if choice.strategy == "ring" and plan.schedule.count > 2 else ""
    )
    return f"context_parallel {over}: auto is {choice.strategy}{packed}: {choice.reason}"


def size_note(arrays: Mapping[Words, Any], layout: Layout) -> str:
    """Returns the size on each device of arrays by the words of their axes."""
    return _in_words(
        sum(_bytes(x) / math.prod(map(layout.parts, words)) for words, x in arrays.items())
    )


def over_note(layout: Layout, words: Sequence[str]) -> str:
    """Returns over which mesh axes a sequence is spread, whose word is among ``words``."""
    return "over " + " and ".join(next(layout.axes(word) for word in words if layout.axes(word)))


def place_arrays(
    arrays: Mapping[str, Any],
    axes: Mapping[str, Sequence[str]],
    specs: Mapping[str, PartitionSpec | None],
    mesh: Any,
) -> tuple[dict[str, Any], MeshAxes]:
    """Returns the types of arrays that lie as specs say, and the mesh axes that have pages apart.

    The latter are left out of the types: what they cause is not what the compiler would do.
    """
    over_pages: MeshAxes = ()
    for name, words in axes.items():
        for word, entry in zip(words, specs.get(name) or (), strict=False):
            if word == "pages" and entry is not None:
                over_pages = entry if isinstance(entry, tuple) else (entry,)
    others = {axis: size for axis, size in mesh.shape.items() if axis not in over_pages}
    kinds = (AxisType.Auto,) * len(others)  # what the default is depends on JAX's version
    smaller_mesh = AbstractMesh(tuple(others.values()), tuple(others), axis_types=kinds)
    placed = {}
    for name, x in arrays.items():
        words = axes.get(name, ())
        entries = [
            None if word == "pages" else entry
            for word, entry in zip(words, specs.get(name) or (), strict=False)
        ]
        sharding = NamedSharding(smaller_mesh, PartitionSpec(*entries))
        placed[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return placed, over_pages


def pages_notes(
    rule: ShardingRule,
    output: str,
    axes: MeshAxes,
    mesh: Any,
    arrays: Mapping[str, tuple[Any, Words]],
    a: Mapping[str, Any],
) -> tuple[str, ...]:
    """Returns the notes on pages over mesh axes.

    ``output``: words of the first output's axes; ``arrays``: the types of arrays that lie as specs
    say, and the words of their axes, the query first; ``a``: the arguments, which have the size of
    an axis that no array has.
    """
    over = " and ".join(axes)
    merged = f"pages over {over}: each device attends to its own, merged by lse"
    entries = [(rule.words(words, x.shape), _mesh_axes(x)) for x, words in arrays.values()]
    try:
        layout = rule.layout(dict(mesh.shape), entries)
    except ValueError:  # another note says why
        return (merged,)
    (query, _), *_ = arrays.values()
    *rows, dim = output.split()
    count = math.prod(rule.sizes[word] // layout.parts(word) for word in rows)
    width = rule.sizes.get(dim) or a[dim]
    devices = math.prod(mesh.shape[axis] for axis in axes)
    sizes = MergeBytes.for_rows(count, width, query.dtype, np.float32, devices)
    if sizes.is_one_gather:
        sent = f"all-gather of the outputs with their lse, {_in_words(sizes.gathered)} of each"
        sent += f" device, over {over}"
    else:
        summed, largest = map(_in_words, (sizes.summed, sizes.largest))
        sent = f"all-reduce of the output with its weights, {summed}, and of the largest lse, "
        sent += f"{largest}, on each device, over {over}"
    return merged, sent


def _better_layout(
    rule: ShardingRule,
    layout: Layout,
    idle: Sequence[str],
    arrays: Sequence[tuple[str, Words]],
    moved: Mapping[str, float],
) -> list[str]:
    """Returns the note on arrays that should lie otherwise, and what that saves; may be empty.

    Mesh axes that are in use stay where they are; each ``idle`` one goes to the first axis of the
    call that its devices divide.
    """
    better = layout
    for axis in idle:
        better = _with_mesh_axis(rule, better, axis)
    changed = {word for word, axes in better.spread.items() if axes != layout.axes(word)}
    names_by_layout: dict[str, list[str]] = {}
    for name, words in arrays:
        if name in moved or changed.intersection(words):
            spread = [f"{w} over {' and '.join(better.axes(w))}" for w in words if better.axes(w)]
            key = " and ".join(spread) or "no axis sharded"
            names_by_layout.setdefault(key, []).append(name)
    if not names_by_layout:
        return []
    layouts = "; ".join(
        f"{', '.join(dict.fromkeys(names))} with {spread}"
        for spread, names in names_by_layout.items()
    )
    saved = sum(moved.values())
    gain = f"saves {_in_words(saved)} on each device" if saved else "shares out the work"
    return [f"better layout, {gain}: {layouts}"]


def _with_mesh_axis(rule: ShardingRule, layout: Layout, axis: str) -> Layout:
    """Returns the layout with one more mesh axis, the same one if no axis of the call takes it."""
    for word in AXES:
        size = rule.sizes.get(word)
        if size is None or not rule.words((word,), (size,))[0]:
            continue
        requested: dict[str, MeshAxes] = {word: (*layout.axes(word), axis)}
        requested |= {other: axes for other, axes in layout.spread.items() if other != word}
        entries = [((other,), [axes]) for other, axes in requested.items()]
        trial = rule.layout(layout.mesh_sizes, entries)
        if axis in trial.axes(word) and trial.spread.keys() >= layout.spread.keys():
            return trial
    return layout


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


def _present_axes(layout: Layout, words: Sequence[str]) -> set[str]:
    """Returns the mesh axes over which an array is spread."""
    return {axis for word in words for axis in layout.axes(word)}


def _count_parts(layout: Layout, words: Sequence[str]) -> int:
    return math.prod(layout.mesh_sizes[axis] for axis in _present_axes(layout, words))


def _size(x: Any, layout: Layout, words: Sequence[str]) -> str:
    """Returns the size of an array on each device, in words."""
    return _in_words(_bytes(x) / _count_parts(layout, words))


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize


def _in_words(size: float) -> str:
    """Returns a number of bytes in words."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
