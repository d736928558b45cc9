"""Visible blocks of a mask_mod: every pair is evaluated, a chunk at a time, on the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.types.mods import INDICES, Mod, Program, apply_mod

CHUNK = 2**24
"""Pairs that ``block_states`` evaluates at a time."""


def block_states(
    mod: Mod, q_len: int, kv_len: int, *, batch: int, heads: int, block_size: int
) -> np.ndarray:
    """Returns ``Mod.blocks`` of a mask, every pair evaluated once.

    ``batch`` and ``heads`` become 1 where the mask does not depend on them. Pairs past the lengths
    do not count.
    """
    reads, size = mod.program.reads, block_size
    rows, columns = -(-q_len // size), -(-kv_len // size)
    sizes = (batch if "b" in reads else 1, heads if "h" in reads else 1)
    states = np.zeros((*sizes, rows, columns), np.int8)
    step = max(1, min(rows, CHUNK // max(1, size * columns * size)))

    def state(mod: Mod, b: Any, h: Any, first: Any) -> Any:
        q = first * size + jnp.arange(step * size, dtype=jnp.int32)
        k = jnp.arange(columns * size, dtype=jnp.int32)
        valid_q, valid_k = (q < q_len)[:, None], (k < kv_len)[None, :]
        batch_head = (jnp.asarray(x, jnp.int32)[None] for x in (b, h))
        last_q, last_k = np.int32(q_len - 1), np.int32(kv_len - 1)
        seen = apply_mod(mod, *batch_head, jnp.minimum(q, last_q), jnp.minimum(k, last_k))[0, 0]
        exists = valid_q & valid_k
        shape = (step, size, columns, size)
        any_seen = (seen & exists).reshape(shape).any((1, 3))
        all_seen = (seen | ~exists).reshape(shape).all((1, 3))
        return any_seen.astype(jnp.int8) + (any_seen & all_seen).astype(jnp.int8)

    with jax.ensure_compile_time_eval():
        compiled = jax.jit(state)
        for b, h, first in itertools.product(*map(range, sizes), range(0, rows, step)):
            part = np.asarray(compiled(mod, np.int32(b), np.int32(h), np.int32(first)))
            states[b, h, first : first + step] = part[: rows - first]
    return states


def dense_pairs(mod: Mod, sizes: Iterable[Any]) -> np.ndarray:
    """Returns every pair of a mask, bool of ``sizes`` (batch, heads, q_len, kv_len), #b, #h."""
    with jax.ensure_compile_time_eval():
        indices = (jnp.arange(n, dtype=jnp.int32) for n in sizes)
        return np.asarray(apply_mod(mod, *indices))


BLOCK = 64
"""Rows and keys of the blocks of a mask that are found while a call is traced: one small tile."""
LIMIT = 2**31
"""Most pairs that are evaluated while a call is traced; of more no block is skipped."""


@lru_cache(maxsize=64)
def _traced_states(program: Program, sizes: tuple[int, ...]) -> np.ndarray:
    q_len, kv_len, batch, heads = sizes
    mod, options = Mod(program, ()), {"batch": batch, "heads": heads, "block_size": BLOCK}
    return block_states(mod, q_len, kv_len, **options)


def known_block_size(mod: Mod | None, q_len: Any, kv_len: Any, *, batch: Any, heads: Any) -> int:
    """Returns the block size of ``known_blocks``, 0 where the blocks are not known."""
    if mod is None or mod.blocks is not None:
        return 0 if mod is None else mod.block_size
    sizes = (q_len, kv_len, batch, heads)
    if mod.arrays or not all(isinstance(n, int) for n in sizes) or 0 in sizes:
        return 0
    counts = [n for n, name in ((batch, "b"), (heads, "h")) if name in mod.program.reads]
    too_many = math.prod((q_len, kv_len, *counts)) > LIMIT
    moved = mod.shifted == len(INDICES) or (mod.shifted and counts)
    return 0 if too_many or moved else BLOCK


def with_known_blocks(mod: Mod, q_len: int, kv_len: int) -> Mod:
    """Returns a mask with the blocks that a function of queries and keys alone has, where known."""
    sizes = {"batch": 1, "heads": 1}
    if {"b", "h"} & mod.program.reads or not known_block_size(mod, q_len, kv_len, **sizes):
        return mod
    blocks = known_blocks(mod, q_len, kv_len, **sizes)
    return mod if blocks is None else Mod(mod.program, mod.arrays, mod.origin, *blocks)


def known_blocks(
    mod: Mod, q_len: Any, kv_len: Any, *, batch: Any, heads: Any
) -> tuple[Any, int] | None:
    """Returns the blocks of a mask for one call and their size, None where they are not known.

    They are the mod's own; a function that reads no array is evaluated while tracing.
    """
    if mod.blocks is not None:
        return mod.local_blocks(batch, heads), mod.block_size
    if not known_block_size(mod, q_len, kv_len, batch=batch, heads=heads):
        return None
    return _traced_states(mod.program, (q_len, kv_len, batch, heads)), BLOCK
