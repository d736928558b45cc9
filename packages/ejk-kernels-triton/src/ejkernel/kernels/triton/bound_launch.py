"""A launch bound to a target: the kernel, its grid and a value for every parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


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


MAP_ROWS = 2**30  # of a ``runs_map``: more than an operand may have


@dataclass(frozen=True)
class TensorMap:
    """Operand ``index`` as a TMA descriptor over a row-major ``shape`` view, read by ``block``.

    ``steps``: strides in elements, if not contiguous. ``result``: ``index`` is the index of a
    result, which is written by ``block``. ``view``: as for pointers; all other fields count its
    elements.
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
    """Returns a descriptor of ragged rows: rows past the end of a run read as 0.

    Row ``r`` of a run of ``length`` rows that ends before row ``end`` of the operand is at
    ``[MAP_ROWS, end, MAP_ROWS - length + r, column]``. The copy engine sees rows past the run
    outside the third axis. MAP_ROWS steps along the first axis take as many rows back, as addresses
    wrap around at 2^64. Operands have fewer than MAP_ROWS rows.

    Source: Triton's own ``triton.tools.ragged_tma``, which introduced the trick.
    """
    large = 2**31 - 2**16
    shape, steps = (large, large, MAP_ROWS, columns), (2**34 - columns, columns, columns, 1)
    return TensorMap(index, shape, (1, 1, *block), steps, view=view)


@dataclass(frozen=True)
class BoundLaunch:
    """One launch on one target.

    ``arguments`` values: ``In``, ``Out``, ``TensorMap``, int (passed as i32 or i64), float
    (passed as float32), None (a constant of the compiled kernel), or a group of them: a tuple or a
    NamedTuple, whose fields in capitals are constants too. Every field of a group in ``constants``
    is constant.

    Attributes:
        arguments, constants: values by the names of the kernel's parameters.
        options: compiler options: ``num_warps``, ``num_stages`` and others.
        interpreted: arguments that take another value in the interpreter, which runs no assembly.
        aliases: operand to the result that lies in its memory. Elements that the kernel does not
            write keep the operand's values. XLA copies an operand that the program needs later.
        stand_in: the launch that the interpreter runs in the place of a kernel in Gluon.
    """

    kernel: Any
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: {"num_warps": 4, "num_stages": 2})
    interpreted: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[int, int] = field(default_factory=dict)
    stand_in: BoundLaunch | None = None


def map_leaves(
    value: Any,
    leaf: Callable[[Any, tuple[int, ...], bool], Any],
    path: tuple[int, ...] = (),
    constant: bool = False,
) -> Any:
    """Returns an argument with ``leaf(value, path, constant)`` for each value of its groups.

    ``path``: fields by number, from the outermost group inwards.
    """
    if not isinstance(value, tuple):
        return leaf(value, path, constant)
    names = getattr(value, "_fields", None)
    fields = [
        map_leaves(x, leaf, (*path, i), constant or (names is not None and names[i].isupper()))
        for i, x in enumerate(value)
    ]
    return tuple(fields) if names is None else type(value)(*fields)


def leaves(value: Any) -> list[Any]:
    """Returns the values of an argument, the fields of its groups in order."""
    if not isinstance(value, tuple):
        return [value]
    return [leaf for field in value for leaf in leaves(field)]


def is_result(value: Any) -> bool:
    """Returns whether an argument of a launch is written."""
    return isinstance(value, Out) or (isinstance(value, TensorMap) and value.result)


def input_order(launch: BoundLaunch, results: int) -> list[int]:
    """Returns the operand of every array parameter that is read, in the order of the parameters.

    The launcher hands out one buffer per array parameter, in order: first the operands of the
    custom call, then its results. So the custom call must have its operands in this order: an
    operand that two parameters read occurs twice, one that no parameter reads does not occur.

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
