"""The older form of a launch: operands by number. New kernels have a ``launch.Launch``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out
from ejkernel.kernels.triton.targets import Target


def bound(
    kernel: Any, given: Mapping[str, Any], grid: tuple[int, ...], num_warps: int = 4,
    num_stages: int = 2, options: Mapping[str, Any] | None = None, *,
    known: Mapping[str, Any] | None = None, **more: Any,
) -> BoundLaunch:  # fmt: skip
    """Returns a launch with what is ``given`` and what else the kernel asks for of ``known``.

    The kernel says itself which of its parameters are constants.
    """
    asked = {p.name: p.is_constexpr for p in kernel.params}
    values = {name: x for name, x in (known or {}).items() if name in asked} | dict(given)
    constants = {name: values.pop(name) for name in list(values) if asked.get(name)}
    how = {"num_warps": num_warps, "num_stages": num_stages, **(options or {})}
    return BoundLaunch(kernel, values, constants, grid, how, **more)


def inputs(known: Mapping[str, Any], first: int = 0) -> dict[str, In | None]:
    """Returns operands in order from ``first`` on by name, None where a call has not one."""
    numbers = itertools.count(first)
    return {name: In(next(numbers)) if there else None for name, there in known.items()}


def results(known: Mapping[str, Any]) -> dict[str, Out | None]:
    """Returns results in order by name, None where a call has not one."""
    numbers = itertools.count()
    return {name: Out(next(numbers)) if there else None for name, there in known.items()}


def filled(group: Any, known: Mapping[str, Any], *first: Any) -> Any:
    """Returns a group of ``first`` and, for its other fields, what is ``known`` by their names."""
    return group(*first, **{name: known[name] for name in group._fields[len(first) :]})


class Plan:
    """A launch whose operands have numbers."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the types of the results."""
        raise NotImplementedError

    def result_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the types of the results."""
        return self.outputs()

    def launch(self, target: Target) -> BoundLaunch:
        """Returns the launch on ``target``."""
        raise NotImplementedError

    def bind(self, target: Target) -> BoundLaunch:
        """Returns the launch on ``target``."""
        return self.launch(target)

    def is_sequential(self, size: int, mapped: Sequence[bool]) -> bool:
        """Returns whether mapped calls must run one after the other."""
        return False

    def fold(self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]) -> Any:
        """Returns the plan that computes ``size`` calls at once, and its operands."""
        raise NotImplementedError


class Unmapped(Plan):
    """A plan that no mapped axis reaches."""

    def fold(self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]) -> Any:
        raise NotImplementedError("mapped axes are laid out before the kernels are planned")


class Named(Plan):
    """A plan whose operands have names; ``shapes`` has them in order, with their shapes."""

    @property
    def names(self: Any) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(name for name, _ in self.shapes)

    def shape(self: Any, name: str) -> tuple[int, ...] | None:
        """Returns the shape of an operand, None where this call does not have it."""
        return dict(self.shapes).get(name)

    def operand(self, name: str, view: str | None = None) -> In | None:
        """Returns the pointer to an operand, None where this call does not have it."""
        return In(self.names.index(name), view) if name in self.names else None
