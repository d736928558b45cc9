"""The launch of a Triton kernel: a class that stands next to its kernel, in the same file.

    @triton.jit
    def scale_rows(x, factors, out, columns, BLOCK: tl.constexpr): ...

    @dataclass(frozen=True)
    class ScaleRows(Launch):
        kernel = scale_rows
        batching = {"x": BATCHED, "factors": SHARED}

        problem: Problem
        tiles: Tiles

        def outputs(self):
            return {"out": struct(self.problem.dtype, self.problem.rows, self.problem.columns)}

        def grid(self, target):
            return (self.problem.rows,)

        def arguments(self, target):
            return {"columns": self.problem.columns, "BLOCK": self.tiles.block}

``bridge.call(ScaleRows(problem, tiles), x=x, factors=f)`` launches it. Operands, results and
arguments have the names of the kernel's parameters; a kernel that takes groups of them gets the
groups from ``arguments``, made with ``operand`` and ``result``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out
from ejkernel.kernels.triton.targets import Target

BATCHED = "batched"
"""``vmap`` merges the mapped axis into the leading axis; an unmapped operand is repeated."""
SHARED = "shared"
"""Like BATCHED, but an unmapped operand whose leading axis is 1 serves every batch row as it is."""
SEQUENTIAL = "sequential"
"""Mapped calls run one after the other."""
WHOLE = "whole"
"""Without an axis of batch rows: unmapped it serves all calls, mapped as SEQUENTIAL."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Returns the type of a result."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def power_of_two(n: int) -> int:
    """Returns the smallest power of two at or above n."""
    return 1 << max(0, n - 1).bit_length()


