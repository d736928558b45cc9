"""What a launch is: a plan of one call, a kernel's operands and results, its grid."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.targets import Target


@dataclass(frozen=True)
class In:
    """Operand ``index`` as a pointer; to elements of dtype ``view`` if given.

    Elements of a wider ``view`` are neighbours along the last axis, which it must divide.
    """

    index: int
    view: str | None = None


@dataclass(frozen=True)
class Out:
    """Result ``index`` as a pointer; ``view`` as for operands."""

    index: int
    view: str | None = None


RUNS = 2**30  # of ``runs_map``: more rows than an operand may have


@dataclass(frozen=True)
class TensorMap:
    """Operand ``index`` as a TMA descriptor over a row-major ``shape`` view, read by ``block``.

    ``steps``: strides in elements, where they are not those of ``shape``. ``result``: ``index`` is
    that of a result, which is written by ``block``. ``view``: as for pointers; all else counts
    elements of it.
    """

    index: int
    shape: tuple[int, ...]
    block: tuple[int, ...]
    steps: tuple[int, ...] | None = None
    result: bool = False
    view: str | None = None

    @property
    def strides(self) -> tuple[int, ...]:
        if self.steps is not None:
            return self.steps
        steps = [1]
        for size in reversed(self.shape[1:]):
            steps.append(steps[-1] * size)
        return tuple(reversed(steps))


def runs_map(
    index: int, columns: int, block: tuple[int, int], view: str | None = None
) -> TensorMap:
    """A descriptor of rows that come in runs: rows past the end of a run read as 0.

    Row ``r`` of a run of ``length`` rows that ends before row ``end`` of the operand is at
    ``[RUNS, end, RUNS - length + r, column]``. The copy engine sees rows past the run outside
    the third axis. RUNS steps along the first axis take RUNS rows back, as addresses wrap around
    at 2^64. Operands have fewer than RUNS rows.

    Source: Triton's own ``triton.tools.ragged_tma``, where the trick is from.
    """
    large = 2**31 - 2**16
    shape, steps = (large, large, RUNS, columns), (2**34 - columns, columns, columns, 1)
    return TensorMap(index, shape, (1, 1, *block), steps, view=view)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments by parameter name, its grid and its one config.

    ``arguments`` values: ``In``, ``Out``, ``TensorMap``, int (passed as i32 or i64), float
    (passed as float32), None (a constant of the compiled kernel), or a group of them: a tuple or a
    NamedTuple, whose fields in capitals are constants too. All of a group among ``constants`` is
    constant. ``interpreted``: constants that take another value in the interpreter, which runs no
    assembly. ``aliases``: operand to the result that lies in its memory: elements that the kernel
    does not write stay as they were. A program that still needs the operand afterwards gets a copy
    of it made. ``stand_in``: what the interpreter runs in the place of a kernel in Gluon.
    """

    kernel: Any
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    interpreted: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[int, int] = field(default_factory=dict)
    stand_in: Launch | None = None

    @classmethod
    def of(
        cls, kernel: Any, given: Mapping[str, Any], grid: tuple[int, ...], *how: Any,
        known: Mapping[str, Any] | None = None, **more: Any,
    ) -> Launch:  # fmt: skip
        """A launch with what is ``given`` and what else the kernel asks for of what is ``known``.

        The kernel says itself which of its parameters are constants.
        """
        asked = {p.name: p.is_constexpr for p in kernel.params}
        values = {name: x for name, x in (known or {}).items() if name in asked} | dict(given)
        constants = {name: values.pop(name) for name in list(values) if asked.get(name)}
        return cls(kernel, values, constants, grid, *how, **more)


def inputs(known: Mapping[str, Any], first: int = 0) -> dict[str, In | None]:
    """Operands in order from ``first`` on by name, None for those that are not there."""
    numbers = itertools.count(first)
    return {name: In(next(numbers)) if there else None for name, there in known.items()}


def results(known: Mapping[str, Any]) -> dict[str, Out | None]:
    """The same of results."""
    numbers = itertools.count()
    return {name: Out(next(numbers)) if there else None for name, there in known.items()}


def filled(group: Any, known: Mapping[str, Any], *first: Any) -> Any:
    """A group of ``first`` and, for its other fields, what is ``known`` by their names."""
    return group(*first, **{name: known[name] for name in group._fields[len(first) :]})


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """The type of a result."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


class Plan(Protocol):
    """What ``call`` needs to know of an operation; implementations are frozen and hashable."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the results."""
        ...

    def launch(self, target: Target) -> Launch:
        """The launch on ``target``."""
        ...

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Plan, Sequence[jax.Array]]:
        """The plan that computes ``size`` calls at once, and its operands.

        Batched operands come with the mapped axis in front. Results of the new plan must be those
        of the old one with the mapped axis merged into their leading axis, mapped axis slowest.
        """
        ...


