"""The selected branch as one differentiable step: its launches, and what is kept between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.native_sparse_attention.lists import last_tokens, transposed
from ejkernel.kernels.triton.native_sparse_attention.plans import SelectedPlan
from ejkernel.kernels.triton.native_sparse_attention.tiles import Tiles
from ejkernel.ops.differentiate import Arrays, Work, differentiable, same_axes
from ejkernel.types.softmax import named
from ejkernel.types.token_blocks import Blocks


class _Residuals:
    """Names of what the forward pass keeps."""

    @staticmethod
    def named(outputs: tuple[Any, ...], saved: Any) -> tuple[tuple[Any, ...], Any]:
        o, *rows = named(*outputs, *saved)
        return (o,), tuple(rows)


class Selected:
    """Attention of every token over the blocks of its list; q, k and v have gradients.

    ``arrays``: q, k, v, ``chosen [b, s, hk, slots]`` with -1 behind all blocks, and ``places``, the
    ``Blocks`` of the row.
    """

    call = _Residuals
    forward_again = False

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        tensors = {name: arrays[name] for name in ("q", "k", "v", "chosen")}
        o, *rows = _launch(work, work.tiles.fwd, "forward", tensors, arrays["places"])
        return (o,), tuple(rows)

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        tensors = {name: arrays[name] for name in ("q", "k", "v", "chosen")}
        blocks: Blocks = arrays["places"]
        (o,), (do,) = outputs, cotangents
        delta = jnp.einsum(
            "bshd,bshd->bsh", do, o, preferred_element_type=jnp.float32, precision="highest"
        )
        tensors |= {"do": do, "base": saved[0], "rest": saved[1], "delta": delta}
        (dq,) = _launch(work, work.tiles.dq, "dq", tensors, blocks)
        tensors["tokens"], tensors["bounds"] = transposed(arrays["chosen"], blocks)
        parts = _launch(work, work.tiles.dkv, "pieces", tensors, blocks)
        tensors |= zip(("dk_parts", "dv_parts"), parts, strict=True)
        dk, dv = _launch(work, work.tiles.dkv, "sums", tensors, blocks)
        return {"q": dq, "k": dk, "v": dv}


def _launch(
    work: Work, tiles: Tiles, kind: str, tensors: Arrays, blocks: Blocks
) -> tuple[jax.Array, ...]:
    plan = SelectedPlan(work.problem, tiles, kind)
    if blocks.packed:
        token = jnp.arange(blocks.position.shape[0], dtype=jnp.int32)
        tensors = {
            **tensors,
            "starts": (token - blocks.position)[None],
            "first_tokens": blocks.block_token[None],
            "last_tokens": last_tokens(blocks)[None],
        }
    return call(plan, *(tensors[name] for name in plan.names))


selected = Selected()


def attend(work: Work, q: Any, k: Any, v: Any, chosen: Any, blocks: Blocks) -> jax.Array:
    """o ``[b, s, h, dv]`` in the dtype of q, k and v; ``work`` is that of the whole operation with
    the problem of this branch."""
    work = Work(selected, work.problem, work.tiles, work.target, work.operation)
    arrays = {"q": q, "k": k, "v": v, "chosen": chosen, "places": blocks}
    return differentiable(work, same_axes(arrays))[0]
