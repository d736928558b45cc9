"""The arrays of both passes: masks by blocks, and a ``vmap`` axis as more batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import OF_QUERIES, BackwardTiles
from ejkernel.kernels.pallas.gpu.flash_attention.lists import backward_lists, forward_lists
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ForwardTiles
from ejkernel.ops.varying import vary, varying_axes
from ejkernel.types import MaskInfo
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.structure import block_ranges, operands, split_mask

HIDDEN = {"q_ids": -1, "kv_ids": -2}  # ids of padding: never equal


def _segment_ids(mask: MaskInfo, p: Problem) -> dict[str, jax.Array]:
    """int32 ids ``[#b, len]`` that are equal only for pairs that may see each other."""
    if "q_ids" not in p.rules.names:
        return {}
    _, arrays = split_mask(mask)
    ids = operands(mask, arrays, p.q_len, p.kv_len)
    return {name: jnp.where(ids[name] < 0, hidden, ids[name]) for name, hidden in HIDDEN.items()}


def folding(problem: Problem, run: Callable, tensors: dict[str, jax.Array]) -> tuple:
    """``run(problem, tensors)``; under ``vmap`` the mapped axis joins the batch axis.

    Every tensor and result has a leading batch axis; one of size 1 is shared by all rows. Inside a
    shard_map the results vary over the axes over which q does.
    """
    return vary(_folded(problem, run, tensors), varying_axes(tensors["q"]))


def _folded(problem: Problem, run: Callable, tensors: dict[str, jax.Array]) -> tuple:
    """Runs ``run``; mapped and single calls have results that vary alike, as branches need."""
    names = tuple(tensors)

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        with jax.enable_x64(False):  # the kernels count in int32
            return run(problem, dict(zip(names, arrays, strict=True)))

    @call.def_vmap
    def rule(size, mapped, *arrays):
        folded = {}
        for name, x, is_mapped in zip(names, arrays, mapped, strict=True):
            if not is_mapped and x.shape[0] == 1 and problem.batch > 1:
                folded[name] = x
                continue
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            if x.shape[1] != problem.batch:
                x = jnp.broadcast_to(x, (size, problem.batch, *x.shape[2:]))
            folded[name] = x.reshape(size * problem.batch, *x.shape[2:])
        out = _folded(problem.folded(size), run, folded)
        split = lambda y: y.reshape(size, problem.batch, *y.shape[1:])  # noqa: E731
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    return call(*tensors.values())


def forward_masks(
    mask: MaskInfo, pattern: jax.Array | None, p: Problem, tiles: ForwardTiles
) -> dict[str, Any]:
    """Returns the operands of the forward kernel for a mask with arrays or a pattern.

    Ranges or lists of blocks to visit, and segment ids padded to full blocks; ids of keys cover
    the block past the end too where there are lists.
    """
    blocks = (tiles.block_q, tiles.block_kv)
    if pattern is not None:
        arrays = forward_lists(p, mask, pattern, blocks)
    elif p.rules.arrays:
        arrays = {"ranges": block_ranges(mask, p.q_len, p.kv_len, *blocks, transposed=False)}
    else:
        return {}
    block_past_end = tiles.block_kv if pattern is not None else 0
    for (name, x), block in zip(_segment_ids(mask, p).items(), blocks, strict=False):
        past = block_past_end if name == "kv_ids" else 0
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % block + past)], constant_values=HIDDEN[name])
        arrays[name] = x
    return arrays


def backward_masks(
    mask: MaskInfo, pattern: jax.Array | None, p: Problem, tiles: BackwardTiles
) -> dict[str, Any]:
    """Returns the operands of the backward kernels for a mask: as forward, not padded.

    A pattern has two sets of lists: ``by_key_``, of dk and dv, and ``by_query_``, of dq.
    """
    blocks = (tiles.block_q, tiles.block_kv)
    if pattern is not None:
        sides = {
            "by_key": backward_lists(p, mask, pattern, blocks),
            "by_query": forward_lists(p, mask, pattern, (OF_QUERIES.block_q, OF_QUERIES.block_kv)),
        }
        arrays = {f"{by}_{name}": x for by, made in sides.items() for name, x in made.items()}
        return arrays | _segment_ids(mask, p)
    if not p.rules.arrays:
        return {}
    ranges = block_ranges(mask, p.q_len, p.kv_len, *blocks, transposed=True)
    return {"ranges": ranges} | _segment_ids(mask, p)
