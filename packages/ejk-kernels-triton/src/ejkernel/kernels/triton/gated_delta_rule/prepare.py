"""Terms of a chunk that do not depend on its values: triangular inverse, scores, factors.

With D_t the decay from the chunk start through token t and d(t, s) the decay from s to t,

    inverse = (I + [s before t: beta_t d(t, s) k_t k_s])^-1 diag(beta)                 [C, C]
    scores  = [s up to t: scale d(t, s) q_t k_s]                                       [C, C]
    factors = scale D_t, D_t, decay from t to the chunk end                            [3, C]

so that with S the state before the chunk, u = inverse (v - D k S) are the updates and
o = scale D q S + scores u the outputs. Where queries and keys are normalized, their lengths go into
the factors: matmuls take the operands as they came, and a key keeps its exact length.

Where time runs backwards the system is upper triangular: its transpose is inverted.

Work split: one chunk of one key head a program, in a loop over its value heads, which share both
matmuls over channels.

Bound: q and k are read, inverse and scores written: memory. 8192 tokens, 16 heads of keys and 32 of
values, 128 channels, chunks of 64 in bfloat16: 67 + 67 MB, 0.031 ms on an H200 (copies 4.3 TB/s).
The inverse is a chain of ten small matmuls: programs wait, so several of two warps share a
multiprocessor. Measured: 0.094 ms; before, with four warps, 0.126 for 0.107.
"""

from __future__ import annotations

from typing import ClassVar

from ejkernel.kernels.triton.gated_delta_rule.chunks import (
    FACTORS,
    ChunkLaunch,
    find_chunk,
    load_key_rows,
)
from ejkernel.kernels.triton.gated_delta_rule.gates import is_up_to, load_gates, pair_decays
from ejkernel.kernels.triton.gated_delta_rule.problem import NORM_EPSILON
from ejkernel.kernels.triton.gated_delta_rule.solve import invert
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.targets import Target

EPSILON = tl.constexpr(NORM_EPSILON)
SMALLEST_BETA = tl.constexpr(2.0**-30)


@triton.jit
def reciprocal_lengths(x):
    """Returns 1 / sqrt(sum of squares + epsilon) of every row, 1e3 for rows of zeros."""
    x = x.to(tl.float32)
    return reciprocal_root(tl.sum(x * x, 1) + EPSILON)


@triton.jit
def reciprocal_root(x):
    """Returns 1 / sqrt(x) with the error of one rounding.

    Every pair of tokens has the error of a key's length. Where keys repeat it adds up over a
    sequence, so the approximation of the hardware is not enough. One step of Newton's method has
    the bits if its residual 1 - x y^2 has them: x y comes as a rounded value and the remainder.
    """
    y = tl.rsqrt(x)
    product = x * y
    remainder = tl.fma(x, y, -product)
    residual = tl.fma(-product, y, 1.0) - remainder * y
    return tl.fma(0.5 * y, residual, y)


@triton.jit
def load_beta(beta, at, valid):
    """Loads beta in float32, 0 for tokens that are not ``valid``.

    A beta of 0 is taken as 2^-30: an update divided by beta is then the error of its value.
    """
    if beta is None:
        strength = valid.to(tl.float32)
    else:
        strength = tl.load(beta + at, mask=valid, other=0.0).to(tl.float32)
        small = valid & (tl.abs(strength) < SMALLEST_BETA)
        strength = tl.where(small, SMALLEST_BETA, strength)
    return strength


@triton.jit
def store_inverse(inverse, number, system, strength, sizes, PRECISION: tl.constexpr):
    """Stores the inverse of ``I + system``, in which a row's token comes after the column's, times
    the beta of the columns."""
    CHUNK: tl.constexpr = sizes.CHUNK
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    if sizes.REVERSED:
        system = tl.trans(system)
    solved = invert(system, CHUNK, PRECISION)
    square = inverse + number * (CHUNK * CHUNK)
    if sizes.REVERSED:
        solved = (solved * strength[:, None]).to(inverse.dtype.element_ty)
        tl.store(square + column * CHUNK + row, solved)
    else:
        solved = (solved * strength[None, :]).to(inverse.dtype.element_ty)
        tl.store(square + row * CHUNK + column, solved)


