"""Paged decoding, first of two kernels: partial attention over equal ranges of the cache.

Math, per batch row and query head over the visible keys j (base 2 inside):

    x_j = scale * k_scale * q . k_j, soft-capped;  m = max x_j;  l = sum exp(x_j - m)
    acc = sum exp(x_j - m) v_j      (the merge divides; partial results in float16 are acc / l)

Work split: the key tiles of all sequences, laid end to end, are split into equal work ranges
(``work_ranges``); one program per (range, kv head, chunk of query heads). The number of programs
depends on shapes and on the chip only; a program finds its sequences from the lengths, so uneven
contexts cost as much as even ones. What range r holds of sequence b goes to slot r + b of the
partial results: both only grow along the ranges, so no two partial results have the same slot.
Programs of the same range and different heads are neighbours: together they read full cache rows.
All query heads of a kv head are rows of one matmul, padded to 16.
A sequence costs SETUP_TILES tiles more than it has: a range that begins another one waits for its
queries and first keys, and stores its results; it gets SETUP_TILES tiles fewer.
With SPLITS > 0 every sequence has SPLITS equal ranges instead. With ``counters`` the programs of a
single sequence then merge its partial results themselves: the last one of few rows
(``merge.merge_by_last``), or all of them together (``merge.merge_at_end``).

A sequence has one query row at its end, or up to TOKENS of them (``counts``, None: all; the first
is row ``rows``, None: TOKENS times its index): then they are rows of one matmul with their heads,
and each sees the keys up to its position, or as nodes of a tree the tokens before all of them and
those that ``tree`` marks. No row sees keys before ``begins``. Keys and values may
lie in one array, V_OFFSET elements apart; v None: the first DV columns of a key are its value, read
once for both matmuls. With ``k_tail``, k is a descriptor of runs of rows, and this one of the
columns that are not values; a block lies inside a page.

Bound: reading keys and values once; with a group of 4 heads there are 4 FLOPs a byte. At B64,
context 8192, 8 kv heads, D128 in bfloat16: 2.15 GB, 0.5 ms at 4.3 TB/s.

Sources: Dao et al., "Flash-Decoding for long-context inference" (2023), for the split;
Osama et al., "Stream-K" (arXiv 2301.03598), section 4, for equal ranges of uneven work;
Kwon et al., "PagedAttention" (arXiv 2309.06180), section 4.1, for the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.bound_launch import In, TensorMap, runs_map
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import power_of_two, struct
from ejkernel.kernels.triton.serving.attend_block import (
    Keys,
    attend_block,
    init_state,
    join_columns,
    rows_at_block,
    tree_rows,
)
from ejkernel.kernels.triton.serving.decode_tiles import query_rows
from ejkernel.kernels.triton.serving.epilogue import load_head_scale, store_output, store_partial
from ejkernel.kernels.triton.serving.groups import (
    DecodeSizes,
    MergeAtEnd,
    RowLayout,
    SequenceTables,
)
from ejkernel.kernels.triton.serving.launch import (
    PagedLaunch,
    cache_group,
    dot_options,
    logits_group,
    sequential,
)
from ejkernel.kernels.triton.serving.merge import (
    LOADED_ELEMENTS,
    POLLS,
    PagedMerge,
    average_factor,
    merge_at_end,
    merge_by_last,
    partial_logit,
)
from ejkernel.kernels.triton.serving.pages import clamp_run, compute_cache_rows, load_block_pages
from ejkernel.kernels.triton.serving.params import column_parts
from ejkernel.kernels.triton.serving.queries import load_raw_queries, prepare_queries
from ejkernel.kernels.triton.serving.work_ranges import (
    find_sequence_split,
    find_work_range,
    load_extent,
    sequence_cost,
    store_sequence_starts,
)
from ejkernel.kernels.triton.targets import Target, ptx_level
from ejkernel.types.serving.problem import ITEMSIZE

# sequences that a program looks at together: lanes of one warp are summed without the other warps,
# and the compiler unrolls the rounds
MIN_LANES, MAX_ROUNDS = 32, 8


@triton.jit
def attend_tiles(
    q, rows, inside, position, tree, factor, cache, v, hk, table, page, tile, stop, length, begin,
    sizes, logits, layout, dots, BLOCK: tl.constexpr, MASK_BEGIN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Attention of query ``rows`` to the key tiles ``tile`` .. ``stop`` of one sequence.

    ``position``: of each row, None where all come after all keys. ``tree``: None, or ``TreeRows``.
    ``factor``: of the logits.
    ``page``: pages of the first tile. MASK_BEGIN: keys before ``begin`` are not read.

    Returns (m, l, acc, acc_tail), m as a base-2 logit.
    """
    POSITIVE: tl.constexpr = logits.POSITIVE and factor is None
    if factor is None:
        factor = logits.scale
    if dots.RAW_QUERIES:
        queries = load_raw_queries(q, rows, inside, factor, logits, cache.K, POSITIVE)
    else:
        queries = prepare_queries(q, rows, inside, factor, logits, cache.K, dots, POSITIVE)
    m, l, sums = init_state(cache.V, layout.BLOCK)  # noqa: E741
    opaque = None
    if dots.OPAQUE:
        opaque = length > 0
    for i in tl.range(tile, stop):
        j = i * BLOCK + tl.arange(0, BLOCK)
        cache_rows = compute_cache_rows(page, i * BLOCK, sizes.pages, cache.PAGE, BLOCK)
        current_page = page
        page = load_block_pages(table, (i + 1) * BLOCK, length, cache.PAGE, BLOCK)
        loaded = j < length
        if MASK_BEGIN:
            loaded = loaded & (j >= begin)
        run = None
        if cache.k_tail is not None:
            run = clamp_run(current_page, i * BLOCK, length - 1, sizes.pages, cache.PAGE, BLOCK)
        keys = Keys(
            j, cache_rows, loaded, run, position,
            sizes.left if sizes.WINDOW and position is not None else None, None,
            rows_at_block(tree, i * BLOCK),
        )  # fmt: skip
        m, l, _e, sums = attend_block(  # noqa: E741
            queries, m, l, None, sums, cache, v, hk, keys, logits, dots, PTX, opaque
        )
    m = partial_logit(m, queries.slopes, l)
    acc, acc_tail = join_columns(sums, cache.V)
    if dots.BIASED:
        acc = acc * 2.0**24
    return m, l, acc, acc_tail


