"""Grouped matrix products in Triton as one kernel object; mapped axes become more groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bound_launch import BoundLaunch
from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.grouped_matmul import tiles as choice
from ejkernel.kernels.triton.grouped_matmul.tiles import MAX_LANES, Passes, Problem, Tiles
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.plan import Unmapped
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.execution.program_cache import PROGRAMS_LIMIT
from ejkernel.ops.in_turn import in_turn
from ejkernel.ops.second_order import not_differentiable
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class GroupedMatmul(TritonKernel):
    """Consecutive runs of rows, each times its own matrix, on a GPU.

    float16, bfloat16 and float32, summed in float32, and 8-bit matrices whose last axis is even; at
    most 4095 groups. Two runs give the same bits. Differentiable once. ``vmap`` is one launch over
    the groups of all calls, up to 4096; then the calls run one after the other. ``cfg``: block_m,
    block_n, block_k, num_warps, num_stages of the product and of the gradient of lhs; the gradient
    of rhs has its own.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision", "rhs_scale"}
    choose = staticmethod(choice.choose_all)

    def problem(self, a: Mapping[str, Any]) -> Problem:
        reason = choice.refusal(a)
        if reason is not None:
            raise self.call.Unsupported(reason)
        return choice.problem_of(a)

    def neighbours(self, problem: Problem, target: Target, chosen: Passes) -> Iterable[Passes]:
        return (replace(chosen, fwd=t) for t in choice.neighbours(problem, target))

    def operands(self, a: Mapping[str, Any], problem: Problem) -> Arrays:
        given = super().operands(a, problem)
        return not_differentiable(given, self.call.FORWARD_ONLY) if problem.stored else given

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p = work.problem
        lhs, rhs = arrays["lhs"].astype(p.dtype), arrays["rhs"]
        rhs = rhs if p.stored else rhs.astype(p.dtype)
        product = Product(p, work.tiles.fwd)
        added = arrays.get("existing_out"), _scale(arrays, p)
        return (product(lhs, rhs, *_rows(arrays), *added),), ()

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        p, passes, (dout,) = work.problem, work.tiles, cotangents
        found = {"existing_out": dout} if "existing_out" in arrays else {}
        if p.dtype == "float16" and p.out != "float16":
            # its range would cut gradients that the result had room for
            p = replace(p, dtype="float32", precision="tf32")
            passes = choice.choose_all(p, work.target)
        lhs, rhs, dout = (x.astype(p.dtype) for x in (arrays["lhs"], arrays["rhs"], dout))
        dlhs = Product(p.flipped(), passes.dlhs)(dout, rhs, *_rows(arrays), None, None)
        weights = Product(p, passes.drhs, weights=True, whole=passes.whole)
        drhs = weights(lhs, dout, *_rows(arrays))
        return found | {"lhs": dlhs, "rhs": drhs}


