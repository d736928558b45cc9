"""The selected branch, backward: the gradients of keys and values.

With p and ds as in ``dq_kernel``, per key head and key j, summed over the query heads that share it
and the tokens t whose list has its block:

    dv_j = sum_t p_tj do_t;    dk_j = scale * sum_t ds_tj q_t

Work split: XLA sorts the lists by block (``lists.transpose_lists``). One program per piece of a
block's list (``common.sequences``: blocks as sequences, entries as rows), for a tile of its keys. A
step takes a few tokens with all query heads of the group, on transposed tiles [keys, rows]. Lists
differ in length, pieces do not, however many tokens select a block. A second kernel adds the pieces
of every block in order: no atomics, the same bits every time.

Bound: 8 * tokens * slots * size * d FLOPs per query head, and q and do of a token once per entry of
its list. At T 32k, 64:4 heads, D128, 16 blocks of 64: 2.2 TFLOP, 17 GB: arithmetic. Takes
4.5 ms on an H200, 6.0 where it stores ds (4.3 GB), adding the pieces 0.1 ms, sorting the lists 0.3
at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.common.sequences import find_piece, pieces_of
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, power_of_two, struct
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import (
    load_group,
    load_head,
    probabilities,
)
from ejkernel.kernels.triton.native_sparse_attention.launch import SomeHeadsLaunch


@triton.jit
def _store_rows(target, rows, x, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the first D columns of x into rows of ``target [., D]``."""
    column = tl.arange(0, COLUMNS)
    tl.store(target + rows[:, None] * D + column[None, :], x, mask=(column < D)[None, :])


@triton.jit
def selected_dkv(
    q, k, v, places, bounds, first_tokens, do, base, log_sum, delta, dk_pieces, dv_pieces, ds, sizes
):
    """Writes dk and dv of pieces, float32 ``[b * head_count, pieces, PARTS * KEYS, .]``.

    Pieces without entries are not written. ``places [b, hk, entries]`` by block, ``bounds
    [b, hk, blocks + 1]`` into them, ``first_tokens [b, blocks]`` None = one sequence. ``ds
    [b, head_count, s * SLOTS, size, GROUP]``: stored for ``dq_from_ds``, or None.
    """
    part = tl.program_id(0) % sizes.PARTS
    piece = tl.program_id(0) // sizes.PARTS % sizes.pieces
    bh = tl.program_id(0) // sizes.PARTS // sizes.pieces
    b = bh // sizes.head_count
    hk = bh % sizes.head_count + sizes.head_end - sizes.head_count
    bounds += (b * sizes.kv_heads + hk).to(tl.int64) * (sizes.blocks + 1)
    places += (b * sizes.kv_heads + hk).to(tl.int64) * sizes.entries
    block, begin, end, tile = find_piece(
        bounds, sizes.blocks, sizes.entries, piece, sizes.LENGTH, sizes.LANES
    )
    begin = tl.maximum(begin, tile)
    # entries after the last block select nothing
    end = tl.where(block < sizes.blocks, tl.minimum(end, tile + sizes.LENGTH), begin)
    if begin < end:
        first = block * sizes.size
        if first_tokens is not None:
            first = tl.load(first_tokens + b * sizes.blocks + block)
        first += part * sizes.KEYS
        within = tl.arange(0, sizes.KEYS)
        j = first + within
        inside = (part * sizes.KEYS + within < sizes.size) & (j < sizes.length)
        row = b.to(tl.int64) * sizes.length
        key_row = row * sizes.kv_heads + hk
        k_tile = load_head(k, key_row, first, inside, sizes.kv_heads, sizes.D, sizes.COLUMNS)
        v_tile = load_head(v, key_row, first, inside, sizes.kv_heads, sizes.DV, sizes.VALUE_COLUMNS)
        dk = tl.zeros([sizes.KEYS, sizes.COLUMNS], tl.float32)
        dv = tl.zeros([sizes.KEYS, sizes.VALUE_COLUMNS], tl.float32)
        tile_row = tl.arange(0, sizes.TOKENS * sizes.MEMBERS)
        if ds is not None:
            ds_keys = ds + bh.to(tl.int64) * sizes.length * sizes.SLOTS * sizes.size * sizes.GROUP
            ds_keys += (part * sizes.KEYS + within[:, None]) * sizes.GROUP
        for at in tl.range(begin * sizes.SPLITS, end * sizes.SPLITS, sizes.TOKENS):
            step = at + tile_row // sizes.MEMBERS  # SPLITS steps an entry, of MEMBERS heads each
            entry = step // sizes.SPLITS
            member = step % sizes.SPLITS * sizes.MEMBERS + tile_row % sizes.MEMBERS
            valid = (member < sizes.GROUP) & (entry < end)
            entry_position = tl.load(places + entry, mask=valid, other=0)
            t = (entry_position.to(tl.uint32) // sizes.SLOTS).to(tl.int32)  # a shift
            if ds is not None:
                ds_row = entry_position.to(tl.int64) * (sizes.size * sizes.GROUP) + member
            member += hk * sizes.GROUP
            head = (row + t) * sizes.heads
            q_tile = load_group(q, head, valid, member, sizes.D, sizes.COLUMNS)
            s = tl.dot(k_tile, tl.trans(q_tile), input_precision=sizes.PRECISION)
            if sizes.sign is not None:
                s = s * sizes.sign
            do_tile = load_group(do, head, valid, member, sizes.DV, sizes.VALUE_COLUMNS)
            row_base = tl.load(base + head + member, mask=valid, other=0.0)
            row_log_sum = tl.load(log_sum + head + member, mask=valid, other=float("inf"))
            row_delta = tl.load(delta + head + member, mask=valid, other=0.0)
            dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=sizes.PRECISION)
            visible = j[:, None] <= t[None, :]
            p = probabilities(s, row_base[None, :], row_log_sum[None, :], sizes.slope)
            p = tl.where(visible, p, 0.0)
            dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=sizes.PRECISION)
            ds_tile = (p * (dp - row_delta[None, :])).to(q_tile.dtype)
            dk = tl.dot(ds_tile, q_tile, dk, input_precision=sizes.PRECISION)
            if ds is not None:
                stored = valid[None, :] if sizes.EVEN else valid[None, :] & inside[:, None]
                tl.store(ds_keys + ds_row[None, :], ds_tile, mask=stored)

        out = (bh.to(tl.int64) * sizes.pieces + piece) * (sizes.PARTS * sizes.KEYS)
        out = out + part * sizes.KEYS + within
        _store_rows(dk_pieces, out, dk * sizes.scale, sizes.D, sizes.COLUMNS)
        _store_rows(dv_pieces, out, dv, sizes.DV, sizes.VALUE_COLUMNS)


