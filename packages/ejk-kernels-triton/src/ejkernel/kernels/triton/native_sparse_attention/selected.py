"""The selected branch as one differentiable step: its launches, and what is kept between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.native_sparse_attention.gates import gate_of, pull, under_gate
from ejkernel.kernels.triton.native_sparse_attention.lists import last_tokens, transposed
from ejkernel.kernels.triton.native_sparse_attention.plans import OTHERS, SelectedPlan
from ejkernel.kernels.triton.native_sparse_attention.tiles import Tiles
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.types.attention.softmax import name_output, name_residuals
from ejkernel.types.masks.token_blocks import Blocks


class _Residuals:
    """Names of what the forward pass keeps."""

    @staticmethod
    def name_residuals(outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        kept = name_residuals(*saved)
        return (kept[:1] if outputs[0] is saved[0] else (name_output(outputs[0]),)), kept


class Selected:
    """Attention of every token over the blocks of its list, and under their gates what the other
    branches found; all but the lists have gradients.

    ``arrays``: q, k, v, ``chosen [b, s, hk, slots]`` with -1 behind all blocks, and ``places``, the
    ``Blocks`` of the row; of ``OTHERS`` what is added. A branch without a gate has 1. Of what is
    added come ``lse_cmp`` and ``lse_swa`` too, whose cotangents are -delta, which ``Branch`` wants.
    """

    call = _Residuals
    forward_again = False

    def without_gradients(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        others = _others(arrays)
        if not others:
            return self.forward(work, arrays)
        return _launch(work, work.tiles.fwd, "total", arrays, arrays["places"], added=others), ()

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        others = _others(arrays)
        found = _launch(work, work.tiles.fwd, "forward", arrays, arrays["places"], added=others)
        return (found[3 if others else 0],), found[:3]

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        tensors = {name: arrays[name] for name in ("q", "k", "v", "chosen")}
        blocks: Blocks = arrays["places"]
        o, base, rest = saved
        branches = {"o_slc": o} | {name: arrays[name] for name in _others(arrays)}
        gradients, sums = pull(branches, cotangents[0])
        deltas = {name: under_gate(branches, name, x) for name, x in sums.items()}
        delta = deltas.pop("o_slc")
        tensors |= {"do": gradients.pop("o_slc"), "base": base, "rest": rest, "delta": delta}
        gradients |= {name.replace("o_", "lse_", 1): -x for name, x in deltas.items()}
        gradients |= {gate_of(name): x for name, x in sums.items() if gate_of(name) in branches}
        tensors["places"], tensors["bounds"] = transposed(arrays["chosen"], blocks)
        p, found = work.problem, []
        for first in range(0, p.kv_heads, p.at_once):
            some = min(p.at_once, p.kv_heads - first)
            found.append(_gradients(work, tensors, blocks, {"some": some, "last": first + some}))
            # the next heads use the memory of these
            *found[-1], tensors["places"] = lax.optimization_barrier(
                (*found[-1], tensors["places"])
            )
        parts = (jnp.concatenate(x, 2) for x in zip(*found, strict=True))
        return gradients | dict(zip(("q", "k", "v"), parts, strict=True))


def _others(arrays: Arrays) -> tuple[str, ...]:
    return tuple(name for name in OTHERS if name in arrays)


def _gradients(
    work: Work, tensors: Arrays, blocks: Blocks, heads: Mapping[str, int]
) -> list[jax.Array]:
    """dq, dk and dv of some key heads."""
    parts = _launch(work, work.tiles.dkv, "pieces", tensors, blocks, **heads)
    tensors = tensors | dict(zip(("dk_parts", "dv_parts", "ds"), parts, strict=False))
    if work.problem.keeps_ds:
        dq = _launch(work, work.tiles.dq, "dq of ds", tensors, blocks, **heads)
    else:
        dq = _launch(work, work.tiles.dq, "dq", tensors, blocks)
    return [*dq, *_launch(work, work.tiles.dkv, "sums", tensors, blocks, **heads)]


def _launch(
    work: Work, tiles: Tiles, kind: str, tensors: Arrays, blocks: Blocks, **more: Any
) -> tuple[jax.Array, ...]:
    plan = SelectedPlan(work.problem, tiles, kind, **more)
    if blocks.packed:
        token = jnp.arange(blocks.position.shape[0], dtype=jnp.int32)
        tensors = {
            **tensors,
            "starts": (token - blocks.position)[None],
            "first_tokens": blocks.block_token[None],
            "last_tokens": last_tokens(blocks)[None],
        }
    return call_plan(plan, *(tensors[name] for name in plan.names))


selected = Selected()


def attend(work: Work, arrays: Arrays) -> jax.Array:
    """o ``[b, s, h, dv]`` in the dtype of q, k and v.

    ``arrays`` as ``Selected`` wants them; ``work`` is that of the whole operation with the problem
    of this branch.
    """
    return differentiable(replace(work, kernel=selected), same_axes(arrays))[0]
