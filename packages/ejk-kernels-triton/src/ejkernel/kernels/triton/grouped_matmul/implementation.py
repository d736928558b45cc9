"""Grouped matmul in Triton as one kernel object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.grouped_matmul import tiles
from ejkernel.kernels.triton.grouped_matmul.launch import GroupedLaunch
from ejkernel.kernels.triton.grouped_matmul.tiles import Passes, Problem
from ejkernel.kernels.triton.kernel import TritonKernel
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.execution.program_cache import PROGRAMS_LIMIT
from ejkernel.ops.in_turn import in_turn
from ejkernel.ops.second_order import not_differentiable
from ejkernel.types import calls
from ejkernel.types.calls import arguments


class GroupedMatmul(TritonKernel):
    """Contiguous groups of rows, each times its own matrix, on a GPU.

    float16, bfloat16 and float32, accumulated in float32, and 8-bit matrices whose last axis is
    even; at most 4095 groups. Two calls give the same bits. Differentiable once. ``vmap`` is one
    launch over the groups of all calls, up to 4096; then the calls run one after the other.
    ``cfg``: block_m, block_n, block_k, num_warps, num_stages of the forward pass and of the
    gradient of lhs; the gradient of rhs has its own.
    """

    call = calls.GroupedMatmul
    reads = arguments.GROUPED_PRODUCT | {"preferred_element_type", "precision", "rhs_scale"}
    choose = staticmethod(tiles.choose_all)

    def problem(self, a: Mapping[str, Any]) -> Problem:
        reason = tiles.unsupported_reason(a)
        if reason is not None:
            raise self.call.Unsupported(reason)
        return tiles.problem_of(a)

    def neighbours(self, problem: Problem, target: Target, chosen: Passes) -> Iterable[Passes]:
        return (replace(chosen, fwd=t) for t in tiles.neighbours(problem, target))

    def operands(self, a: Mapping[str, Any], problem: Problem) -> Arrays:
        arrays = super().operands(a, problem)
        return not_differentiable(arrays, self.call.FORWARD_ONLY) if problem.stored else arrays

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        from ejkernel.kernels.triton.grouped_matmul.forward import GroupedForward
        from ejkernel.kernels.triton.grouped_matmul.forward_8bit import GroupedForward8Bit

        p, lhs, rhs = work.problem, arrays["lhs"], arrays["rhs"]
        operands = _group_operands(arrays) | {"existing": arrays.get("existing_out")}
        operands["lhs"] = lhs.astype(p.dtype)
        if p.stored:
            launch = GroupedForward8Bit(p, work.tiles.fwd)
            out = call(launch, rhs=rhs, scale=_column_scale(arrays, p), **operands)
        else:
            launch = GroupedForward(p, work.tiles.fwd)
            out = call(launch, rhs=rhs.astype(p.dtype), **operands)
        return (out["out"],), ()

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        from ejkernel.kernels.triton.grouped_matmul.backward_rhs import GroupedDrhs
        from ejkernel.kernels.triton.grouped_matmul.forward import GroupedForward

        p, passes, (dout,) = work.problem, work.tiles, cotangents
        grads = {"existing_out": dout} if "existing_out" in arrays else {}
        if p.dtype == "float16" and p.out != "float16":
            # the range of float16 would clip gradients that the result's dtype can hold
            p = replace(p, dtype="float32", precision="tf32")
            passes = tiles.choose_all(p, work.target)
        lhs, rhs, dout = (x.astype(p.dtype) for x in (arrays["lhs"], arrays["rhs"], dout))
        groups = _group_operands(arrays)
        dlhs = call(GroupedForward(p.flipped(), passes.dlhs), lhs=dout, rhs=rhs, **groups)
        drhs = GroupedDrhs(p, passes.drhs)
        operands = {"lhs": lhs, "dout": dout, **groups}
        if passes.whole is None:
            grads["rhs"] = call(drhs, **operands)["out"]
        else:
            operands = {name: x for name, x in operands.items() if x is not None}
            kernel = _other_kernel(passes.whole, drhs.with_operands(operands))
            grads["rhs"] = kernel(*operands.values())
        return grads | {"lhs": dlhs["out"]}


def _group_operands(arrays: Arrays) -> dict[str, jax.Array | None]:
    """Returns the group sizes and the offset ``[1]``."""
    offset = arrays.get("group_offset")
    offset = None if offset is None else offset.reshape(1)
    return {"group_sizes": arrays["group_sizes"], "offset": offset}


def _column_scale(arrays: Arrays, p: Problem) -> jax.Array | None:
    """Returns the scale of 8-bit matrices, ``[held, columns]`` in float32."""
    scale = arrays.get("rhs_scale")
    if scale is None:
        return None
    scale = scale[:, None] if scale.ndim == 1 else scale
    return jnp.broadcast_to(scale.astype(jnp.float32), (p.held, p.columns))


@functools.lru_cache(maxsize=PROGRAMS_LIMIT)
def _other_kernel(kernel: Callable[..., Any], launch: GroupedLaunch) -> Callable[..., jax.Array]:
    """Returns another backend's kernel in the place of ``launch``, with the launch's ``vmap``."""

    def run(*arrays: Any) -> jax.Array:
        operands = dict(zip(launch.names, arrays, strict=True))
        names = ("lhs", "dout", "group_sizes", "offset")
        return kernel(launch.problem, *map(operands.get, names))

    mapped = custom_vmap(run)

    @mapped.def_vmap
    def rule(size: int, is_batched: Any, *arrays: Any) -> tuple[Any, bool]:
        flags = [any(jax.tree.leaves(flag)) for flag in is_batched]
        if launch.is_sequential(size, flags):
            return in_turn(mapped, arrays, flags), True
        folded, operands = launch.fold(size, arrays, flags)
        out = _other_kernel(kernel, folded)(*operands)
        return out.reshape(size, out.shape[0] // size, *out.shape[1:]), True

    return mapped


grouped_matmul = GroupedMatmul()