@triton.jit
def _sum_rows(
    pieces, out, at, begin, end, step, target, inside,
    D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds rows ``at`` of pieces begin .. end, ``step`` rows each, into rows ``target``."""
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < D)[None, :]
    total = tl.zeros([at.shape[0], COLUMNS], tl.float32)
    row = at + begin.to(tl.int64) * step
    for _ in tl.range(begin, end):
        total += tl.load(pieces + row[:, None] * D + column[None, :], mask=mask, other=0.0)
        row += step
    pointers = out + target[:, None] * D + column[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_pieces(dk_pieces, dv_pieces, bounds, first_tokens, last_tokens, dk, dv, sizes):
    """Writes dk and dv ``[b, s, head_count, .]``, one tile of a block's keys a program.

    ``last_tokens [b, blocks]``: one past a block's last token, None = one sequence. Tokens of no
    sequence are not written.
    """
    part = tl.program_id(0) % sizes.PARTS
    block = tl.program_id(0) // sizes.PARTS % sizes.blocks
    bh = tl.program_id(0) // sizes.PARTS // sizes.blocks
    b = bh // sizes.head_count
    hk = bh % sizes.head_count
    head = b * sizes.kv_heads + hk + sizes.head_end - sizes.head_count
    bounds += head.to(tl.int64) * (sizes.blocks + 1)
    begin, end, _ = pieces_of(bounds, block, sizes.blocks, sizes.entries, sizes.LENGTH)
    first = block * sizes.size
    last = tl.minimum(first + sizes.size, sizes.length)
    if first_tokens is not None:
        first = tl.load(first_tokens + b * sizes.blocks + block)
        last = tl.load(last_tokens + b * sizes.blocks + block)
    j = part * sizes.KEYS + tl.arange(0, sizes.KEYS)
    inside = first + j < last
    at = bh.to(tl.int64) * sizes.pieces * (sizes.PARTS * sizes.KEYS) + j
    target = (b.to(tl.int64) * sizes.length + first + j) * sizes.head_count + hk
    step = sizes.PARTS * sizes.KEYS
    _sum_rows(dk_pieces, dk, at, begin, end, step, target, inside, sizes.D, sizes.COLUMNS)
    _sum_rows(dv_pieces, dv, at, begin, end, step, target, inside, sizes.DV, sizes.VALUE_COLUMNS)


@dataclass(frozen=True)
class SelectedDkv(SomeHeadsLaunch):
    """Launch of ``selected_dkv``."""

    kernel = selected_dkv
    batching: ClassVar = {
        **dict.fromkeys(("q", "k", "v", "places", "bounds", "first_tokens"), BATCHED),
        **dict.fromkeys(("do", "base", "log_sum", "delta"), BATCHED),
    }

    @property
    def splits(self) -> int:
        return -(-self.problem.group // self.members)

    def outputs(self):
        p, keys = self.problem, self.problem.parts(self.tiles.keys) * self.tiles.keys
        lead = p.batch * self.head_count, self.pieces, keys
        rows = p.length * power_of_two(p.slots)
        ds = struct(p.dtype, p.batch, self.head_count, rows, p.size, p.group)
        return {
            "dk_pieces": struct("float32", *lead, p.dim),
            "dv_pieces": struct("float32", *lead, p.value_dim),
            "ds": ds if p.stores_ds else None,
        }

    def grid(self, target):
        p = self.problem
        return (p.batch * self.head_count * self.pieces * p.parts(self.tiles.keys),)

    def arguments(self, target):
        scale = float(self.problem.scale)
        return {
            "sizes": self.sizes(
                **self.score_sizes, **self.block_sizes, **self.head_sizes, scale=scale
            )
        }


@dataclass(frozen=True)
class SumPieces(SomeHeadsLaunch):
    """Launch of ``sum_pieces``."""

    kernel = sum_pieces
    batching: ClassVar = dict.fromkeys(
        ("dk_pieces", "dv_pieces", "bounds", "first_tokens", "last_tokens"), BATCHED
    )

    def outputs(self):
        p = self.problem
        lead = p.batch, p.length, self.head_count
        return {"dk": struct(p.dtype, *lead, p.dim), "dv": struct(p.dtype, *lead, p.value_dim)}

    def grid(self, target):
        p = self.problem
        return (p.batch * self.head_count * p.blocks * p.parts(self.tiles.keys),)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 1}

    def arguments(self, target):
        return {"sizes": self.sizes(**self.block_sizes, **self.head_sizes)}
