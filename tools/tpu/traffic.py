"""Bytes that a TPU kernel's pipeline moves, from its grid and the index maps of its blocks.

A block is copied when its index differs from that of the grid step before. Index maps read
tables in scalar memory, so the integers of a call are needed as values: the call is traced, and
what depends on integers alone is computed. Copies that a kernel starts by hand are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BODIES = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")  # parameters that hold a jaxpr to inline
MOST_STEPS = 2**21  # of a grid that is counted


@dataclass(frozen=True)
class Traffic:
    """Bytes of all blocks copied by a kernel, and of the arrays they are parts of.

    ``flops``: what the kernel tells XLA that it computes. ``block``: shape of its first block in
    vector memory.
    """

    moved: int
    least: int
    flops: int = 0
    block: tuple[int, ...] = ()

    @property
    def ratio(self) -> float:
        """Bytes moved over the least; 0 where the pipeline moves nothing."""
        return round(self.moved / self.least, 3) if self.least else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs for each of the least bytes."""
        return round(self.flops / self.least, 1) if self.least else 0.0


def count_traffic(
    function: Callable[..., Any], shapes: Sequence[Any], integers: Any, kernel: str
) -> Traffic | None:
    """Returns the traffic of the kernel with this name in ``function`` of arrays like ``shapes``.

    ``integers``: a tree like ``shapes`` of integer values, None for other arrays. None where no
    such kernel is called, or its tables do not follow from the integers.
    """
    traced = jax.make_jaxpr(function)(*shapes)
    values = jax.tree.leaves(integers, is_leaf=lambda x: x is None)
    calls: list[tuple[Any, list[Any]]] = []
    _evaluate(traced.jaxpr, traced.consts, values, calls)
    for equation, operands in calls:
        if equation.params["name"] == kernel:
            return _traffic(equation, operands)
    return None


def _evaluate(jaxpr: Any, consts: Any, arguments: Sequence[Any], calls: list[Any]) -> list[Any]:
    """Computes what is known of a jaxpr's results, None for others, and notes kernel calls."""
    environment: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    environment |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else environment.get(atom)

    for equation in jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        inner = next((equation.params[n] for n in BODIES if n in equation.params), None)
        name = equation.primitive.name
        if name == "pallas_call":
            calls.append((equation, operands))
            results = [None] * len(equation.outvars)
        elif all(x is not None for x in operands) and _is_small(equation):
            results = equation.primitive.bind(*operands, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        elif inner is not None and len(inner.jaxpr.invars) == len(operands) and name != "scan":
            results = _evaluate(inner.jaxpr, inner.consts, operands, calls)
        else:
            results = [None] * len(equation.outvars)
        environment |= dict(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _is_small(equation: Any) -> bool:
    return all(math.prod(x.aval.shape) <= 2**22 for x in equation.outvars)


def _traffic(equation: Any, operands: Sequence[Any]) -> Traffic | None:
    grid_mapping, variables = equation.params["grid_mapping"], equation.invars
    estimate = equation.params["cost_estimate"]
    dynamic = grid_mapping.num_dynamic_grid_bounds
    tables = operands[dynamic : dynamic + grid_mapping.num_index_operands]
    bounds = list(operands[:dynamic])
    if any(x is None for x in (*tables, *bounds)):
        return None
    grid = [n if isinstance(n, int) else int(bounds.pop(0)) for n in grid_mapping.grid]
    if math.prod(grid) > MOST_STEPS:
        return None
    points = [jnp.asarray(x, jnp.int32) for x in np.indices(grid).reshape(len(grid), -1)]
    moved, arrays, first = 0, {}, ()
    inputs = variables[dynamic + grid_mapping.num_index_operands :]
    for n, block in enumerate(grid_mapping.block_mappings):
        space = str(block.transformed_block_aval.memory_space).lower()
        if "any" in space or "smem" in space or "hbm" in space:
            continue
        array = block.array_aval
        first = first or tuple(n for n in block.transformed_block_aval.shape if n > 1)

        def start_of(*at: Any, block: Any = block) -> Any:
            return block.compute_start_indices_interpret(at, *tables)

        starts = np.stack([np.asarray(x) for x in jax.jit(jax.vmap(start_of))(*points)])
        copies = 1 + int(np.any(starts[:, 1:] != starts[:, :-1], axis=0).sum())
        moved += copies * math.prod(block.transformed_block_aval.shape) * array.dtype.itemsize
        # an array that several blocks read counts once
        name = inputs[n] if n < grid_mapping.num_inputs else n
        arrays[name] = math.prod(array.shape) * array.dtype.itemsize
    flops = 0 if estimate is None else int(estimate.flops)
    return Traffic(moved, sum(arrays.values()), flops, first)
