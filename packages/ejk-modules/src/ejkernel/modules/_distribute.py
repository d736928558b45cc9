"""Step three of a call with a mesh: the operation under ``shard_map``, one shard per device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from ejkernel.modules._specs import (
    Argument,
    check_divisible,
    explicit_mesh,
    mesh_axes,
    read_specs,
    read_types,
    spread_key_heads,
    spread_sequence,
    typed_spec,
)
from ejkernel.modules.compat import over_axes
from ejkernel.ops.compat import explicit_axes, mapped_mesh_axes, placed
from ejkernel.ops.core.distribution import LocalCall, check_mesh_and_specs
from ejkernel.ops.core.keys import leaf_names
from ejkernel.types.arrays import is_array
from ejkernel.types.calls.axes import bare, meaning
from ejkernel.types.calls.distributed import leaf_axes
from ejkernel.types.calls.layout import Layout, Shard
from ejkernel.types.calls.shared_sequence import without_packing
from ejkernel.types.calls.signature import axes_of
from ejkernel.types.calls.spec import Arguments, Call


class DistributedOperation(Protocol):
    """The members of an ``Operation`` that distribution uses."""

    spec: ClassVar[type[Call]]

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None: ...


def distribute(
    op: DistributedOperation,
    a: Arguments,
    placement: tuple[Any, Any, Any],
    call: LocalCall,
    *,
    ring_axis: str | None = None,
    ring_alone: bool = False,
) -> Any:
    """Run bound arguments on every shard of a mesh; the result equals the undistributed call.

    ``placement``: the mesh, in_specs and out_specs. Without them, the types of the arguments
    have both; axes of the mesh that are not explicit are then left to the compiler, and the
    outputs are sharded as the arguments are.
    ``ring_axis``: the mesh axis over which an operation that communicates between devices shards
    its sequence; ``ring_alone``: the compiler shards over the other axes of the mesh.

    Raises:
        ValueError: mesh without specs or specs without mesh, or specs that do not fit.
        InvalidArgument: an axis that the mesh does not divide.
    """
    mesh, in_specs, out_specs = placement
    check_mesh_and_specs(op.spec.name, *placement)
    typed = mesh is None
    if typed:
        mesh = explicit_mesh(a)
    axis_names = explicit_axes(mesh) if typed else tuple(mesh.axis_names)
    if ring_alone and ring_axis is not None:
        axis_names = (ring_axis,)
    shares = ring_axis is None and op.spec.shares_sequence(a)
    by_kernel = shares and not (op.spec.passes_states or op.spec.shares_queries)
    if by_kernel:
        a = without_packing(a)
    override = op.spec.distributed_axes(a)
    arguments = [_argument(p, a[p.name], override, in_specs or (), i) for i, p in _arrays(op)]
    by_name = {argument.name: argument for argument in arguments}
    mesh_sizes = {axis: mesh.shape[axis] for axis in axis_names}
    layout = _init_layout(op, arguments, mesh_sizes, ring_axis, shares=shares, typed=typed)
    typed_layout = read_types(layout, _typed_arrays(a, arguments)) if typed else None
    if typed_layout is None:
        read_specs(layout, arguments, in_specs)
    shared = spread_sequence(layout, op.spec.sequence_axes) if shares else ()
    shard = Shard(layout, _sizes_by_word(arguments))
    pick = spread_key_heads(layout, shard.sizes, whole_groups=op.spec.whole_groups)
    check_divisible(layout, arguments)
    key_heads = {x.name: x.words for x in arguments if x.shape is not None} if pick else {}
    outputs = op.spec.output_axes(a)
    natural = tuple(layout.spec(_output_words(axes, by_name)) for axes in outputs)
    if typed_layout is None:
        out_layout = _requested_specs(op, mesh, out_specs, natural)
    else:
        out_layout = tuple(_typed_output(typed_layout, axes, by_name, a) for axes in outputs)
    arrays, specs, rebuild = _split(a, by_name, layout)

    def body(*leaves: Any) -> Any:
        local = rebuild(leaves)
        if key_heads:
            shard.pick_key_heads(local, key_heads)
        op.to_shard(local, shard)
        if shared and op.spec.passes_states:
            results = op.spec.share_sequence(local, shard, lambda part: call((), part))
            return results if len(outputs) > 1 else results[0]
        return _run_shard(op, local, shard, call, shared if by_kernel else ())

    by_specs = typed_layout is None and not ring_alone
    if by_specs:
        axis_names = _axes_to_map(mesh, (specs, natural), ring_axis)
    is_partial = len(axis_names) < len(mesh.axis_names)
    if explicit_axes(mesh) or (by_specs and is_partial):  # whole over axes that no spec names
        arrays = [_placed_tree(x, mesh, spec) for x, spec in zip(arrays, specs, strict=True)]
    local_specs = (tuple(specs), natural if len(outputs) > 1 else natural[0])
    result = over_axes(body, mesh, axis_names, *local_specs)(*arrays)
    return result if out_layout == natural else _move_outputs(result, mesh, out_layout)


def _init_layout(
    op: DistributedOperation,
    arguments: Sequence[Argument],
    mesh_sizes: dict[str, int],
    ring_axis: str | None,
    *,
    shares: bool,
    typed: bool,
) -> Layout:
    """Returns a layout that spreads no axis but the sequence of a ring.

    ``shares``: devices may share a sequence; ``typed``: the types of the arguments say how.
    """
    spreadable = _spreadable(
        arguments,
        sequence=op.spec.sequence_axes if shares else (),
        pages=op.spec.shards_pages and not typed,
    )
    source, hint = "arguments" if typed else "in_specs", op.spec.sequence_hint
    layout = Layout(op.spec.name, mesh_sizes, spreadable, source=source, sequence_hint=hint)
    if ring_axis is not None:
        layout.spread.update(q_len=(ring_axis,), kv_len=(ring_axis,))
    return layout


def _run_shard(
    op: DistributedOperation,
    local: Arguments,
    shard: Shard,
    call: LocalCall,
    sequence_axes: tuple[str, ...],
) -> Any:
    """Returns the outputs of one shard, of its arguments.

    ``sequence_axes``: mesh axes over which the kernel itself exchanges keys and values.
    """
    if shard.parts("pages") > 1:
        return op.spec.attend_to_shard(local, shard, lambda part: call((), part))
    result = call((), local, sequence_axes)
    summed = tuple(sorted(shard.layout.summed_axes))
    return jax.lax.psum(result, summed) if summed else result


def _sizes_by_word(arguments: Sequence[Argument]) -> dict[str, int]:
    """Returns the size of every axis by its word; of axes that may be 1, any other size."""
    return {
        word.lstrip("#"): size
        for argument in reversed(arguments)
        if argument.shape is not None
        for word, size in zip(argument.words, argument.shape, strict=True)
        if not (word.startswith("#") and size == 1)
    }


def _axes_to_map(mesh: Any, specs: Any, ring_axis: str | None) -> tuple[str, ...]:
    """Returns the axes of the mesh that a shard_map is over: those that ``specs`` name.

    ``jax.shard_map`` would add up the gradients of devices along the others, as it does not know
    that they compute the same. Kernels for TPUs need all axes; so do arrays that are on none.
    """
    every = tuple(mesh.axis_names)
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform == "tpu":
        return every
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    entries = [entry for spec in leaves for entry in spec]
    # vmap gives the operands of a shard_map the axes of its spmd_axis_name
    named = {ring_axis, *mapped_mesh_axes()}
    named.update(axis for entry in entries for axis in mesh_axes(entry))
    return tuple(axis for axis in every if axis in named) or every


def _arrays(op: DistributedOperation) -> list[tuple[int, Any]]:
    return list(enumerate(op.spec.boundary.array_parameters))


def _argument(p: Any, value: Any, override: Any, in_specs: Sequence[Any], index: int) -> Argument:
    if hasattr(value, "shape"):
        return Argument(p.name, tuple(axes_of(p, value, override)), tuple(value.shape))
    spec = in_specs[index] if index < len(in_specs) else None
    rank = len(spec) if isinstance(spec, PartitionSpec) else 0
    return Argument(p.name, tuple(axes_of(p, rank, override)), None)


def _spreadable(
    arguments: Sequence[Argument], *, sequence: Sequence[str], pages: bool
) -> frozenset[str]:
    """The words in use that may be spread: ``sequence``, ``pages`` and those that are free."""
    words = {w.lstrip("#") for argument in arguments for w in argument.words}
    others = {*sequence, *(("pages",) if pages else ())}
    return frozenset(word for word in words if meaning(word).free or word in others)


def _output_words(axes: str, arguments: Mapping[str, Argument]) -> tuple[str, ...]:
    if axes.startswith("="):
        return arguments[axes[1:]].words
    words: list[str] = []
    for word in axes.split():
        several = [w for a in arguments.values() for w in a.words if bare(w) == word[1:]]
        words += dict.fromkeys(several) if word.startswith("*") else [word]
    return tuple(words)


def _typed_output(
    layout: Layout, axes: str, arguments: Mapping[str, Argument], a: Arguments
) -> PartitionSpec:
    """Returns the spec of an output from the arguments: an updated one's, or its words'."""
    if axes.startswith("="):
        return typed_spec(layout, arguments[axes[1:]], a[axes[1:]])
    return layout.spec(_output_words(axes, arguments))


def _typed_arrays(a: Arguments, arguments: Sequence[Argument]) -> list[tuple[Argument, Any]]:
    """Returns every array of the call, masks' arrays included, with the words of its axes."""
    arrays = [(argument, a[argument.name]) for argument in arguments if argument.shape is not None]
    for name, value in a.items():
        words = leaf_axes(value)
        if words is not None:
            leaves = jax.tree_util.tree_leaves(value)
            for leaf, x, axes in zip(leaf_names(name, value), leaves, words, strict=True):
                arrays.append((Argument(leaf, axes, x.shape), x))
    return arrays