def shapes_of(arrays: Mapping[str, Any]) -> Shapes:
    """Returns names and shapes of operands, a hashable value."""
    return tuple((name, tuple(x.shape)) for name, x in arrays.items())


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel; subclasses are frozen and hashable, as they key programs.

    Subclasses say what the kernel writes (``outputs``), how many programs run (``grid``), and the
    values of the parameters that are neither an operand nor a result (``arguments``).

    Attributes:
        kernel: the ``triton.jit`` function.
        batching: every operand the launch may have to BATCHED, SHARED, SEQUENTIAL or WHOLE.
        shared_together: operands that are shared by all batch rows only where all of them are.
        operands: name and shape of the operands of this call, in order; ``bridge.call`` sets it.
    """

    kernel: ClassVar[Any]
    batching: ClassVar[dict[str, str]]
    shared_together: ClassVar[tuple[frozenset[str], ...]] = ()
    operands: Shapes = field(default=(), kw_only=True)

    # -- what a subclass says ------------------------------------------------------------------

    def outputs(self) -> Mapping[str, jax.ShapeDtypeStruct | None]:
        """Returns the types of the results by parameter name; None for a result left out."""
        raise NotImplementedError

    def grid(self, target: Target) -> tuple[int, ...]:
        """Returns the number of programs along up to three axes."""
        raise NotImplementedError

    def arguments(self, target: Target) -> Mapping[str, Any]:
        """Returns values by parameter name.

        Parameters that are not named get the operand or the result of their name, None where this
        call does not have it. Parameters annotated ``tl.constexpr`` are constants.
        """
        return {}

    def options(self: Any, target: Target) -> Mapping[str, Any]:
        """Returns the compiler's options, by default from the tiles."""
        return {"num_warps": self.tiles.num_warps, "num_stages": self.tiles.num_stages}

    def interpreter_arguments(self, target: Target) -> Mapping[str, Any]:
        """Returns arguments that take another value in the interpreter, which has no assembly."""
        return {}

    def stand_in(self) -> Launch | None:
        """Returns the launch that the interpreter runs instead, where the kernel is in Gluon."""
        return None

    def in_place(self) -> Mapping[str, str]:
        """Returns the results that lie in the memory of an operand, with the operand's name."""
        return {}

    @property
    def batch(self: Any) -> int:
        """Batch rows: the leading axis of SHARED operands that are not shared."""
        return self.problem.batch

    def with_batch(self: Any, size: int) -> Any:
        """Returns the launch of ``size`` times as many batch rows."""
        return replace(self, problem=self.problem.folded(size))

    def rows_per_batch(self, name: str) -> int:
        """Returns the entries of a SHARED operand's leading axis for one batch row."""
        return 1

    # -- for ``arguments`` ---------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operands of this call, in order."""
        return tuple(name for name, _ in self.operands)

    def has(self, name: str) -> bool:
        """Returns whether this call has an operand."""
        return name in self.names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of an operand, None where this call does not have it."""
        return dict(self.operands).get(name)

    def operand(self, name: str, view: str | None = None) -> In | None:
        """Returns the pointer to an operand, None where this call does not have it."""
        return In(self.names.index(name), view) if name in self.names else None

    def result(self, name: str, view: str | None = None) -> Out | None:
        """Returns the pointer to a result, None where this call does not have it."""
        written = [result for result, kind in self.outputs().items() if kind is not None]
        return Out(written.index(name), view) if name in written else None

    # -- for the bridge ------------------------------------------------------------------------

    def with_operands(self, arrays: Mapping[str, Any]) -> Self:
        """Returns the launch on operands by name.

        Raises:
            TypeError: the launch does not declare an operand.
        """
        unknown = arrays.keys() - self.batching.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__}: no operand is named {sorted(unknown)}")
        return replace(self, operands=shapes_of(arrays))

    def result_types(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the types of the results of this call, in order."""
        return tuple(kind for kind in self.outputs().values() if kind is not None)

    def bind(self, target: Target) -> BoundLaunch:
        """Returns the launch on ``target`` with a value for every parameter."""
        outputs, values = self.outputs(), dict(self.arguments(target))
        for name in self.kernel.arg_names:
            if name not in values and name in outputs:
                values[name] = self.result(name)
            elif name not in values and name in self.batching:
                values[name] = self.operand(name)
        constant = {p.name for p in self.kernel.params if p.is_constexpr}
        aliases = ((self.operand(x), self.result(out)) for out, x in self.in_place().items())
        stand_in = self.stand_in()
        return BoundLaunch(
            self.kernel,
            arguments={name: x for name, x in values.items() if name not in constant},
            constants={name: x for name, x in values.items() if name in constant},
            grid=self.grid(target),
            options=self.options(target),
            interpreted=self.interpreter_arguments(target),
            aliases={x.index: out.index for x, out in aliases if x is not None and out is not None},
            stand_in=None if stand_in is None else stand_in.bind(target),
        )

    def is_sequential(self, size: int, mapped: Sequence[bool]) -> bool:
        """Returns whether ``size`` mapped calls must run one after the other."""
        pairs = zip(self.names, mapped, strict=True)
        return any(on and self.batching[name] in (SEQUENTIAL, WHOLE) for name, on in pairs)

    def fold(
        self, size: int, arrays: Sequence[jax.Array], mapped: Sequence[bool]
    ) -> tuple[Launch, list[jax.Array]]:
        """Returns the launch that computes ``size`` calls at once, and its operands.

        Mapped operands come with the mapped axis in front. The results are the results of this
        launch with the mapped axis merged into their leading axis, the mapped axis slowest.
        """
        private = {name for name, on in zip(self.names, mapped, strict=True) if on}
        private |= {x for together in self.shared_together if together & private for x in together}
        merged = []
        for name, array, on in zip(self.names, arrays, mapped, strict=True):
            if self.batching[name] == WHOLE:
                merged.append(array)
                continue
            rows = array.shape[1 if on else 0]
            may_share = self.batching[name] == SHARED and rows == self.rows_per_batch(name)
            if may_share and name not in private:
                merged.append(array)
            else:
                batch = self.batch if may_share else 1
                merged.append(_merge_leading(size, array, on, batch))
        shapes = shapes_of(dict(zip(self.names, merged, strict=True)))
        return replace(self.with_batch(size), operands=shapes), merged


@dataclass(frozen=True)
class SubstituteLaunch(Launch):
    """Launch of a kernel for one architecture, with the results and the grid of ``general``.

    Attributes:
        general: the launch of the kernel for every GPU.
    """

    general: Any

    def outputs(self) -> Mapping[str, jax.ShapeDtypeStruct | None]:
        return self.general.outputs()

    def grid(self, target: Target) -> tuple[int, ...]:
        return self.general.grid(target)


def _merge_leading(size: int, array: jax.Array, mapped: bool, batch: int) -> jax.Array:
    """Returns an operand of ``size`` calls with ``batch`` copies of its leading axis each."""
    rows, *shape = array.shape[1:] if mapped else array.shape
    array = array.reshape(size if mapped else 1, 1, rows, *shape)
    array = jnp.broadcast_to(array, (size, batch, rows, *shape))
    return array.reshape(size * batch * rows, *shape)
