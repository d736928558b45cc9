"""The selected branch, forward.

Math, per token t and query head over the keys j <= t of the blocks selected for its key head (base
2 inside):

    x_tj = scale * q_t . k_j;  lse_t = log(sum_j exp x_tj);  o_t = sum_j exp(x_tj - lse_t) v_j

Work split: one program per (token, batch row, key head). The group's query heads are the rows of
its matmuls, so they share every key that is loaded (groups of more heads than a tile has rows are
split). Programs of one key head follow each other: its keys and values stay in the L2 cache. The
outputs of the other branches are added here: a pass of its own would take 0.38 ms.

Bound: each program reads ``blocks * size * (d + dv)`` elements and shares none with its neighbours.
At T 32k, 64:4 heads, D128, 16 blocks of 64: 69 GB from L2, 1.1 TFLOP: L2, by a factor of four. It
takes 6.8 ms on an H200.

Source: Yuan et al., "Native Sparse Attention" (2025), sections 3.3 and 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.native_sparse_attention.branches import OTHERS
from ejkernel.kernels.triton.native_sparse_attention.launch import SelectedLaunch


@triton.jit
def program_token(pid, length, kv_heads, SPLITS: tl.constexpr):
    """Returns the token, batch row, key head and split of its group of a program."""
    split = pid // length % SPLITS
    bh = pid // length // SPLITS
    return pid % length, bh // kv_heads, bh % kv_heads, split


@triton.jit
def load_group(x, at, inside, heads_at, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads rows ``[., COLUMNS]`` of ``x [b, s, h, D]``, 0 where not ``inside``.

    They are heads ``heads_at`` of the tokens that start at the int64 rows ``at``.
    """
    column = tl.arange(0, COLUMNS)
    pointers = x + (at + heads_at)[:, None] * D + column[None, :]
    mask = inside[:, None]
    if COLUMNS > D:
        mask = mask & (column < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_list(chosen, starts, sizes):
    """Loads the list of blocks of a program's token.

    Returns the token, the first row of its key head, the first token of its sequence, the list with
    -1 after all blocks, the number of blocks, the rows of its heads in ``[b, s, h]``, and which of
    these exist.
    """
    if sizes.head_count is None:
        t, b, hk, split = program_token(
            tl.program_id(0), sizes.length, sizes.kv_heads, sizes.SPLITS
        )
    else:
        t, b, hk, split = program_token(
            tl.program_id(0), sizes.length, sizes.head_count, sizes.SPLITS
        )
        hk += sizes.head_end - sizes.head_count
    token = b.to(tl.int64) * sizes.length + t
    start = 0
    if starts is not None:
        start = tl.load(starts + token)
    slot = tl.arange(0, sizes.SLOTS)
    row = token * sizes.kv_heads + hk
    entries = tl.load(chosen + row * sizes.slots + slot, mask=slot < sizes.slots, other=-1)
    count = tl.sum((entries >= 0).to(tl.int32), 0)
    member = split * sizes.ROWS + tl.arange(0, sizes.ROWS)
    inside = member < sizes.GROUP
    at = token * sizes.heads + hk * sizes.GROUP + member
    key_row = b.to(tl.int64) * sizes.length * sizes.kv_heads + hk
    return t, key_row, start, entries, count, at, inside


@triton.jit
def phase_range(count, phase: tl.constexpr, sizes):
    """Returns the range of tiles of a phase: 0 the first block of the list, 1 the others.

    Only a token's own block has later keys, and is the first if it is in the list. Every other tile
    needs no mask. With one phase all have it.
    """
    own_tiles = tl.minimum(count, 1) * sizes.PARTS
    if sizes.PHASES == 1:
        begin, end = 0, count * sizes.PARTS
    elif phase == 0:
        begin, end = 0, own_tiles
    else:
        begin, end = own_tiles, count * sizes.PARTS
    return begin, end


@triton.jit
def find_tile(entries, step, start, t, phase: tl.constexpr, sizes):
    """Returns the first token of a tile, and the keys in it that token t sees.

    The list is in registers: loading it would be one more pipeline stage, which keys and values
    then lack.
    """
    slot = tl.arange(0, sizes.SLOTS)
    block = tl.sum(tl.where(slot == step // sizes.PARTS, entries, 0), 0)
    into = step % sizes.PARTS * sizes.KEYS
    first = start + block * sizes.size + into
    within = tl.arange(0, sizes.KEYS)
    visible = within < sizes.size - into
    if phase == 0:
        visible = visible & (within <= t - first)
    return first, visible


@triton.jit
def load_keys(x, base, first, inside, stride, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads tokens ``[., COLUMNS]`` of one key head starting at ``first``; 0 where not inside."""
    column = tl.arange(0, COLUMNS)
    row = tl.arange(0, inside.shape[0])
    pointers = x + base + first.to(tl.int64) * stride + row[:, None] * stride + column[None, :]
    mask = inside[:, None]
    if COLUMNS > D:
        mask = mask & (column < D)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_head(x, row, first, inside, heads, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads tokens of x ``[., heads, D]``, whose first token has its head at ``row``."""
    return load_keys(x, row * D, first, inside, heads * D, D, COLUMNS)


@triton.jit
def load_visible(
    x, row, first, visible, D: tl.constexpr, COLUMNS: tl.constexpr, phase: tl.constexpr, sizes
):  # fmt: skip
    """Loads the visible keys or values of a tile."""
    if phase == 1 and sizes.EVEN and COLUMNS == D:
        stride = sizes.kv_heads * D
        pointers = x + row * D + first.to(tl.int64) * stride
        key = tl.arange(0, visible.shape[0])[:, None]
        tile = tl.load(pointers + key * stride + tl.arange(0, COLUMNS)[None, :])
    else:
        tile = load_head(x, row, first, visible, sizes.kv_heads, D, COLUMNS)
    return tile


@triton.jit
def load_step(q_tile, k, v, key_row, entries, step, start, t, phase: tl.constexpr, sizes):
    """Returns which keys of a step are visible, the keys, the values and the scores."""
    first, visible = find_tile(entries, step, start, t, phase, sizes)
    k_tile = load_visible(k, key_row, first, visible, sizes.D, sizes.COLUMNS, phase, sizes)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=sizes.PRECISION)
    if sizes.sign is not None:
        s = s * sizes.sign
    v_tile = load_visible(v, key_row, first, visible, sizes.DV, sizes.VALUE_COLUMNS, phase, sizes)
    return visible, k_tile, v_tile, s


@triton.jit
def row_terms(m, l):  # noqa: E741
    """Returns the largest score of a row, and log2 of the sum relative to it.

    These are two values, as one would round away the sum next to a large score. Rows without keys
    have an infinite second one, which makes every probability 0.
    """
    alive = l != 0.0  # NaN is: its probabilities must not become 0
    low = tl.where(alive, tl.log2(tl.where(alive, l, 1.0)), float("inf"))
    return tl.where(alive, m, 0.0), low


@triton.jit
def probabilities(s, base, log_sum, slope):
    """Returns the probabilities of a tile of scores; base and log_sum as of ``row_terms``."""
    return tl.exp2(tl.minimum((s - base) * slope, 0.0) - log_sum)


@triton.jit
def apply_gate(o, gate, at, inside):
    """Returns rows in float32 times their gates, None = 1."""
    o = o.to(tl.float32)
    if gate is not None:
        o *= tl.load(gate + at, mask=inside, other=0.0)[:, None]
    return o


@triton.jit
def selected_fwd(
    q, k, v, chosen, starts, o_cmp, o_swa, g_cmp, g_slc, g_swa, o, base, log_sum, total, sizes
):
    """Writes o ``[b, s, h, dv]`` and ``row_terms`` ``[b, s, h]``, all three or none of them.

    ``total [b, s, h, dv]``: o and the outputs of the other branches, times their gates
    ``[b, s, h]``; None where not requested, as are branches and gates that do not exist.
    ``chosen [b, s, hk, slots]``; ``starts [b, s]``: first token of a token's sequence, None = 0.
    """
    t, key_row, start, entries, count, at, inside = load_list(chosen, starts, sizes)
    q_tile = load_group(q, at, inside, 0, sizes.D, sizes.COLUMNS)
    m = tl.full([sizes.ROWS], float("-inf"), tl.float32)
    # by column: a row is spread over warps, and is reduced once
    row_sums = tl.zeros([sizes.ROWS, sizes.KEYS], tl.float32)
    acc = tl.zeros([sizes.ROWS, sizes.VALUE_COLUMNS], tl.float32)
    for phase in tl.static_range(sizes.PHASES):
        begin, end = phase_range(count, phase, sizes)
        for step in tl.range(begin, end):
            visible, _, v_tile, s = load_step(
                q_tile, k, v, key_row, entries, step, start, t, phase, sizes
            )  # fmt: skip
            if phase == 0 or not sizes.EVEN:
                s = tl.where(visible[None, :], s, float("-inf"))
            # the first tile of every block has a visible key
            m_new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2((s - m_new[:, None]) * sizes.slope)
            alpha = tl.exp2((m - m_new) * sizes.slope)[:, None]
            row_sums = row_sums * alpha + p
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha, input_precision=sizes.PRECISION)
            m = m_new

    l = tl.sum(row_sums, 1)  # noqa: E741
    if o is not None:
        top, low = row_terms(m, l)
        tl.store(base + at, top, mask=inside)
        tl.store(log_sum + at, low, mask=inside)
    acc = acc / tl.where(l != 0.0, l, 1.0)[:, None]
    column = tl.arange(0, sizes.VALUE_COLUMNS)
    stored = inside[:, None] & (column < sizes.DV)[None, :]
    element = at[:, None] * sizes.DV + column[None, :]
    selected = acc.to(q.dtype.element_ty)
    if o is not None:
        tl.store(o + element, selected, mask=stored)
    if total is not None:
        acc = apply_gate(selected, g_slc, at, inside)
        if o_cmp is not None:
            other = load_group(o_cmp, at, inside, 0, sizes.DV, sizes.VALUE_COLUMNS)
            acc += apply_gate(other, g_cmp, at, inside)
        if o_swa is not None:
            other = load_group(o_swa, at, inside, 0, sizes.DV, sizes.VALUE_COLUMNS)
            acc += apply_gate(other, g_swa, at, inside)
        tl.store(total + element, acc.to(total.dtype.element_ty), mask=stored)


@dataclass(frozen=True)
class SelectedForward(SelectedLaunch):
    """Launch of ``selected_fwd``.

    ``for_gradients``: whether o and the terms of its rows are results. total is a result if there
    are other branches or gates, or no gradients.
    """

    kernel = selected_fwd
    batching: ClassVar = dict.fromkeys(("q", "k", "v", "chosen", "starts", *OTHERS), BATCHED)

    for_gradients: bool

    def outputs(self):
        p, added = self.problem, any(self.has(name) for name in OTHERS)
        o = struct(p.dtype, p.batch, p.length, p.heads, p.value_dim)
        row = struct("float32", p.batch, p.length, p.heads)
        results = {"o": o, "base": row, "log_sum": row} if self.for_gradients else {}
        total = o if added or not self.for_gradients else None
        return {**dict.fromkeys(("o", "base", "log_sum")), **results, "total": total}

    def grid(self, target):
        return (self.problem.batch * self.problem.kv_heads * self.token_programs,)

    def arguments(self, target):
        return {"sizes": self.sizes(**self.score_sizes)}
