"""Ragged attention, tiles of query rows: sequences with more new rows than a decoding step takes.

Math, per row at position i of its sequence and query head, over the keys j <= i in the window:

    x_ij = scale * k_scale * q_i . k_j, soft-capped;  lse_i = log(sum_j exp x_ij + exp sink)
    o_i  = v_scale * sum_j exp(x_ij - lse_i) v_j

Work split: the rows of a sequence are cut into tiles of TILE tokens, and all query heads of a kv
head are rows of the tile: ROWS = TILE * heads, so keys are read once for them. One program per
(sequence, kv head, tile, split of its keys), found from the tables of ``schedule``. Programs follow
each other by sequence, then kv head, then tile, the longest first: programs that run together read
the same keys, which stay in the L2 cache. A tile of one split goes to the output, the splits of
others to slots for ``ragged_merge``. A program iterates over its blocks in one loop, which keeps
loads in flight to the end, and masks those that some of its rows do not see. The last programs of
the grid set rows of no sequence to 0. Where another kernel has the long sequences (PERSISTENT),
whose rows ``o`` holds, few programs take the remaining units one after another.

Bound: 4 * d FLOPs a row and key that it sees. With 32:8 heads, D128 in bfloat16, 8 rows of 2k over
contexts of 2k to 16k are 2.2 TFLOP; tiles of 128 rows read 17 GB of keys and values from L2.

Sources: Dao, "FlashAttention-2" (2023), section 3; Kwon et al., "PagedAttention" (arXiv
2309.06180), section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.bound_launch import In, TensorMap, runs_map
from ejkernel.kernels.triton.common.visibility import band_blocks
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import struct
from ejkernel.kernels.triton.serving.attend_block import (
    Keys,
    attend_block,
    init_state,
    join_columns,
    rows_at_block,
    tree_rows,
)
from ejkernel.kernels.triton.serving.epilogue import (
    load_head_scale,
    store_output,
    store_partial,
)
from ejkernel.kernels.triton.serving.groups import PrefillSizes
from ejkernel.kernels.triton.serving.launch import (
    RaggedLaunch,
    cache_group,
    dot_options,
    logits_group,
    sequential,
)
from ejkernel.kernels.triton.serving.pages import (
    clamp_run,
    compute_clamped_rows,
    load_clamped_pages,
)
from ejkernel.kernels.triton.serving.params import compute_dtype
from ejkernel.kernels.triton.serving.queries import prepare_queries
from ejkernel.kernels.triton.serving.ragged_tiles import can_use_tma, max_units
from ejkernel.kernels.triton.serving.schedule import (
    END_ROW,
    FIRST_ROW,
    KV_LEN,
    ROW_END,
    SLOTS_END,
    SPLITS,
    UNITS,
    UNITS_END,
    find_sequence,
)
from ejkernel.kernels.triton.targets import Target, ptx_level
from ejkernel.types.serving.problem import ITEMSIZE

CLEARED_ROWS = 32  # rows that a program sets to zero


@triton.jit
def tile_rows(
    m, tile, chunk, first, count, hk,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Returns token, query head, int64 output row and validity of rows ``m`` of a tile.

    MEMBERS query heads of a kv head are in a tile; a larger group takes several.
    """
    token = tile * TILE + m // MEMBERS
    member = chunk * MEMBERS + m % MEMBERS
    inside = (m < TILE * MEMBERS) & (token < count) & (member < GROUP)
    head = hk * GROUP + member
    return token, head, (first + token).to(tl.int64) * HEADS + head, inside


@triton.jit
def _clear_rows(
    o, block, first, last, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, VALUE: tl.constexpr
):
    """Sets rows of a block of ``o [rows, WIDTH]`` outside ``first`` to ``last`` to VALUE."""
    row = block * ROWS + tl.arange(0, ROWS)
    is_unused = (row < rows) & ((row < first) | (row >= last))
    if tl.max(is_unused.to(tl.int32), 0) > 0:
        for start in range(0, WIDTH, 256):
            column = start + tl.arange(0, 256)
            target = o + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            value = tl.full([ROWS, 256], VALUE, o.dtype.element_ty)
            tl.store(target, value, mask=is_unused[:, None] & (column < WIDTH)[None, :])