@triton.jit
def _attend_sequence(
    q, b, tile, stop, length, begin, token, row_of, inside, hk, cache, sequences, tree, k_scale,
    sizes, logits, layout, dots, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Returns (first row, validity of rows, m, l, acc, acc_tail) of the rows of sequence ``b``.

    The first row counts query heads, ``row_of`` from there. Other arguments and results: see
    ``attend_tiles``.
    """
    TOKENS: tl.constexpr = layout.TOKENS
    v = cache.v
    if v is not None:
        v = v + cache.V_OFFSET
    table = sequences.tables + b.to(tl.int64) * sizes.max_pages
    # looked up a step ahead: a look-up inside the step would halve the depth of the pipeline.
    # The first one overlaps with loading the queries
    page = load_block_pages(table, tile * BLOCK, length, cache.PAGE, BLOCK)
    row = b.to(tl.int64) * (TOKENS * layout.ALL)
    if sequences.rows is not None:
        row = tl.load(sequences.rows + b).to(tl.int64) * layout.ALL
    position = None
    nodes = None
    if TOKENS > 1 or tree.words is not None:
        count = TOKENS
        if sequences.counts is not None:
            count = tl.load(sequences.counts + b)
        inside = token < count
        position = length - count + token
        if tree.words is not None:
            first_row = b * TOKENS
            if sequences.rows is not None:
                first_row = tl.load(sequences.rows + b)
            nodes = tree_rows(tree, first_row + token, inside, position, length - count)
    factor = None
    if k_scale.array is not None:
        at = k_scale.array + b * k_scale.row + hk * k_scale.head
        factor = tl.load(at).to(tl.float32) * logits.scale
    m, l, acc, acc_tail = attend_tiles(  # noqa: E741
        q, row + row_of, inside, position, nodes, factor, cache, v, hk, table, page, tile, stop,
        length, begin, sizes, logits, layout, dots, BLOCK,
        sizes.WINDOW or sequences.begins is not None, PTX,
    )  # fmt: skip
    return row, inside, m, l, acc, acc_tail


@triton.jit
def paged_split(
    q, cache, sequences, tree, k_scale, v_scale, sinks, counters_in, partial, starts, o, lse,
    counters, sizes, logits, layout, dots, merge, BLOCK: tl.constexpr, LANES: tl.constexpr,
    ROUNDS: tl.constexpr, SPLITS: tl.constexpr, SETUP_TILES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Writes ``partial`` results and ``starts``, or with one split a sequence the output.

    ``counters``, in the memory of ``counters_in``: if given, the output is written too, of a single
    sequence with SPLITS; ``merge``: how.
    """
    GROUP: tl.constexpr = layout.ALL // layout.KV
    TOKENS: tl.constexpr = layout.TOKENS
    pid = tl.program_id(0)
    chunk = pid % layout.CHUNKS
    hk = (pid // layout.CHUNKS) % layout.KV
    work_range = pid // (layout.CHUNKS * layout.KV)
    capacity = sizes.max_pages * cache.PAGE

    # tiles t .. end, counted over all sequences; sequence b begins at tile ``before``
    b = 0
    before = 0
    if SPLITS > 0:
        t, end, b = find_sequence_split(
            work_range, sequences, capacity, sizes, BLOCK, TOKENS, SPLITS
        )
        has_work = True
    else:
        lane = tl.arange(0, LANES)
        t, end, b, before, total = find_work_range(
            work_range, lane, sequences, capacity, sizes, BLOCK, TOKENS, SETUP_TILES, LANES, ROUNDS
        )
        if pid == 0:
            store_sequence_starts(
                starts, total, lane, sequences, capacity, sizes, BLOCK, TOKENS, SETUP_TILES, LANES,
                ROUNDS,
            )  # fmt: skip
        has_work = t < end if SETUP_TILES == 0 else tl.maximum(t, before + SETUP_TILES) < end

    member = chunk * layout.BLOCK + tl.arange(0, layout.BLOCK)
    token = member // GROUP
    inside = member < GROUP  # of one token
    if TOKENS == 1:
        heads = hk * GROUP + member
        row_of = heads
    else:
        heads = hk * GROUP + member % GROUP
        row_of = token * layout.ALL + heads

    while has_work:
        length, begin, first_tile, tiles = load_extent(
            sequences, b, None, capacity, sizes, BLOCK, TOKENS
        )
        stop = tl.minimum(end, before + sequence_cost(tiles, SETUP_TILES))
        tile0 = first_tile + t - before
        if SETUP_TILES > 0:
            tile0 = first_tile + tl.maximum(t - before - SETUP_TILES, 0)
        row, valid, m, l, acc, acc_tail = _attend_sequence(  # noqa: E741
            q, b, tile0, first_tile + stop - before - SETUP_TILES, length, begin, token, row_of,
            inside, hk, cache, sequences, tree, k_scale, sizes, logits, layout, dots, BLOCK, PTX,
        )  # fmt: skip
        if partial.acc is None:
            value_scale = load_head_scale(v_scale, b, hk)
            store_output(
                o, lse, row + row_of, m, l, acc, acc_tail, sinks, b, heads, valid, value_scale,
                cache.V,
            )  # fmt: skip
        else:
            slot = work_range + b if SPLITS == 0 else work_range
            partial_row = slot.to(tl.int64) * (TOKENS * layout.ALL) + row_of
            if partial.acc.dtype.element_ty == tl.float16:
                factor = average_factor(l)
                acc = acc * factor[:, None]
                if cache.V.TAIL > 0:
                    acc_tail = acc_tail * factor[:, None]
            store_partial(partial, partial_row, m, l, acc, acc_tail, valid, cache.V)
            if counters is not None and merge.MEMBERS > 0:
                merge_by_last(
                    partial, v_scale, sinks, o, lse, counters, b, hk, chunk, layout, cache.V.DIM,
                    SPLITS, merge,
                )  # fmt: skip
            elif counters is not None:
                merge_at_end(
                    partial, v_scale, sinks, o, lse, counters, b, hk, chunk, work_range, layout,
                    cache.V.DIM, SPLITS, merge,
                )  # fmt: skip

        if SPLITS == 0:
            t = stop
            before += sequence_cost(tiles, SETUP_TILES)
            b += 1
            has_work = t + SETUP_TILES < end
        else:
            has_work = False


@dataclass(frozen=True)
class PagedSplit(PagedLaunch):
    """Launch of ``paged_split``.

    Results: acc ``[slots, rows, dv]``, m, l ``[slots, rows]``, starts ``[b + 1]``, or with one
    split a sequence the output o ``[b, rows, dv]``. With ``counters_in``, int32 zeros
    ``[count_counters]``, all of them and lse ``[b, rows]`` if the call returns it.
    """

    kernel = paged_split
    batching: ClassVar = sequential(
        "q k v lens tables begins rows counts tree positions k_scale v_scale sink counters_in"
    )

    @property
    def merges_at_end(self) -> bool:
        """Returns whether the programs merge the partial results of their single sequence."""
        return self.has("counters_in")

    @property
    def count_counters(self) -> int:
        """Returns the counters of finished programs: one for each block of query rows."""
        return self.problem.kv_heads * self.query_block[1]

    def outputs(self):
        p = self.problem
        o = struct(p.query_dtype, p.batch, self.rows, p.value_dim)
        if self.direct:
            return {"o": o}
        row = struct("float32", self.slots, self.rows)
        partial = {
            "acc": struct(self.partial_dtype, self.slots, self.rows, p.value_dim),
            "m": row,
            "l": row,
            "starts": struct("int32", p.batch + 1) if self.tiles.splits is None else None,
        }
        if not self.merges_at_end:
            return partial
        lse = struct("float32", p.batch, self.rows) if p.return_lse else None
        return partial | {"o": o, "lse": lse, "counters": struct("int32", self.count_counters)}

    def in_place(self):
        return {"counters": "counters_in"}

    def merge_tile(self) -> MergeAtEnd | None:
        """Returns how partial results are merged: by the last program, or as by ``PagedMerge``."""
        p = self.problem
        if not self.merges_at_end:
            return None
        if self.tiles.last_merges:
            members = min(self.query_block[0], power_of_two(p.group * p.tokens))
            columns = max(16, power_of_two(p.value_dim))
            parts = min(max(1, LOADED_ELEMENTS // (members * columns)), power_of_two(self.ranges))
            return MergeAtEnd(columns, 1, parts, members, POLLS)
        launch = PagedMerge(p, self.tiles, self.ranges)
        return MergeAtEnd(*launch.columns, launch.parts[0], 0, POLLS)

    def interpreter_arguments(self, target):
        """Programs run one after the other there: waiting is in vain."""
        merge = self.merge_tile()
        waits = {} if merge is None else {"merge": merge._replace(POLLS=0)}
        return super().interpreter_arguments(target) | waits

    @property
    def query_block(self) -> tuple[int, int]:
        """Query rows of a program, and programs for the rows of a kv head."""
        return query_rows(self.problem, self.tiles.max_rows)

    def grid(self, target):
        return (self.ranges * self.problem.kv_heads * self.query_block[1],)

    def options(self, target):
        return self.tiles.launch_options(target)

    def cache_operands(self) -> tuple[In | TensorMap | None, TensorMap | None, In | None]:
        """Returns keys by pointer, or by descriptors of both parts of a row, and values."""
        p, t = self.problem, self.tiles
        k_view, v_view = (
            "int16" if ITEMSIZE[dtype] == 1 else None for dtype in (p.key_dtype, p.value_dtype)
        )
        k, tail = self.operand("k", k_view), None
        if t.tma and k is not None:
            columns = column_parts(p)[0][1]
            width = 1 if k_view is None else 2  # elements that are loaded as one
            dim, main, columns = p.dim // width, p.value_dim // width, columns // width
            shape = (p.pages * p.page_size, dim)
            tail = TensorMap(k.index, shape, (t.block, columns), view=k_view)
            k = runs_map(k.index, dim, (t.block, main), k_view)
        return k, tail, self.operand("k" if p.layout.value_offset else "v", v_view)

    def arguments(self, target: Target) -> dict[str, Any]:
        p, t, (rows, chunks) = self.problem, self.tiles, self.query_block
        lanes = max(MIN_LANES, power_of_two(p.batch) // MAX_ROUNDS)
        names = ("lens", "tables", "begins", "rows", "counts")
        return {
            "cache": cache_group(p, *self.cache_operands(), convert_once=t.convert_once),
            "sequences": SequenceTables(*map(self.operand, names)),
            **self.attention_groups(),
            "starts": self.result("starts"),
            **{name: self.result(name) for name in ("o", "lse", "counters")},
            "merge": self.merge_tile(),
            "sizes": DecodeSizes(
                p.batch, self.ranges, p.max_pages, p.pages, p.window_left or 0,
                WINDOW=p.window_left is not None,
            ),
            "logits": logits_group(p),
            "layout": RowLayout(p.heads, p.kv_heads, chunks, rows, p.tokens),
            "dots": dot_options(
                p, target,
                RAW_QUERIES=p.layout.is_latent and (p.key_dtype == p.query_dtype or t.convert_once),
                OPAQUE=t.opaque,
                FORM=t.form,
                BIASED=t.form == "int8_split",
            ),
            "BLOCK": t.block,
            "LANES": lanes,
            "ROUNDS": -(-power_of_two(p.batch) // lanes),
            "SPLITS": t.splits or 0,
            "SETUP_TILES": 0 if t.splits else t.setup_tiles,
            "PTX": ptx_level(target),
        }  # fmt: skip

    def bind(self, target):
        bound = super().bind(target)
        if self.merges_at_end or not (self.tiles.form and compat.has_gluon()):
            return bound
        from ejkernel.kernels.triton.serving import mla_decode_sm90

        if not mla_decode_sm90.is_supported(self.problem, self.tiles):
            return bound
        launch = mla_decode_sm90.LatentSplit(self, operands=self.operands)
        return replace(launch.bind(target), stand_in=bound)