def inverse_precision(target: Target) -> str:
    """Returns the precision of the matmuls of an inverse."""
    return "tf32x3" if target.platform == "cuda" else "ieee"


@triton.jit
def prepare_chunks(
    query, key, gate, beta, cu, inverse, scores, factors, decays, sizes, scale,
    NORMALIZE: tl.constexpr, FACTORS: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes inverse, scores and factors of one chunk, for the value heads of a key head."""
    CHUNK: tl.constexpr = sizes.CHUNK
    program = tl.program_id(0)
    kv_head = program % sizes.kv_heads
    slot = (program // sizes.kv_heads).to(tl.int64)
    chunk = find_chunk(cu, slot, sizes)
    token = tl.arange(0, CHUNK)
    valid = token < chunk.tokens
    q = load_key_rows(query, chunk, kv_head, sizes)
    k = load_key_rows(key, chunk, kv_head, sizes)
    q_factor = tl.zeros([CHUNK], tl.float32) + scale
    k_factor = tl.zeros([CHUNK], tl.float32) + 1.0
    if NORMALIZE:
        q_factor = q_factor * reciprocal_lengths(q)
        k_factor = reciprocal_lengths(k)
    other = tl.trans(k.to(sizes.DTYPE))
    seen = tl.dot(q.to(sizes.DTYPE), other, input_precision=sizes.PRECISION)
    gram = tl.dot(k.to(sizes.DTYPE), other, input_precision=sizes.PRECISION)
    seen = seen * q_factor[:, None]
    if NORMALIZE:
        seen = seen * k_factor[None, :]
        gram = gram * k_factor[:, None] * k_factor[None, :]
    up_to = is_up_to(CHUNK, sizes.REVERSED)
    row = token[:, None]
    column = token[None, :]
    groups = sizes.heads // sizes.kv_heads
    for i in range(groups):
        head = kv_head * groups + i
        at = (chunk.base + token) * sizes.heads + head
        number = slot * sizes.heads + head
        strength = load_beta(beta, at, valid)
        since = valid.to(tl.float32)
        until = since
        decayed = tl.where(up_to, 1.0, 0.0)
        total = 1.0
        if gate is not None:
            high, low, since, until, total = load_gates(gate, at, valid, sizes.REVERSED)
            decayed = pair_decays(high, low, up_to)
        offset = factors + number * (FACTORS * CHUNK) + token
        tl.store(offset, q_factor * since)
        tl.store(offset + CHUNK, k_factor * since)
        tl.store(offset + 2 * CHUNK, k_factor * until)
        tl.store(decays + number, total)
        square = scores + number * (CHUNK * CHUNK) + row * CHUNK + column
        tl.store(square, (seen * decayed).to(scores.dtype.element_ty))
        # nothing is read on the diagonal and above
        system = strength[:, None] * (gram * decayed)
        store_inverse(inverse, number, system, strength, sizes, INVERSE_PRECISION)


class PrepareLaunch(ChunkLaunch):
    """Launch of ``prepare_chunks``.

    Results: inverse and scores ``[slots, heads, chunk, chunk]`` in the dtype of matmuls, factors
    ``[slots, heads, 3, chunk]`` and the decays of chunks ``[slots, heads]`` in float32.
    """

    kernel = prepare_chunks
    batching: ClassVar = dict.fromkeys(("query", "key", "gate", "beta", "cu"), BATCHED)

    def outputs(self):
        p, chunk = self.problem, self.tiles.chunk
        square = struct(p.compute_dtype, self.slots, p.heads, chunk, chunk)
        return {
            "inverse": square,
            "scores": square,
            "factors": struct("float32", self.slots, p.heads, FACTORS, chunk),
            "decays": struct("float32", self.slots, p.heads),
        }

    def grid(self, target):
        return (self.slots * self.problem.kv_heads,)

    def options(self, target):
        # the chain of small matmuls of an inverse has work for two warps; more wait for each other
        narrow = self.problem.compute_dtype == "bfloat16"
        return {"num_warps": 2 if target.hopper and narrow else 4, "num_stages": 1}

    def arguments(self, target):
        p = self.problem
        return self.row_tiles(target, "query", "key") | {
            "sizes": self.sizes(target),
            "scale": float(p.scale),
            "NORMALIZE": p.normalize,
            "FACTORS": FACTORS,
            "INVERSE_PRECISION": inverse_precision(target),
        }
