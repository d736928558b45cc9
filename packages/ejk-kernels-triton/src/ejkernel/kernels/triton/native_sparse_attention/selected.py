"""The selected branch as one differentiable step: its launches and residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.native_sparse_attention.branches import (
    OTHERS,
    apply_gate,
    gate_of,
    gated_cotangents,
)
from ejkernel.kernels.triton.native_sparse_attention.dkv_kernel import SelectedDkv, SumPieces
from ejkernel.kernels.triton.native_sparse_attention.dq_kernel import DqFromDs, SelectedDq
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import SelectedForward
from ejkernel.kernels.triton.native_sparse_attention.launch import SelectedLaunch
from ejkernel.kernels.triton.native_sparse_attention.lists import last_tokens, transpose_lists
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.types.attention.softmax import name_output, name_residuals
from ejkernel.types.masks.token_blocks import TokenBlocks


class _Residuals:
    """Names of the residuals of the forward pass."""

    @staticmethod
    def name_residuals(outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        named = name_residuals(*saved)
        return (named[:1] if outputs[0] is saved[0] else (name_output(outputs[0]),)), named


class Selected:
    """Attention of every token over the blocks of its list, plus the other branches, all gated.

    ``arrays``: q, k, v, ``chosen [b, s, hk, slots]`` with -1 after all blocks, and ``places``, the
    ``TokenBlocks`` of the row; the existing ones of ``OTHERS``. A branch without a gate has 1.
    ``lse_cmp`` and ``lse_swa`` come with their branches: their cotangents are -delta, which
    ``Branch`` reads. All arrays but the lists have gradients.
    """

    call = _Residuals
    forward_again = False

    def without_gradients(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        if not any(name in arrays for name in OTHERS):
            return self.forward(work, arrays)
        launch = SelectedForward(work.problem, work.tiles.fwd, False)
        tensors = arrays | _packed_operands(arrays["places"])
        return (_launch_kernel(launch, tensors)["total"],), ()

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        launch = SelectedForward(work.problem, work.tiles.fwd, True)
        results = _launch_kernel(launch, arrays | _packed_operands(arrays["places"]))
        saved = tuple(results[name] for name in ("o", "base", "log_sum"))
        return (results.get("total", results["o"]),), saved

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        tensors = {name: arrays[name] for name in ("q", "k", "v", "chosen")}
        blocks: TokenBlocks = arrays["places"]
        o, base, log_sum = saved
        branches = {"o_slc": o} | {name: arrays[name] for name in OTHERS if name in arrays}
        gradients, dots = gated_cotangents(branches, cotangents[0])
        deltas = {name: apply_gate(branches, name, x) for name, x in dots.items()}
        delta = deltas.pop("o_slc")
        tensors |= {"do": gradients.pop("o_slc"), "base": base, "delta": delta}
        tensors["log_sum"] = log_sum
        gradients |= {name.replace("o_", "lse_", 1): -x for name, x in deltas.items()}
        gradients |= {gate_of(name): x for name, x in dots.items() if gate_of(name) in branches}
        tensors["places"], tensors["bounds"] = transpose_lists(arrays["chosen"], blocks)
        p, by_heads = work.problem, []
        for first in range(0, p.kv_heads, p.at_once):
            count = min(p.at_once, p.kv_heads - first)
            by_heads.append(_gradients(work, tensors, blocks, (count, first + count)))
            # the next heads use the memory of these
            *by_heads[-1], tensors["places"] = lax.optimization_barrier(
                (*by_heads[-1], tensors["places"])
            )
        parts = (jnp.concatenate(x, 2) for x in zip(*by_heads, strict=True))
        return gradients | dict(zip(("q", "k", "v"), parts, strict=True))


def _gradients(
    work: Work, tensors: Arrays, blocks: TokenBlocks, heads: tuple[int, int]
) -> list[jax.Array]:
    """Returns dq, dk and dv of some key heads: their number, and the end of their range."""
    p, t, packed = work.problem, work.tiles, _packed_operands(blocks)
    launch = SelectedDkv(p, t.dkv, *heads)
    pieces = _launch_kernel(launch, tensors | packed)
    ds = pieces.pop("ds", None)
    if ds is None:
        dq = _launch_kernel(SelectedDq(p, t.dq), tensors | packed)
    else:
        dq = _launch_kernel(DqFromDs(p, t.dq, *heads), tensors | packed | {"ds": ds})
    summed = _launch_kernel(SumPieces(p, t.dkv, *heads), tensors | packed | pieces)
    return [dq["dq"], summed["dk"], summed["dv"]]


def _launch_kernel(launch: SelectedLaunch, tensors: Arrays) -> dict[str, jax.Array]:
    """Launches a kernel on the operands that it declares."""
    return call(launch, **{name: x for name, x in tensors.items() if name in launch.batching})


def _packed_operands(blocks: TokenBlocks) -> dict[str, jax.Array]:
    """Returns the operands of rows that hold several sequences."""
    if not blocks.packed:
        return {}
    token = jnp.arange(blocks.position.shape[0], dtype=jnp.int32)
    return {
        "starts": (token - blocks.position)[None],
        "first_tokens": blocks.block_token[None],
        "last_tokens": last_tokens(blocks)[None],
    }


selected = Selected()


def attend(work: Work, arrays: Arrays) -> jax.Array:
    """Returns o ``[b, s, h, dv]`` in the dtype of q, k and v.

    ``arrays``: see ``Selected``; ``work``: of the full operation with the problem of this branch.
    """
    return differentiable(replace(work, kernel=selected), same_axes(arrays))[0]
