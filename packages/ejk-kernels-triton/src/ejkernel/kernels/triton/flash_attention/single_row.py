"""Calls with one query row a sequence: contiguous decoding by the kernels of paged decoding.

A program of the forward kernel has one query head and iterates over all its keys: with one row a
head there are too few programs to fill the GPU, and the heads of a group read the same keys again.
Paged decoding makes the heads of a group rows of one matmul and splits the keys evenly; each
sequence is one page. The keys that the row sees follow from the mask's band.

Decoding saves no residuals: the backward pass runs the usual forward kernel first.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.serving import decode_tiles
from ejkernel.kernels.triton.serving.decode_tiles import DecodeTiles
from ejkernel.kernels.triton.serving.implementation import page_attention
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.stages import run_stages
from ejkernel.types.attention.problem import Problem
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.operands import in_order
from ejkernel.types.serving.problem import PagedProblem

LEAST_KEYS = 1024  # with fewer keys the second launch costs more than it saves


def can_decode(problem: Problem) -> bool:
    """Returns whether decoding supports the call and can be faster."""
    p = problem
    plain = not (p.biased or p.dropout or p.rules.arrays or p.rules.chunk or p.pattern_blocks)
    plain = plain and p.score_mod is None and p.mask_mod is None
    plain = plain and not p.is_eight_bit and p.out_dtype is None
    exact = p.dtype != "float32" or p.precision == "tf32"
    return p.q_len == 1 and p.kv_len >= LEAST_KEYS and plain and exact


def decode_problem(problem: Problem) -> PagedProblem:
    """Returns the paged problem of the call: one page a sequence."""
    p = problem
    return PagedProblem(
        batch=p.batch,
        heads=p.heads,
        kv_heads=p.kv_heads,
        dim=p.dim,
        value_dim=p.value_dim,
        pages=p.batch,
        page_size=p.kv_len,
        max_pages=1,
        query_dtype=p.dtype,
        key_dtype=p.dtype,
        value_dtype=p.dtype,
        scale=p.scale,
        soft_cap=p.soft_cap,
        layout=KVLayout.separate(p.kv_heads, p.dim, p.value_dim),
        return_lse=True,
    )


def choose(problem: Problem, target: Target) -> DecodeTiles | None:
    """Returns the tiles of decoding, None where it does not support the call."""
    return decode_tiles.choose(decode_problem(problem), target) if can_decode(problem) else None


def fix_order(tiles: DecodeTiles) -> DecodeTiles:
    """Returns tiles of decoding with splits that the batch does not decide."""
    return page_attention.fix_order(tiles)


def neighbours(problem: Problem, target: Target, chosen: DecodeTiles) -> list[DecodeTiles]:
    """Returns tiles of decoding that are worth timing."""
    candidates = decode_tiles.neighbours(decode_problem(problem), target, chosen)
    return [replace(tiles, pages=None) for tiles in candidates]


def forward(work: Work, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Returns o ``[b, 1, h, dv]`` and lse ``[b, h, 1]``."""
    p, band = work.problem, work.problem.rules.band
    first = 0 if band.lo is None else min(max(band.lo, 0), p.kv_len)
    end = p.kv_len if band.hi is None else min(max(band.hi + 1, 0), p.kv_len)
    operands = {
        "q": arrays["q"][:, 0],
        "k": arrays["k"],
        "v": arrays["v"],
        "lens": jnp.full(p.batch, end, jnp.int32),
        "tables": jnp.arange(p.batch, dtype=jnp.int32)[:, None],
        "begins": jnp.full(p.batch, first, jnp.int32) if first else None,
        "sink": arrays["sink"][:, :, None] if "sink" in arrays else None,
    }
    step = replace(work, kernel=page_attention, problem=decode_problem(p), tiles=work.tiles.decode)
    o, lse = run_stages(step, in_order(operands))
    return o[:, None], lse[:, :, None]
