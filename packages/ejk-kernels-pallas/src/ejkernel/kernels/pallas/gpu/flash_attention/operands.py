"""The arrays of both passes: masks by blocks, and a ``vmap`` axis as more batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.types import MaskInfo
from ejkernel.types.problem import Problem
from ejkernel.types.structure import block_ranges, operands, split_mask

HIDDEN = {"q_ids": -1, "kv_ids": -2}  # ids of padding: never equal


def _segment_ids(mask: MaskInfo, p: Problem) -> dict[str, jax.Array]:
    """int32 ids ``[#b, len]`` of which only those of pairs that may see each other are equal."""
    _, arrays = split_mask(mask)
    ids = operands(mask, arrays, p.q_len, p.kv_len)
    return {name: jnp.where(ids[name] < 0, hidden, ids[name]) for name, hidden in HIDDEN.items()}


def _to_blocks(x: jax.Array, block: int, fill: int) -> jax.Array:
    missing = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, missing)], constant_values=fill)


def folding(problem: Problem, run: Callable, tensors: dict[str, jax.Array]) -> tuple:
    """``run(problem, tensors)``; under ``vmap`` the mapped axis joins the batch axis.

    Every tensor and result has a leading batch axis; one of size 1 is shared by all rows.
    """
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
        larger = replace(problem, batch=size * problem.batch)
        out = folding(larger, run, folded)
        split = lambda y: y.reshape(size, problem.batch, *y.shape[1:])  # noqa: E731
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    return call(*tensors.values())


def shared(tensors: dict[str, jax.Array]) -> frozenset[str]:
    names = {name for name, x in tensors.items() if x.shape[0] == 1}
    if "ranges" in tensors and tensors["ranges"].shape[1] == 1:
        names.add("ranges_head")
    return frozenset(names)


def masks(mask: MaskInfo, p: Problem, tiles: Any, *, backward: bool) -> dict[str, jax.Array]:
    """What a kernel reads of a mask with arrays: ranges of blocks to visit, and segment ids.

    Forward, ids are padded to whole blocks.
    """
    if not p.rules.arrays:
        return {}
    ranges = block_ranges(
        mask, p.q_len, p.kv_len, tiles.block_q, tiles.block_kv, transposed=backward
    )
    ids = _segment_ids(mask, p)
    if not backward:
        blocks = {"q_ids": tiles.block_q, "kv_ids": tiles.block_kv}
        ids = {name: _to_blocks(x, blocks[name], HIDDEN[name]) for name, x in ids.items()}
    return {"ranges": ranges, **ids}