@dataclass(frozen=True)
class KernelPlan(Plan):
    """A plan of what is computed and how; further fields are the kernel's own.

    ``module``: under this package, whose function ``launch`` takes the fields, the target behind
    the first two. It imports triton, so it is imported where a kernel is lowered.
    """

    problem: Any
    tiles: Any
    module: ClassVar[str]

    def launch(self, target: Target) -> Launch:
        module = importlib.import_module(f"{__package__}.{self.module}")
        more = (getattr(self, f.name) for f in fields(self)[2:])
        return module.launch(self.problem, self.tiles, target, *more)


class Unmapped:
    """A plan that no mapped axis reaches."""

    def fold(self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]) -> Any:
        raise NotImplementedError("mapped axes are laid out before the kernels are planned")


class Batched:
    """A plan whose operands and results all have the batch in front, alone or times something."""

    def folded(self: Any, size: int) -> Any:
        """The plan of ``size`` calls at once."""
        return replace(self, problem=self.problem.folded(size))

    def fold(
        self, size: int, arrays: Sequence[jax.Array], batched: Sequence[bool]
    ) -> tuple[Any, list[jax.Array]]:
        merged = [
            merge_leading(size, x, on, x.shape[1 if on else 0])
            for x, on in zip(arrays, batched, strict=True)
        ]
        return self.folded(size), merged


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Named:
    """Of a plan whose operands have names; ``shapes`` has them in order, with their shapes."""

    @property
    def names(self: Any) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shapes)

    def shape(self: Any, name: str) -> tuple[int, ...] | None:
        return dict(self.shapes).get(name)

    def operand(self, name: str, view: str | None = None) -> In | None:
        return In(self.names.index(name), view) if name in self.names else None


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    """The shapes of a ``Named`` plan."""
    return tuple((name, tuple(x.shape)) for name, x in arrays.items())


def merge_leading(
    size: int, array: jax.Array, batched: bool, inner: int, *, keep_one: bool = False
) -> jax.Array:
    """One operand of a folded plan: its leading axis (``inner`` or 1) becomes ``size * inner``.

    An operand that is neither batched nor ``inner`` long stays as it is when ``keep_one``.
    """
    if not batched and keep_one and array.shape[0] == 1:
        return array
    if not batched:
        array = jnp.broadcast_to(array[None], (size, *array.shape))
    if array.shape[1] != inner:
        array = jnp.broadcast_to(array, (size, inner, *array.shape[2:]))
    return array.reshape(size * inner, *array.shape[2:])


def rebuilt(
    value: Any,
    leaf: Callable[[Any, tuple[int, ...], bool], Any],
    path: tuple[int, ...] = (),
    constant: bool = False,
) -> Any:
    """An argument with ``leaf(value, path, constant)`` in the place of each value of its groups.

    ``path``: fields by number, from the outermost group inwards.
    """
    if not isinstance(value, tuple):
        return leaf(value, path, constant)
    names = getattr(value, "_fields", None)
    new = []
    for n, x in enumerate(value):
        fixed = constant or (names is not None and names[n].isupper())
        where = (*path, n)
        new.append(
            rebuilt(x, leaf, where, fixed) if isinstance(x, tuple) else leaf(x, where, fixed)
        )
    return tuple(new) if names is None else type(value)(*new)


def leaves(value: Any) -> list[Any]:
    """The values of an argument, those of its groups in order."""
    if not isinstance(value, tuple):
        return [value]
    found = []
    for part in value:
        if isinstance(part, tuple):
            found += leaves(part)
        else:
            found.append(part)
    return found


def is_result(value: Any) -> bool:
    """Returns whether an argument of a launch is written."""
    return isinstance(value, Out) or (isinstance(value, TensorMap) and value.result)


def input_order(launch: Launch, results: int) -> list[int]:
    """The operand of every array parameter that is read, in the order of the parameters.

    The launcher hands out one buffer per array parameter, in order: first the operands of the
    custom call, then its results. So the operands must be given to it in this order, one that two
    parameters read twice, one that none reads not at all.

    Raises:
        TypeError: results are not the last array parameters, each once and in order.
    """
    arrays = [
        value
        for name in launch.kernel.arg_names
        for value in leaves(launch.arguments.get(name))
        if isinstance(value, (In, Out, TensorMap))
    ]
    inputs = [value.index for value in arrays if not is_result(value)]
    outputs = [value.index for value in arrays[len(inputs) :] if is_result(value)]
    if outputs != list(range(results)):
        raise TypeError(
            f"{launch.kernel.__name__}: its {results} results must be the last array parameters, "
            f"each once and in order; the parameters are {arrays}"
        )
    return inputs


def power_of_two(n: int) -> int:
    """The smallest power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()
