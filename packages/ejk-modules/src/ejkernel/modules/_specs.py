"""From PartitionSpecs and axis words to a distribution: pure functions, no arrays.

Every array argument has one word per axis (``batch``, ``heads`` ...). The given specs say which
mesh axes a word is spread over; all arguments and outputs follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ejkernel.ops import InvalidArgument
from ejkernel.ops.compat import explicit_axes, typed_sharding
from ejkernel.ops.core.keys import ARRAYS
from ejkernel.types.calls.axes import AXES, Kind, meaning
from ejkernel.types.calls.layout import Layout, MeshAxes


@dataclass(frozen=True)
class Argument:
    """One array argument: its name, the words of its axes, its shape; None when absent."""

    name: str
    words: tuple[str, ...]
    shape: tuple[int, ...] | None


def mesh_axes(entry: Any) -> MeshAxes:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def read_specs(
    layout: Layout, arguments: Sequence[Argument], specs: Sequence[PartitionSpec | None]
) -> None:
    """Fill ``layout.spread`` from the given specs, which follow the arguments in order.

    Raises:
        ValueError: too many specs or none, an unknown mesh axis, a word spread in two ways, two
            words over one mesh axis, or a word that may not be spread.
    """
    if not specs or len(specs) > len(arguments):
        names = ", ".join(a.name for a in arguments)
        raise ValueError(
            f"in_specs: given {len(specs)} specs, expected 1 to {len(arguments)} "
            f"for the array arguments of {layout.operation}: {names}"
        )
    for index, (argument, spec) in enumerate(zip(arguments, specs, strict=False)):
        if spec is None:
            continue
        if not isinstance(spec, PartitionSpec):
            raise ValueError(f"in_specs[{index}]: given {spec!r}, expected a PartitionSpec or None")
        if argument.shape is not None and len(spec) > len(argument.words):
            raise ValueError(
                f"in_specs[{index}]: {spec} has {len(spec)} entries, but {argument.name} has "
                f"{len(argument.words)} axes"
            )
        for word, entry in zip(argument.words, spec, strict=False):
            if argument.shape is None and word == "_":
                continue  # an absent argument of unknown axes has nothing to spread
            where = f"in_specs[{index}] ({argument.name})"
            spread(layout, where, word.lstrip("#"), mesh_axes(entry))


def spread(layout: Layout, where: str, word: str, axes: MeshAxes) -> None:
    """Spread a word over mesh axes as ``where`` says.

    Raises:
        ValueError: as ``read_specs``.
    """
    if not axes:
        return
    unknown = [a for a in axes if a not in layout.mesh_sizes]
    if unknown:
        names = ", ".join(layout.mesh_sizes)
        raise ValueError(f"{where}: mesh axis {unknown[0]!r} is unknown, the mesh has: {names}")
    in_order = meaning(word).in_order and word not in layout.legal
    if in_order and layout.spread.get(word) == axes:
        return
    if in_order:
        raise ValueError(
            f"{where}: axis {word} may not be sharded (given {axes}) by {layout.operation}: "
            f"devices need all of its places; {layout.sequence_hint}"
        )
    if word not in layout.legal:
        legal = ", ".join(sorted(layout.legal))
        raise ValueError(
            f"{where}: axis {word} may not be sharded (given {axes}) by {layout.operation}; "
            f"legal are: {legal}"
        )
    before = layout.spread.setdefault(word, axes)
    if before != axes:
        raise ValueError(
            f"{where}: axis {word} is sharded over {axes}, but over {before} in an earlier one"
        )
    for other, taken in layout.spread.items():
        together = all(map(_of_heads, (word, other))) or all(map(_of_tokens, (word, other)))
        if other != word and not together and set(taken) & set(axes):
            raise ValueError(f"{where}: {axes} already shards axis {other}, cannot shard {word}")


def _of_tokens(word: str) -> bool:
    return meaning(word).in_order


def _of_heads(word: str) -> bool:
    return meaning(word).kind in (Kind.HEADS, Kind.KEY_HEADS)


def spread_sequence(layout: Layout, words: Sequence[str]) -> MeshAxes:
    """Returns the mesh axes of the sequence, after spreading keys as queries are; () for none.

    A call without keys has one word of tokens.

    Raises:
        ValueError: keys are spread and queries are not, or otherwise, or mesh axes out of order.
    """
    spread = [word for word in words if layout.axes(word)]
    if not spread:
        return ()
    for word in spread:
        axes = layout.axes(word)
        ordered = tuple(axis for axis in layout.mesh_sizes if axis in axes)
        if axes != ordered:
            raise ValueError(
                f"{layout.source}: axis {word} is sharded over {axes}; devices share a sequence "
                f"over mesh axes in the order of the mesh: {ordered}"
            )
    if "kv_len" not in words:
        return layout.axes(spread[0]) if layout.parts(spread[0]) > 1 else ()
    queries, keys = words
    axes = layout.axes(queries)
    if not axes or layout.axes(keys) not in ((), axes):
        raise ValueError(
            f"{layout.source}: axis {keys} is sharded over {layout.axes(keys)} and axis {queries} "
            f"over {axes}; devices share a sequence if both are sharded over the same mesh axes"
        )
    layout.spread[keys] = axes
    return axes if layout.parts(queries) > 1 else ()


def spread_key_heads(layout: Layout, sizes: Mapping[str, int], *, whole_groups: bool) -> bool:
    """Spreads key heads like query heads. True: every shard keeps all key heads and picks its own.

    Raises:
        ValueError: query and key heads spread differently.
        InvalidArgument: key heads that do not divide where the operation needs whole groups.
    """
    words = [word for word in AXES if word in sizes and meaning(word).kind is Kind.KEY_HEADS]
    chosen = {w: layout.spread[w] for w in ("heads", *words) if w in layout.spread}
    if not words or not chosen:
        return False
    (first, axes), *others = chosen.items()
    for word, other in others:
        if other != axes:
            raise ValueError(
                f"{layout.source}: {first} are sharded over {axes} but {word} over {other}: "
                "expected the same"
            )
    layout.spread["heads"] = axes
    parts = layout.parts("heads")
    if all(_divides(word, sizes, parts) for word in words):
        layout.spread.update(dict.fromkeys(words, axes))
        return False
    if whole_groups or any(word in chosen for word in words):
        count = sizes[words[0]] // (meaning(words[0]).entries_per_head or 1)
        raise InvalidArgument(
            f"{layout.source}: {count} kv heads cannot be sharded over {parts} devices by "
            f"{layout.operation}: expected a number that {parts} divides"
        )
    return True


def _divides(word: str, sizes: Mapping[str, int], parts: int) -> bool:
    """Returns whether every part holds whole key heads."""
    width = meaning(word).entries_per_head
    if width is None:
        exact = sizes[word] * sizes["packing"] == 2 * sizes["kv_heads"]
        return exact and sizes[word] % parts == 0 and sizes["kv_heads"] % parts == 0
    return (sizes[word] // width) % parts == 0


def check_divisible(layout: Layout, arguments: Sequence[Argument]) -> None:
    """Every spread axis divides evenly.

    Raises:
        InvalidArgument: names the argument, the axis and the mesh axes.
    """
    for argument in arguments:
        if argument.shape is None:
            continue
        for word, size in zip(argument.words, argument.shape, strict=True):
            parts = layout.parts(word)
            loose = word.startswith("#") and size == 1
            if parts > 1 and size % parts and not loose:
                raise InvalidArgument(
                    f"{argument.name}: axis {word.lstrip('#')} of size {size} is not divisible by "
                    f"the {parts} devices of mesh axes {', '.join(layout.axes(word))}"
                )


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
    typed_layout = replace(layout, spread=dict(layout.spread))
    seen = set(typed_layout.spread)
    for argument, x in arrays:
        for word, axes in zip(argument.words, _axes(layout, x), strict=False):
            word = word.lstrip("#")
            if word not in layout.legal:  # an axis of one device splits nothing
                axes = tuple(axis for axis in axes if layout.mesh_sizes[axis] > 1)
            spread(layout, argument.name, word, axes)
            if word not in seen and axes:
                typed_layout.spread[word] = axes
            seen.add(word)
    return typed_layout


def typed_spec(layout: Layout, argument: Argument, x: Any) -> Any:
    """The spec in the type of ``x``, without what may not be spread."""
    alone = replace(layout, spread={})
    read_types(alone, [(argument, x)])
    return alone.spec(argument.words, argument.shape)


def _axes(layout: Layout, x: Any) -> Sequence[tuple[str, ...]]:
    sharding = typed_sharding(x)
    entries = () if sharding is None else sharding.spec
    return [tuple(a for a in mesh_axes(e) if a in layout.mesh_sizes) for e in entries]