def _rows(arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """The sizes and the offset ``[1]``."""
    offset = arrays.get("group_offset")
    return arrays["group_sizes"], None if offset is None else offset.reshape(1)


def _scale(arrays: Arrays, p: Problem) -> jax.Array | None:
    """Of 8-bit matrices, ``[held, columns]`` in float32."""
    scale = arrays.get("rhs_scale")
    if scale is None:
        return None
    scale = scale[:, None] if scale.ndim == 1 else scale
    return jnp.broadcast_to(scale.astype(jnp.float32), (p.held, p.columns))


@dataclass(frozen=True)
class RowsPlan(Unmapped):
    """lhs, rhs, sizes, (offset), (existing), (scale) -> ``[batch * rows, columns]``."""

    problem: Problem
    tiles: Tiles
    offsets: int
    existing: bool
    scaled: bool = False

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        return (struct(p.out, p.batch * p.rows, p.columns),)

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.grouped_matmul import forward, stored

        given = self.problem, self.tiles, target, self.offsets, self.existing
        return stored.launch(*given, self.scaled) if self.problem.stored else forward.launch(*given)


@dataclass(frozen=True)
class WeightsPlan(RowsPlan):
    """lhs, dout, sizes, (offset) -> the gradients of the matrices of every call."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        shape = (p.columns, p.inner) if p.transposed else (p.inner, p.columns)
        return (struct(p.dtype, p.batch * p.held, *shape),)

    def launch(self, target: Target) -> BoundLaunch:
        from ejkernel.kernels.triton.grouped_matmul import weights

        return weights.launch(self.problem, self.tiles, target, self.offsets)


@dataclass(frozen=True)
class Product:
    """One of the two products with its launch; called with arrays, it knows mapped axes.

    ``weights``: lhs, dout, sizes, offset; else lhs, rhs, sizes, offset, existing, scale. ``whole``:
    see ``Passes``.
    """

    problem: Problem
    tiles: Tiles
    weights: bool = False
    whole: Callable[..., Any] | None = None

    def __call__(self, *arrays: Any) -> jax.Array:
        return _mapped(self)(*arrays)

    def run(self, *arrays: Any) -> jax.Array:
        if self.whole is not None:
            return self.whole(self.problem, *arrays)
        offset = arrays[3]
        added, scaled = (x is not None for x in arrays[4:] or (None, None))
        kind = WeightsPlan if self.weights else RowsPlan
        offsets = 0 if offset is None else offset.shape[0]
        plan = kind(self.problem, self.tiles, offsets, added, scaled)
        return call_plan(plan, *(x for x in arrays if x is not None))[0]


@functools.lru_cache(maxsize=PROGRAMS_LIMIT)
def _mapped(product: Product):
    """``Product.run`` with a batching rule: one launch over the groups of all calls."""
    run = custom_vmap(product.run)

    @run.def_vmap
    def rule(size, batched, *arrays):
        p = product.problem
        on = [any(jax.tree.leaves(b)) for b in batched]
        if size * p.batch * p.each > MAX_LANES:
            # more groups than a program can hold
            return in_turn(product, arrays, on), True
        a, b, sizes, offset, *rest = arrays
        if p.batch == 1:
            sizes = _with_rest(sizes, p.rows)
        # matrices and their scales go together
        shared = p.shared and not (on[1] or (on[-1] and rest) or product.weights)
        wide = [a, b, sizes, offset, *rest]
        for i, x in enumerate(wide):
            alone = (i in (1, 5) and shared) or (
                i == 3 and not on[3] and x is not None and len(x) == 1
            )
            if x is None or alone:
                continue
            inner = {1: p.held, 2: p.each, 3: 1, 5: p.held}.get(i, p.rows)
            if i == 1 and product.weights:
                inner = p.rows
            wide[i] = _merged(x, size, on[i], p.batch, inner)
        folded = replace(p, batch=size * p.batch, shared=shared)
        out = replace(product, problem=folded)(*wide)
        return out.reshape(size, out.shape[0] // size, *out.shape[1:]), True

    return run


def _merged(x: jax.Array, size: int, on: bool, batch: int, inner: int) -> jax.Array:
    """An operand for ``size`` times as many calls, ``inner`` leading entries each."""
    shape = x.shape[2:] if on else x.shape[1:]
    held = x.shape[1 if on else 0] // inner if inner else batch
    x = x.reshape(size if on else 1, held, inner, *shape)
    return jnp.broadcast_to(x, (size, batch, inner, *shape)).reshape(-1, *shape)


def _with_rest(sizes: jax.Array, rows: int) -> jax.Array:
    """Sizes ``[..., groups]`` clipped to the rows, with the rows they leave behind them."""
    sizes = jnp.clip(sizes, 0, rows)
    # clipped one by one, no sum can wrap around
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes, axis=-1)
    edge = jnp.zeros_like(ends[..., :1])
    return jnp.diff(jnp.concatenate([edge, ends, edge + rows], -1), axis=-1)


grouped_matmul = GroupedMatmul()
