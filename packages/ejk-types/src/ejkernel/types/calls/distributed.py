"""The part of a call's definition that says how devices compute it together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax

from ejkernel.types.arrays import is_array
from ejkernel.types.calls import canonicalize
from ejkernel.types.calls.axes import mask_words, meaning
from ejkernel.types.calls.canonicalize import Arguments
from ejkernel.types.calls.layout import Layout
from ejkernel.types.calls.sharding import ShardingRule
from ejkernel.types.calls.sharding_notes import pages_notes, place_arrays, sharding_notes
from ejkernel.types.calls.signature import Boundary, axes_of
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.mods import MODS, Mod
from ejkernel.types.serving.plan import AttentionPlan


class DistributedCall:
    """The axes of a call's arrays, how they may be sharded, and what a shard computes.

    Attributes:
        name: of the operation, as users call it.
        boundary: the parameters of the operation.
        seeds: the arguments, any integer, that dropout starts from.
        sequence_hint: what a caller does in place of sharding a sequence, for messages.
        shards_pages: whether pages of a cache may be spread over devices (``attend_to_shard``).
        whole_groups: whether a device of a mesh needs all query heads of its key heads.
        sequence_axes: words of the axes of queries and of keys, or of tokens, if devices may share
            a sequence.
        passes_states: whether such devices pass states on (``share_sequence``), whatever the
            kernel; otherwise it takes a kernel that can share a sequence.
        shares_queries: whether devices may share the queries alone: ``to_shard`` adapts a call to
            some of its rows.
        refused_axes: words of axes that are an error under plain ``jit`` where they are sharded,
            and what to do instead.
    """

    name: ClassVar[str]
    boundary: ClassVar[Boundary]
    seeds: ClassVar[tuple[str, ...]] = ()
    sequence_hint: ClassVar[str] = Layout.sequence_hint
    shards_pages: ClassVar[bool] = False
    whole_groups: ClassVar[bool] = False
    sequence_axes: ClassVar[tuple[str, ...]] = ()
    passes_states: ClassVar[bool] = False
    shares_queries: ClassVar[bool] = False
    refused_axes: ClassVar[Mapping[str, str]] = {}

    # ---- axes -------------------------------------------------------------------------------

    @classmethod
    def argument_axes(cls, a: Arguments) -> Mapping[str, str]:
        """Returns axes of arguments that an annotation cannot express."""
        return {}

    @classmethod
    def output_axes(cls, a: Arguments) -> tuple[str, ...]:
        """Axes of the outputs of this call."""
        raise NotImplementedError

    @classmethod
    def distributed_axes(cls, a: Arguments) -> Mapping[str, str]:
        """Returns axes of arguments that have another meaning where the call is distributed."""
        return cls.argument_axes(a)

    @classmethod
    def array_axes(cls, a: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
        """Returns the words of the axes of every array, by argument; a mask has several arrays."""
        override, axes = cls.distributed_axes(dict(a)), {}
        for p in cls.boundary.parameters:
            value = a[p.name]
            leaves = leaf_axes(value)
            if leaves is not None:
                axes[p.name] = leaves
            elif is_array(value):
                axes[p.name] = [tuple(axes_of(p, value, override))]
        return axes

    @classmethod
    def shares_sequence(cls, a: Mapping[str, Any]) -> bool:
        """Returns whether devices may share the sequence of a call."""
        return bool(cls.sequence_axes)

    @classmethod
    def sharding_rule(cls, a: Mapping[str, Any], *, sequence: bool = False) -> ShardingRule:
        """Returns how the arrays of a call may be sharded, from their shapes alone.

        ``sequence``: whether the kernel runs on a share of the sequence.
        """
        sizes: dict[str, int] = {}
        for name, words in cls.array_axes(a).items():
            for axes, x in zip(words, jax.tree.leaves(a[name]), strict=True):
                for word, size in zip(axes, x.shape, strict=True):
                    if not (word.startswith("#") and size == 1):
                        sizes.setdefault(word.lstrip("#"), size)
        words = tuple(word for word in cls.sequence_axes if word in sizes) if sequence else ()
        return ShardingRule(cls.name, sizes, cls.whole_groups, words, cls.whole_axes(sizes))

    @classmethod
    def whole_axes(cls, sizes: Mapping[str, int]) -> dict[str, str]:
        """Returns words of axes that are an error where they are sharded, and what to do instead.

        They are ``refused_axes``, and the axes of a sequence that devices never share.
        """
        if cls.sequence_axes:
            return dict(cls.refused_axes)
        tokens = (word for word in sizes if meaning(word).in_order)
        return {**dict.fromkeys(tokens, cls.sequence_hint), **cls.refused_axes}

    @classmethod
    def sharding_notes(
        cls, a: Mapping[str, Any], arrays: Mapping[str, Any], *, sequence: bool = False
    ) -> tuple[str, ...]:
        """Returns sentences about the sharding of a call: what stays sharded, which collectives.

        ``a``: the canonical arguments; ``arrays``: the caller's, which say how they are sharded.
        """
        axes = cls.array_axes(a)
        alike = {
            name: arrays[name]
            for name in axes
            if name in arrays
            and [x.shape for x in jax.tree.leaves(arrays[name])]
            == [x.shape for x in jax.tree.leaves(a[name])]
        }
        first = next(iter(cls.output_axes(dict(a))), "")
        output = () if first.startswith("=") else tuple(first.split())
        rule = cls.sharding_rule(a, sequence=sequence)
        described = cls.passes_states or cls.shares_queries
        describe = partial(cls.sequence_note, a) if described else None
        return sharding_notes(rule, axes, alike, output, a, describe)

    @classmethod
    def placement_notes(
        cls, a: Mapping[str, Any], arrays: Mapping[str, Any], mesh: Any, in_specs: Any
    ) -> tuple[str, ...]:
        """Returns sentences about the sharding of a call by ``mesh=`` and ``in_specs=``.

        ``a``: the canonical arguments of one shard; ``arrays``: the caller's.
        """
        names = [p.name for p in cls.boundary.array_parameters]
        specs = dict(zip(names, in_specs or (), strict=False))
        # a mask is several arrays, whose sharding follows from the others
        arrays = {name: x for name, x in arrays.items() if not isinstance(x, MaskInfo)}
        unsharded = {**a, **arrays, "mask_info": None}
        axes = {name: words[0] for name, words in cls.array_axes(unsharded).items()}
        arrays = {name: arrays[name] for name in arrays if name in axes}
        placed, over_pages = place_arrays(arrays, axes, specs, mesh)
        shares = cls.shares_sequence(unsharded)
        notes = cls.sharding_notes({**unsharded, **placed}, placed, sequence=shares)
        if not over_pages:
            return notes
        rule = cls.sharding_rule(unsharded)
        words = {name: (x, axes[name]) for name, x in placed.items()}
        output = cls.output_axes(unsharded)[0]
        return (*pages_notes(rule, output, over_pages, mesh, words, unsharded), *notes)

    # ---- on a shard -----------------------------------------------------------------------

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        """Adapt canonical arguments of one shard to what the operation means for all of them.

        ``shard`` has ``parts(word)``, over how many devices an axis is spread, and of this one
        ``offset(word)``, its first index, and ``local(word)``, its size.
        """
        canonicalize.local_seeds(a, shard, *cls.seeds)

    @classmethod
    def attend_to_shard(cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]) -> Any:
        """Returns the result of a call of which each device has some of the pages.

        ``a``: the arguments of one shard; ``run``: computes a call of one device.
        """
        raise NotImplementedError

    @classmethod
    def sequence_note(cls, a: Mapping[str, Any], layout: Layout) -> str:
        """Returns what devices that share the sequence of a call send each other."""
        raise NotImplementedError

    @classmethod
    def share_sequence(
        cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]
    ) -> tuple[Any, ...]:
        """Returns the requested outputs of a call of which each device has some of the tokens.

        ``a``: the arguments of one shard; ``run``: computes a call of one device.
        """
        raise NotImplementedError

    @classmethod
    def saved_state_types(cls, a: Mapping[str, Any], devices: int) -> list[tuple[str, Any]]:
        """Returns what devices that share a sequence keep for its gradients: axes and types.

        Empty: gradients are JAX's, through ``share_sequence``. ``a``: the arguments of the full
        call; ``devices``: the most that may share it.
        """
        return []

    @classmethod
    def share_and_save(
        cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any], saved_states: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns ``share_sequence``, and arrays of the types ``saved_states`` on one device."""
        raise NotImplementedError

    @classmethod
    def share_gradients(
        cls,
        arguments: Callable[..., Arguments],
        floats: Sequence[Any],
        shard: Any,
        run: Callable[[Arguments], Any],
        saved_states: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[Any, ...]:
        """Returns the gradients of ``floats``, of which ``arguments`` makes one shard's arguments.

        ``saved_states``: of ``share_and_save``; ``cotangents``: of the output, and of the last
        states on every device.
        """
        raise NotImplementedError


def leaf_axes(value: Any) -> list[tuple[str, ...]] | None:
    """Returns the words of the axes of each array of a mask, mod or plan; None for other values.

    The arrays of a mod are whole on every device: its function indexes them by global indices.
    """
    if isinstance(value, MaskInfo):
        return mask_words(value)
    if isinstance(value, Mod):
        return [("_",) * len(x.shape) for x in jax.tree.leaves(value)]
    if isinstance(value, AttentionPlan):
        return list(value.AXES)
    return None


def shift_mods(a: Arguments, shard: Any) -> None:
    """Lets functions of indices count rows and heads from those that a shard begins with."""
    for name in MODS:
        if a.get(name) is not None:
            a[name] = a[name].on_shard(shard.offset("batch"), shard.offset("heads"))