def _split(
    a: Arguments, by_name: Mapping[str, Argument], layout: Layout
) -> tuple[list[Any], list[PartitionSpec], Callable[[Sequence[Any]], Arguments]]:
    """Returns the arrays of the call, their specs, and a function that replaces the arrays."""
    names, arrays, specs = [], [], []
    for name, value in a.items():
        argument = by_name.get(name)
        words = leaf_axes(value)
        if words is not None:
            leaves, structure = jax.tree_util.tree_flatten(value)
            of_leaves = [layout.spec(w, x.shape) for w, x in zip(words, leaves, strict=True)]
            names.append(name)
            arrays.append(value)
            specs.append(jax.tree_util.tree_unflatten(structure, of_leaves))
        elif is_array(value):
            words = argument.words if argument else ("_",) * len(value.shape)
            names.append(name)
            arrays.append(value)
            specs.append(layout.spec(words, value.shape))

    def rebuild(leaves: Sequence[Any]) -> Arguments:
        return {**a, **dict(zip(names, leaves, strict=True))}

    return arrays, specs, rebuild


def _requested_specs(
    op: DistributedOperation, mesh: Any, out_specs: Any, natural: tuple[PartitionSpec, ...]
) -> tuple[PartitionSpec, ...]:
    """Returns the requested output specs, in the normal form of the natural ones."""
    if out_specs is None:
        return natural
    requested = (out_specs,) if isinstance(out_specs, PartitionSpec) else tuple(out_specs)
    if isinstance(out_specs, PartitionSpec):
        requested = (*requested, *natural[1:])
    if len(requested) != len(natural):
        raise ValueError(
            f"out_specs: given {len(requested)} specs, expected {len(natural)} for the outputs of "
            f"{op.spec.name}"
        )
    specs = []
    for i, (spec, natural_spec) in enumerate(zip(requested, natural, strict=True)):
        if spec is None:
            specs.append(natural_spec)
            continue
        if not isinstance(spec, PartitionSpec) or len(spec) > len(natural_spec):
            raise ValueError(
                f"out_specs[{i}]: given {spec!r}, expected a PartitionSpec of at most "
                f"{len(natural_spec)} entries"
            )
        unknown = [x for entry in spec for x in mesh_axes(entry) if x not in mesh.shape]
        if unknown:
            raise ValueError(
                f"out_specs[{i}]: mesh axis {unknown[0]!r} is unknown, the mesh has: "
                f"{', '.join(mesh.shape)}"
            )
        named = [axis for entry in spec for axis in mesh_axes(entry)]
        if len(set(named)) < len(named):
            raise ValueError(f"out_specs[{i}]: given {spec}, expected each mesh axis at most once")
        entries = [mesh_axes(entry) for entry in spec] + [()] * (len(natural_spec) - len(spec))
        specs.append(PartitionSpec(*(e[0] if len(e) == 1 else e or None for e in entries)))
    return tuple(specs)


def _move_outputs(result: Any, mesh: Any, specs: tuple[PartitionSpec, ...]) -> Any:
    """Moves the outputs of a call, one array or several, to other specs."""
    if len(specs) == 1:
        return _move(result, mesh, specs[0])
    return tuple(_move(x, mesh, spec) for x, spec in zip(result, specs, strict=True))


def _move(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Moves values to another spec; ValueError for an axis that does not divide."""
    for size, entry in zip(x.shape, spec, strict=False):
        parts = math.prod(mesh.shape[axis] for axis in mesh_axes(entry))
        if size % parts:
            raise ValueError(
                f"out_specs: {spec} splits an axis of size {size} over {parts} devices"
            )
    return placed(x, mesh, spec)


def _placed_tree(x: Any, mesh: Any, specs: Any) -> Any:
    """An array, or a mask with one spec per array, laid out by its specs."""
    if isinstance(specs, PartitionSpec):
        return placed(jnp.asarray(x), mesh, specs)
    return jax.tree_util.tree_map(
        lambda leaf, spec: placed(jnp.asarray(leaf), mesh, spec), x, specs
    )
