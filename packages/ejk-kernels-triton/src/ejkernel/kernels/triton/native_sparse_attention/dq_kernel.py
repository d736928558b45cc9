"""The selected branch, backward: the gradient of queries.

With p_tj = exp(x_tj - lse_t) and delta_t = do_t . o_t:

    ds_tj = p_tj (do_t . v_j - delta_t);    dq_t = scale * sum_j ds_tj k_j

Work split and bound as of the forward pass, with the same loop and three matmuls a tile: 7.6 ms.
Where there is memory for it, the kernel of key gradients stores ds: that leaves one matmul, and
half of the bytes from L2: 3.5 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    find_tile,
    load_group,
    load_list,
    load_step,
    load_visible,
    phase_range,
    probabilities,
    program_token,
)
from ejkernel.kernels.triton.native_sparse_attention.launch import SelectedLaunch, SomeHeadsLaunch
from ejkernel.kernels.triton.native_sparse_attention.tiles import columns_of


@triton.jit
def selected_dq(q, k, v, chosen, starts, do, base, log_sum, delta, dq, sizes):
    """Writes dq ``[b, s, h, d]``; base, log_sum and delta are ``[b, s, h]``."""
    t, key_row, start, entries, count, at, inside = load_list(chosen, starts, sizes)
    q_tile = load_group(q, at, inside, 0, sizes.D, sizes.COLUMNS)
    do_tile = load_group(do, at, inside, 0, sizes.DV, sizes.VALUE_COLUMNS)
    row_base = tl.load(base + at, mask=inside, other=0.0)[:, None]
    row_log_sum = tl.load(log_sum + at, mask=inside, other=float("inf"))[:, None]
    row_delta = tl.load(delta + at, mask=inside, other=0.0)[:, None]

    acc = tl.zeros([sizes.ROWS, sizes.COLUMNS], tl.float32)
    for phase in tl.static_range(sizes.PHASES):
        begin, end = phase_range(count, phase, sizes)
        for step in tl.range(begin, end):
            visible, k_tile, v_tile, s = load_step(
                q_tile, k, v, key_row, entries, step, start, t, phase, sizes
            )  # fmt: skip
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=sizes.PRECISION)
            p = probabilities(s, row_base, row_log_sum, sizes.slope)
            ds = p * (dp - row_delta)
            if phase == 0 or not sizes.EVEN:
                ds = tl.where(visible[None, :], ds, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=sizes.PRECISION)

    column = tl.arange(0, sizes.COLUMNS)
    stored = inside[:, None] & (column < sizes.D)[None, :]
    pointers = dq + at[:, None] * sizes.D + column[None, :]
    tl.store(pointers, (acc * sizes.scale).to(dq.dtype.element_ty), mask=stored)


@triton.jit
def dq_from_ds(k, chosen, starts, ds, dq, sizes):
    """Writes dq ``[b, s, head_count * GROUP, d]``.

    ``ds [b, head_count, s * SLOTS, size, GROUP]`` is from ``selected_dkv``.
    """
    t, key_row, start, entries, count, _, inside = load_list(chosen, starts, sizes)
    _, b, hk, split = program_token(tl.program_id(0), sizes.length, sizes.head_count, sizes.SPLITS)
    member = split * sizes.ROWS + tl.arange(0, sizes.ROWS)
    row = ((b * sizes.head_count + hk).to(tl.int64) * sizes.length + t) * sizes.SLOTS
    ds += row * (sizes.size * sizes.GROUP) + member[:, None]
    at = ((b.to(tl.int64) * sizes.length + t) * sizes.head_count + hk) * sizes.GROUP + member
    acc = tl.zeros([sizes.ROWS, sizes.COLUMNS], tl.float32)
    for phase in tl.static_range(sizes.PHASES):
        begin, end = phase_range(count, phase, sizes)
        for step in tl.range(begin, end):
            first, visible = find_tile(entries, step, start, t, phase, sizes)
            k_tile = load_visible(k, key_row, first, visible, sizes.D, sizes.COLUMNS, phase, sizes)
            key = step // sizes.PARTS * sizes.size + step % sizes.PARTS * sizes.KEYS
            key = key + tl.arange(0, sizes.KEYS)
            pointers = ds + key[None, :] * sizes.GROUP
            if phase == 1 and sizes.EVEN and sizes.GROUP == sizes.ROWS:
                ds_tile = tl.load(pointers)
            else:
                ds_tile = tl.load(pointers, mask=inside[:, None] & visible[None, :], other=0.0)
            acc = tl.dot(ds_tile, k_tile, acc)

    column = tl.arange(0, sizes.COLUMNS)
    stored = inside[:, None] & (column < sizes.D)[None, :]
    pointers = dq + at[:, None] * sizes.D + column[None, :]
    tl.store(pointers, (acc * sizes.scale).to(dq.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class SelectedDq(SelectedLaunch):
    """Launch of ``selected_dq``."""

    kernel = selected_dq
    batching: ClassVar = {
        **dict.fromkeys(("q", "k", "v", "chosen", "starts"), BATCHED),
        **dict.fromkeys(("do", "base", "log_sum", "delta"), BATCHED),
    }

    @property
    def phases(self) -> int:
        # two loops would spill where 64 rows of wide heads take all registers
        return 1 if self.tiles.heads == 64 and columns_of(self.problem) > 256 else 2

    def outputs(self):
        p = self.problem
        return {"dq": struct(p.dtype, p.batch, p.length, p.heads, p.dim)}

    def grid(self, target):
        return (self.problem.batch * self.problem.kv_heads * self.token_programs,)

    def arguments(self, target):
        return {"sizes": self.sizes(**self.score_sizes, scale=float(self.problem.scale))}


@dataclass(frozen=True)
class DqFromDs(SomeHeadsLaunch):
    """Launch of ``dq_from_ds``."""

    kernel = dq_from_ds
    batching: ClassVar = dict.fromkeys(("k", "chosen", "starts", "ds"), BATCHED)

    def outputs(self):
        p = self.problem
        return {"dq": struct(p.dtype, p.batch, p.length, self.head_count * p.group, p.dim)}

    def grid(self, target):
        return (self.problem.batch * self.head_count * self.token_programs,)

    def arguments(self, target):
        scale = float(self.problem.scale)
        return {"sizes": self.sizes(**self.score_sizes, **self.head_sizes, scale=scale)}