class PrefillUnit(NamedTuple):
    """A work unit: one split of the keys of a tile, for some query heads of a kv head.

    Attributes:
        sequence: number of the sequence.
        first, count, length: its first row, number of rows, and number of keys.
        units: its work units.
        head_chunk: number of the query heads.
        tile: number of the tile in the sequence.
        split, splits: number of the split, and splits of the tile.
    """

    sequence: Any
    first: Any
    count: Any
    length: Any
    units: Any
    head_chunk: Any
    tile: Any
    split: Any
    splits: Any


@triton.jit
def _load_unit(r, before, item, first_rows, sequences, n, HEAD_CHUNKS: tl.constexpr):
    """Loads the ``PrefillUnit`` of program ``item``, of sequence ``r`` behind ``before`` units."""
    units = tl.load(sequences + UNITS_END * n + r) - before
    splits = tl.load(sequences + SPLITS * n + r)
    first = tl.load(first_rows + r)
    count = tl.load(sequences + ROW_END * n + r) - first
    length = tl.load(sequences + KV_LEN * n + r)
    head_chunk = (item - before * HEAD_CHUNKS) // units
    unit = (item - before * HEAD_CHUNKS) % units
    tile = units - 1 - unit
    split = 0
    if splits > 1:
        tile = units // splits - 1 - unit // splits
        split = unit % splits
    return PrefillUnit(r, first, count, length, units, head_chunk, tile, split, splits)


