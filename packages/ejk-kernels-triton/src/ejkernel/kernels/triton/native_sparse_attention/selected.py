"""The selected branch as one differentiable step: its launches, and what is kept between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.native_sparse_attention.gates import add
from ejkernel.kernels.triton.native_sparse_attention.lists import last_tokens, transposed
from ejkernel.kernels.triton.native_sparse_attention.plans import OTHERS, SelectedPlan
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
    work: Work, tiles: Tiles, kind: str, tensors: Arrays, blocks: Blocks, *added: str
) -> tuple[jax.Array, ...]:
    plan = SelectedPlan(work.problem, tiles, kind, added)
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


def attend(work: Work, arrays: Arrays) -> jax.Array:
    """o ``[b, s, h, dv]`` in the dtype of q, k and v.

    ``arrays`` as ``Selected`` wants them; ``work`` is that of the whole operation with the problem
    of this branch.
    """
    work = Work(selected, work.problem, work.tiles, work.target, work.operation)
    return differentiable(work, same_axes(arrays))[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_and_add(work: Work, dtype: Any, arrays: Arrays, others: Arrays) -> jax.Array:
    """The sum of this branch and ``others`` under their gates, ``OTHERS`` that there are, in
    ``dtype``: in one launch where nothing has to be kept of it."""
    arrays, others = same_axes((arrays, others))
    added = tuple(name for name in OTHERS if name in others)
    tensors, blocks = {**arrays, **others}, arrays["places"]
    return _launch(work, work.tiles.fwd, "forward", tensors, blocks, *added)[0].astype(dtype)


def _apart(work: Work, dtype: Any, arrays: Arrays, others: Arrays) -> jax.Array:
    return add(work, {"o_slc": attend(work, arrays), **others}, dtype)


attend_and_add.defvjp(
    lambda work, dtype, *arrays: jax.vjp(partial(_apart, work, dtype), *arrays),
    lambda work, dtype, back, do: back(do),
)
