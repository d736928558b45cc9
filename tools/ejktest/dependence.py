"""Dependences of the traced program of a call: its options, and the arrays that it reads."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive

from ejktest.programs import equations_of

# where a function or object lies in memory, and estimates that no kernel computes with
_IRRELEVANT = re.compile(r" at 0x[0-9a-fA-F]+|^.*\bcost_estimate=.*$", re.MULTILINE)

_launch = Primitive("launch")
_launch.multiple_results = True


@_launch.def_abstract_eval
def _results(*avals: Any, text: str, read: tuple[int, ...], results: tuple[Any, ...]) -> list[Any]:
    return [ShapedArray(x.shape, x.dtype) for x in results]


@dataclass(frozen=True)
class Program:
    """A traced call.

    Attributes:
        closed: the program.
        read: names of the arrays that a result depends on.
    """

    closed: Any
    read: frozenset[str]

    @cached_property
    def text(self) -> str:
        """Every operation and constant of the program; takes longer to print than to trace."""
        return _IRRELEVANT.sub("", f"{self.closed}\n{list(_constants(self.closed))}")


def is_array(x: Any) -> bool:
    """Returns whether a traced function takes ``x`` as an array, which may be abstract."""
    return isinstance(x, (jax.Array, jax.ShapeDtypeStruct))


def trace(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Program:
    """Returns the program of ``function`` called with ``arguments``; arrays may be abstract."""
    arrays = {name: arguments[name] for name in sorted(arguments) if is_array(arguments[name])}
    options = {name: x for name, x in arguments.items() if name not in arrays}
    closed = jax.make_jaxpr(lambda arrays: function(**arrays, **options))(arrays)
    flags = _read(closed.jaxpr)[len(closed.jaxpr.invars) - len(arrays) :]
    return Program(closed, frozenset(n for n, read in zip(arrays, flags, strict=True) if read))


def _constants(closed: Any) -> Iterator[Any]:
    """Yields the values of all arrays in a program, which its text shows as shapes alone."""
    yield from (np.asarray(x).tolist() for x in closed.consts)
    for equation in equations_of(closed.jaxpr):
        literals = (v.val for v in equation.invars if isinstance(v, Literal))
        inner = (x for x in jax.tree.leaves(equation.params) if hasattr(x, "consts"))
        arrays = itertools.chain(literals, *(x.consts for x in inner))
        yield from (np.asarray(x).tolist() for x in arrays if hasattr(x, "dtype"))


def _read(jaxpr: Any) -> list[bool]:
    """Returns for each input whether an output or an effect depends on it."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not live.isdisjoint(equation.outvars):
            flags = _read_by(equation)
            inputs = zip(equation.invars, flags, strict=True)
            live |= {v for v, read in inputs if read and not isinstance(v, Literal)}
    return [v in live for v in jaxpr.invars]


def _read_by(equation: Any) -> list[bool]:
    count = len(equation.invars)
    if equation.primitive is _launch:
        return [i in equation.params["read"] for i in range(count)]
    for inner in equation.params.values():
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns") and len(inner.invars) == count:
            return _read(inner)
    return [True] * count


@contextlib.contextmanager
def shown_launches(*, triton: bool = True) -> Generator[None]:
    """Within the block, traced programs show what Triton's kernels and cuDNN are given.

    Without it they show what a call asks for, which the launches may ignore.

    Args:
        triton: whether to show the options of Triton's launches, or only which arrays they read.
            Of a kernel that leaves a part of its work to Triton, the rest has to read them too.
    """
    patches = [mock.patch.object(jax.nn, "dot_product_attention", _library_attention)]
    with contextlib.suppress(ImportError):
        from ejkernel.kernels.triton import bridge

        patches.append(mock.patch.object(bridge, "_primitive", _TritonLaunch(triton)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def _library_attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    results = (jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),)
    return _launch.bind(q, k, v, text=str(options), read=(0, 1, 2), results=results)[0]


@dataclass(frozen=True)
class _TritonLaunch:
    """Stands in for the primitive of ``bridge``."""

    shown: bool

    def bind(self, *arrays: Any, launch: Any) -> list[Any]:
        from ejkernel.kernels.triton.bound_launch import input_order
        from ejkernel.kernels.triton.targets import current_target

        bound, results = launch.bind(current_target()), launch.result_types()
        parts = (
            bound.kernel.__name__, bound.arguments, bound.constants, bound.grid, bound.options,
            bound.aliases,
        )  # fmt: skip
        read = tuple(sorted(set(input_order(bound, len(results)))))
        text = str(parts) if self.shown else ""
        return _launch.bind(*arrays, text=text, read=read, results=results)