@triton.jit
def _find_blocks(
    unit, i0, i1, left, IS_TREE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the blocks of a split (start, stop), and of them (full_start, full_stop).

    All rows see all of the latter. The rows are at positions ``i0`` to ``i1``.
    """
    if IS_TREE:
        start = tl.maximum(i0 - left, 0) // BLOCK if WINDOW else i0 * 0
        stop = tl.cdiv(unit.length, BLOCK)
        full_start = stop if WINDOW else start
        full_stop = tl.maximum(i0, 0) // BLOCK
    else:
        start, full_start, full_stop, stop = band_blocks(
            i0, i1, unit.length, -left if WINDOW else None, 0, BLOCK
        )
    if unit.splits > 1:
        blocks = (stop - start).to(tl.int64)
        stop = start + (blocks * (unit.split + 1) // unit.splits).to(tl.int32)
        start = start + (blocks * unit.split // unit.splits).to(tl.int32)
    full_start = tl.minimum(tl.maximum(full_start, start), stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), stop)
    return start, stop, full_start, full_stop


@triton.jit
def _attend_unit(
    q, unit, hk, token, row, inside, cache, tables, tree, k_scale, sizes, logits, layout, dots,
    BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Returns (m, l, acc, acc_tail) of the rows of a unit, m as a base-2 logit.

    ``token``, ``row``, ``inside``: see ``tile_rows``.
    """
    ROWS: tl.constexpr = layout.ROWS
    TILE: tl.constexpr = layout.TILE
    PAGE: tl.constexpr = cache.PAGE
    WINDOW: tl.constexpr = sizes.WINDOW
    left, v = sizes.left, cache.v
    before = unit.length - unit.count
    position = before + token
    nodes = None
    if tree.words is None:
        i0 = before + unit.tile * TILE
        i1 = before + tl.minimum(unit.tile * TILE + TILE, unit.count) - 1
    else:
        # any row may see any new token, and the window of a branch begins with it
        i0 = before
        i1 = unit.length - 1
        nodes = tree_rows(tree, unit.first + token, inside, position, i0)
    start, stop, full_start, full_stop = _find_blocks(
        unit, i0, i1, left, tree.words is not None, WINDOW, BLOCK
    )

    # before the queries, whose use waits for them
    table = tables + unit.sequence.to(tl.int64) * sizes.max_pages
    last = tl.maximum(i1, 0)
    low = tl.maximum(i0 - left, 0) if WINDOW else None
    page = load_clamped_pages(table, start * BLOCK, low, last, PAGE, BLOCK)

    factor = logits.scale
    if k_scale.array is not None:
        factor *= tl.load(k_scale.array + hk * k_scale.head).to(tl.float32)
    queries = prepare_queries(
        q, row, inside, factor, logits, cache.K, dots, logits.POSITIVE and k_scale.array is None
    )
    m, l, sums = init_state(cache.V, ROWS)  # noqa: E741
    e = tl.zeros([ROWS], tl.float32)
    for block in tl.range(start, stop):
        cache_rows = None
        run = None
        if v is None:
            cache_rows = compute_clamped_rows(
                page, block * BLOCK, low, last, sizes.pages, PAGE, BLOCK
            )
        else:
            run = clamp_run(page, block * BLOCK, last, sizes.pages, PAGE, BLOCK)
        # a step ahead, as in ``decode``
        page = load_clamped_pages(table, (block + 1) * BLOCK, low, last, PAGE, BLOCK)
        j = block * BLOCK + tl.arange(0, BLOCK)
        partly = (block < full_start) | (block >= full_stop)
        keys = Keys(
            j, cache_rows, None, run, position, left if WINDOW else None, partly,
            rows_at_block(nodes, block * BLOCK),
        )  # fmt: skip
        m, l, e, sums = attend_block(  # noqa: E741
            queries, m, l, e, sums, cache, cache.k + cache.V_OFFSET if v is None else v, hk, keys,
            logits, dots, PTX,
        )  # fmt: skip

    m = m * queries.slopes
    acc, acc_tail = join_columns(sums, cache.V)
    if dots.FUSED:
        shrink = tl.exp2(-e)
        l = l * shrink  # noqa: E741
        acc = acc * shrink[:, None]
        if cache.V.TAIL > 0:
            acc_tail = acc_tail * shrink[:, None]
    return m, l, acc, acc_tail


@triton.jit
def ragged_prefill(
    q, cache, tables, first_rows, sequences, header, tree, k_scale, v_scale, sinks, o_in, o, lse,
    partial, sizes, logits, layout, dots, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes the rows of tiles with one split, and partial results of the others.

    ``o_in``: the output of another kernel, in whose memory ``o`` is. ``lse [T, h]``: None if the
    call does not return it.
    """
    HEADS: tl.constexpr = layout.HEADS
    ROWS: tl.constexpr = layout.ROWS
    GROUP: tl.constexpr = HEADS // layout.KV_HEADS
    HEAD_CHUNKS: tl.constexpr = layout.KV_HEADS * layout.CHUNKS  # programs of a unit
    n = sizes.n
    pid = tl.program_id(0)
    if pid >= sizes.programs:
        _clear_rows(
            o, pid - sizes.programs, tl.load(header + FIRST_ROW), tl.load(header + END_ROW),
            sizes.rows, HEADS * cache.V.DIM, sizes.CLEARED_ROWS, 0.0,
        )  # fmt: skip
        if lse is not None:
            _clear_rows(
                lse, pid - sizes.programs, tl.load(header + FIRST_ROW), tl.load(header + END_ROW),
                sizes.rows, HEADS, sizes.CLEARED_ROWS, float("-inf"),
            )  # fmt: skip
    else:
        turns = 0
        if PERSISTENT:
            turns = tl.cdiv(tl.load(header + UNITS) * HEAD_CHUNKS - pid, sizes.programs)
        for turn in (tl.range if PERSISTENT else tl.static_range)(0, turns if PERSISTENT else 1):
            item = pid + turn * sizes.programs
            # behind the last unit there is no sequence; the number of units would be one more
            # load to wait for
            r, before = find_sequence(
                item // HEAD_CHUNKS, sequences + UNITS_END * n, n, sizes.LANES
            )
            if r < n:
                unit = _load_unit(r, before, item, first_rows, sequences, n, HEAD_CHUNKS)
                hk = unit.head_chunk // layout.CHUNKS
                token, heads, row, inside = tile_rows(
                    tl.arange(0, ROWS), unit.tile, unit.head_chunk % layout.CHUNKS, unit.first,
                    unit.count, hk, HEADS, GROUP, layout.TILE, layout.MEMBERS,
                )  # fmt: skip
                m, l, acc, acc_tail = _attend_unit(  # noqa: E741
                    q, unit, hk, token, row, inside, cache, tables, tree, k_scale, sizes, logits,
                    layout, dots, BLOCK, PTX,
                )  # fmt: skip
                if unit.splits == 1:
                    value_scale = load_head_scale(v_scale, 0, hk)
                    store_output(
                        o, lse, row, m, l, acc, acc_tail, sinks, 0, heads, inside, value_scale,
                        cache.V,
                    )  # fmt: skip
                else:
                    slots_end = tl.load(sequences + SLOTS_END * n + r)
                    slot = slots_end - unit.units + unit.tile * unit.splits + unit.split
                    first = slot.to(tl.int64) * HEAD_CHUNKS + unit.head_chunk
                    member = tl.arange(0, ROWS)
                    store_partial(
                        partial, first * ROWS + member, m, l, acc, acc_tail, member >= 0, cache.V
                    )


@dataclass(frozen=True)
class RaggedPrefill(RaggedLaunch):
    """Launch of ``ragged_prefill``.

    Results: o ``[T, h, d]`` and, if the call returns it, lse ``[T, h]``, without the rows of
    decoded sequences, and acc, m, l of partial results. An ``o_in`` has the rows of another
    kernel's sequences.
    """

    kernel = ragged_prefill
    batching: ClassVar = sequential(
        "q k tables first_rows sequences header tree positions k_scale v_scale sink o_in"
    )

    def outputs(self):
        p = self.problem.paged
        slots = (self.max_split_units, p.kv_heads * self.chunks, self.tiles.rows)
        row = struct("float32", *slots)
        o = struct(p.query_dtype, self.problem.rows, p.heads, p.dim)
        lse = struct("float32", self.problem.rows, p.heads) if p.return_lse else None
        return {"o": o, "lse": lse, "acc": struct("float32", *slots, p.dim), "m": row, "l": row}

    def in_place(self):
        return {"o": "o_in"} if self.has("o_in") else {}

    def programs(self, target: Target) -> int:
        """Returns the programs that compute tiles."""
        p, t = self.problem, self.tiles
        programs = max_units(p, t, self.max_split_units) * p.paged.kv_heads * self.chunks
        if not self.has("o_in"):
            return programs
        # most calls leave few units to this kernel
        return min(programs, target.cores * max(1, 8 // t.num_warps))

    def grid(self, target):
        return (self.programs(target) + -(-self.problem.rows // CLEARED_ROWS),)

    def cache_operands(self, target: Target) -> tuple[In | TensorMap | None, TensorMap | None]:
        """Returns the cache by a pointer, or by descriptors of keys and of values."""
        p, t = self.problem.paged, self.tiles
        k = self.operand("k", "int16" if ITEMSIZE[p.key_dtype] == 1 else None)
        if k is None or not can_use_tma(p, t.block, target):
            return k, None
        heads, step = p.layout.heads, p.layout.key_stride
        keys = TensorMap(k.index, (p.pages * p.page_size, heads * step), (t.block, p.dim))
        return keys, runs_map(k.index, heads * step, (t.block, p.dim))

    def arguments(self, target):
        p, t = self.problem.paged, self.tiles
        keys, values = self.cache_operands(target)
        # float16 lacks the range for the carried accumulators, wide heads the registers
        fused = compute_dtype(p, p.value_dtype) != "float16" and p.dim <= 128
        return {
            "cache": cache_group(p, keys, None, values),
            **self.attention_groups(),
            "sizes": PrefillSizes(
                n=p.batch,
                rows=self.problem.rows,
                programs=self.programs(target),
                max_pages=p.max_pages,
                pages=p.pages,
                left=p.window_left or 0,
                WINDOW=p.window_left is not None,
                LANES=self.lanes,
                CLEARED_ROWS=CLEARED_ROWS,
            ),
            "logits": logits_group(p),
            "layout": self.layout(),
            "dots": dot_options(p, target, FUSED=fused),
            "BLOCK": t.block,
            "PERSISTENT": self.has("o_in"),
            "PTX": ptx_level(target),
        }
