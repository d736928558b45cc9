"""Linear attention along a segment: chunks one after the other, the state in registers.

For every row t of a head, d being the decays of the state (``gates``), accumulated in float32:

    H_t = d_t H_{t-1} + k_t v_t^T          o_t = scale q_t H_t

Inside a chunk this is two products of rows with rows; the state stands for all rows before it:

    o = (scale q k^T . D) v + scale exp(since) q H;     H <- exp(all) H + k^T (exp(rest) v)

D[t, s] is the decay between two rows, ``since`` that of a row since the state before the chunk,
``rest`` that until the state after it.

Decays per channel are in the arrays that have these channels, and in the products of their rows,
before a walk begins (``prepare``). What comes out per decaying channel is no walk's
(``channel_gradient``).

*One core.* Gradients are the same sum with other roles. With dH running from the last row to the
first over dH_t = d_{t+1} dH_{t+1} + scale q_t^T do_t,

    dq_t = scale do_t H_t^T: query do, key v, value k      dv_s = k_s dH_s: query k, key q, value do
    dk_s = v_s dH_s^T: query v, key do, value q, transposed states

and the decay between two rows does not ask which of them reads. LATER walks from the last row on.
Where one program holds a whole state, the last two are one walk (``read_gradients``).

Work split: a *segment* of some chunks, one head, some columns of the values. Segments start from
states that ``scan`` passes between them; before it, this kernel without a query gives what a
segment adds to a state. So only one state a segment goes through memory, in float32, and a single
sequence fills the card. Segments of packed sequences are the pieces of ``common.sequences``: no
chunk has rows of two, and no reset goes unnoticed. Two runs give the same bits.

A chunk has five steps that wait for each other (scores, their decays, state to shared memory, two
products), so that what limits a walk is how many chunks are under way and how often a chunk waits:
two programs a multiprocessor, sums of gates from outside (``gates.gate_sums``; of a constant of
the head, once for all chunks), 64 columns a program, which fit its registers and read q and k twice
from the cache.

Bound, bfloat16 on an H200 (700 TFLOP/s, copies 4.3 TB/s), 2 x 8192 rows, 16 heads of 128, chunks of
64 in segments of 1024: q, k, v, o are 268 MB, k and v once more 134 MB, states 4 x 17 MB:
0.11 ms. 64 columns at a time repeat the scores: 30 GFLOP = 0.043 ms. Measured: the sums 0.043 ms,
o 0.113 ms, of constants 0.04 and 0.106 ms; dq 0.151 ms with what the gate's gradient takes from it;
of float32 (products in three parts, see ``products``) the sums 0.083 ms, o 0.40 ms; whole chunks
have ``split_walk``.

Sources: Yang et al. 2023, "Gated linear attention transformers" (arXiv 2312.06635), section 4; Qin
et al. 2024, "Lightning Attention-2" (arXiv 2401.04658), section 3.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.bound_launch import BoundLaunch, In
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.gates import chunk_sums, constant_sums, pair_decays
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.products import parts, product
from ejkernel.kernels.triton.linear_attention.roles import ARRAYS, GATE_SUMS, Roles
from ejkernel.kernels.triton.linear_attention.rows import load_rows, row_operand, store_rows
from ejkernel.kernels.triton.linear_attention.tiles import (
    FULL,
    Tiles,
    maps_of,
    split_tiles,
    sums_options,
    width,
)
from ejkernel.kernels.triton.plan import bound, results
from ejkernel.kernels.triton.targets import Target

PREPARED = ("pairs", "totals", "value_totals")
RESULTS = ("out", "ends", "decays", "key_decays", "value_decays", "states", "reached")


@triton.jit
def row_weights(
    q, k, pairs, square, high, low, LATER: tl.constexpr, TRANSPOSED: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a row of a chunk takes from every other: their product and its decay; ``pairs`` where
    both come prepared."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    if pairs is not None:
        pairs += square * (CHUNK * CHUNK)
        if TRANSPOSED:
            weights = tl.load(pairs + j * CHUNK + i).to(tl.float32)
        else:
            weights = tl.load(pairs + i * CHUNK + j).to(tl.float32)
    else:
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if high is not None:
            weights = weights * pair_decays(high, low, LATER, CHUNK)
        elif LATER:
            weights = tl.where(i <= j, weights, 0.0)
        else:
            weights = tl.where(i >= j, weights, 0.0)
    return weights


@triton.jit
def decayed(x, rest, scale, OPERAND: tl.constexpr, SPLIT: tl.constexpr):
    """Rows as the state takes them."""
    return parts(x.to(tl.float32) * (tl.exp(rest) * scale)[:, None], OPERAND, SPLIT)


@triton.jit
def add_within(
    o, weights, v, v_low, scale, ASYNCHRONOUS: tl.constexpr, OPERAND: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output from before a chunk and that from inside it."""
    if ASYNCHRONOUS:
        # a product of its own: one sum of both would lie in registers twice, for eight warps
        weights, low = parts(weights, OPERAND, SPLIT)
        o += product(weights, low, v, v_low, None, SPLIT, PRECISION) * scale
    else:
        weights, low = parts(weights * scale, OPERAND, SPLIT)
        o = product(weights, low, v, v_low, o, SPLIT, PRECISION)
    return o


@triton.jit
def walk(
    query,
    key,
    value,
    high_sums,
    low_sums,
    gate_totals,
    constant,
    pairs,
    totals,
    value_totals,
    partner,
    cu,
    starts,
    out,
    ends,
    decays,
    key_decays,
    value_decays,
    states,
    reached,
    rows,
    heads,
    query_heads,
    key_heads,
    value_heads,
    partner_heads,
    dim,
    columns,
    sequences,
    pieces,
    scale_in,
    scale_out,
    constants,
    REVERSED: tl.constexpr,
    SWAPPED: tl.constexpr,
    LATER: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ASYNCHRONOUS: tl.constexpr,
    AHEAD: tl.constexpr,
    MAPS: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dim`` channels of query and key, ``columns`` of the value. SWAPPED: states are stored as
    [columns, dim]. ``states``: those before every chunk of the walk, to be kept. ``reached``: of
    every row and block of columns, what it gets from rows before its chunk times ``partner``."""
    across = (columns + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    column = program % across * COLUMNS
    head = program // across % heads
    slot = (program // across // heads).to(tl.int64)
    batch, begin, end, used = find_segment(cu, slot, pieces, rows, sequences, SEGMENT, LANES)
    steps = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 0)

    d = tl.arange(0, DIM)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    if SWAPPED:
        place = (column + c) * dim + d
    else:
        place = d * columns + column + c
    held = (d < dim) & (c < columns - column)
    state_at = (slot * heads + head) * dim * columns
    state = tl.zeros([DIM, COLUMNS], tl.float32)
    if starts is not None:
        known = held & (d < tl.where(used > begin, dim, 0))
        state = tl.load(starts + state_at + place, mask=known, other=0.0)
    total = 0.0
    key_total = tl.zeros([DIM], tl.float32)
    value_total = tl.zeros([COLUMNS], tl.float32)
    if constant is not None:
        gate = tl.load(constant + batch * constants + head).to(tl.float32)
    base = batch * rows + begin
    each = tl.arange(0, CHUNK)
    DECAYS: tl.constexpr = high_sums is not None or constant is not None
    key_head = head // (heads // key_heads)
    value_head = head // (heads // value_heads)
    query_head = head // (heads // query_heads)
    for t in tl.range(0, steps):
        if LATER:
            at = (steps - 1 - t) * CHUNK
        else:
            at = t * CHUNK
        row = base + at
        chunk_slot = slot * (SEGMENT // CHUNK) + at // CHUNK
        if not SPLIT:
            k = load_rows(
                key, base, used - begin, at, key_head, key_heads, 0, dim, CHUNK, DIM, MAPS
            ).to(OPERAND)  # fmt: skip
        given = load_rows(
            value, base, used - begin, at, value_head, value_heads, column, columns, CHUNK,
            COLUMNS, MAPS,
        )  # fmt: skip
        v, v_low = parts(given, OPERAND, SPLIT)
        if constant is not None:
            high, low, since, rest, every = constant_sums(
                gate, used - begin - at, LATER, REVERSED, CHUNK, MAPS
            )
        elif high_sums is not None:
            high, low, since, rest, every = chunk_sums(
                high_sums, low_sums, gate_totals, row * heads + head, chunk_slot, head, heads,
                used - begin - at, LATER, CHUNK, MAPS,
            )  # fmt: skip
        else:
            high = None
            low = None
        sent, sent_low = v, v_low
        if SPLIT:
            # both operands of the state's product in registers at once would spill
            if DECAYS:
                sent, sent_low = decayed(given, rest, scale_in, OPERAND, SPLIT)
            k = load_rows(
                key, base, used - begin, at, key_head, key_heads, 0, dim, CHUNK, DIM, MAPS
            ).to(OPERAND)  # fmt: skip
        if states is not None:
            kept = (chunk_slot * heads + head) * dim * columns
            tl.store(states + kept + place, state.to(states.dtype.element_ty), mask=held)
        # rows in registers are read from shared memory where they are loaded, and would wait there
        # for the output: where products are asynchronous the state goes on first. Not if it is
        # kept, which takes registers of its own
        before = state
        if query is not None:
            if not AHEAD:
                q = load_rows(
                    query, base, used - begin, at, query_head, query_heads, 0, dim, CHUNK, DIM, MAPS
                ).to(OPERAND)  # fmt: skip
                if not ASYNCHRONOUS:  # scores are small again before the output takes registers
                    weights = row_weights(
                        q, k, pairs, chunk_slot * heads + head, high, low, LATER, TRANSPOSED,
                        CHUNK, PRECISION,
                    )  # fmt: skip
                o = tl.dot(q, state.to(OPERAND), input_precision=PRECISION)
        source, source_low = parts(tl.trans(k), OPERAND, SPLIT)
        if totals is not None:
            total_at = totals + (chunk_slot * heads + head) * dim + tl.arange(0, DIM)
            every_k = tl.load(total_at, mask=tl.arange(0, DIM) < dim, other=0.0)
            key_total += every_k
            state = state * tl.exp(every_k)[:, None]
        if value_totals is not None:
            at_columns = (chunk_slot * heads + head) * columns + column + tl.arange(0, COLUMNS)
            inside = tl.arange(0, COLUMNS) < columns - column
            every_v = tl.load(value_totals + at_columns, mask=inside, other=0.0)
            value_total += every_v
            state = state * tl.exp(every_v)[None, :]
        if DECAYS:
            if not SPLIT:
                sent, sent_low = decayed(given, rest, scale_in, OPERAND, SPLIT)
            state = state * tl.exp(every)
            total += every
            state = product(source, source_low, sent, sent_low, state, SPLIT, PRECISION)
        else:
            added = product(source, source_low, sent, sent_low, None, SPLIT, PRECISION)
            state += added * scale_in

        if query is not None:
            if AHEAD:
                q = load_rows(
                    query, base, used - begin, at, query_head, query_heads, 0, dim, CHUNK, DIM, MAPS
                ).to(OPERAND)  # fmt: skip
                o = tl.dot(q, before.to(OPERAND), input_precision=PRECISION)
            if DECAYS:
                o = o * (tl.exp(since) * scale_out)[:, None]
            else:
                o = o * scale_out
            if partner is not None:
                other = load_rows(
                    partner, base, used - begin, at, head // (heads // partner_heads),
                    partner_heads, column, columns, CHUNK, COLUMNS, MAPS,
                )  # fmt: skip
                met = reached + ((row * heads + head) + each * heads) * across + column // COLUMNS
                tl.store(met, tl.sum(o * other.to(tl.float32), 1), mask=each < end - begin - at)
            if ASYNCHRONOUS:
                weights = row_weights(
                    q, k, pairs, chunk_slot * heads + head, high, low, LATER, TRANSPOSED, CHUNK,
                    PRECISION,
                )  # fmt: skip
            o = add_within(
                o, weights, v, v_low, scale_in * scale_out, ASYNCHRONOUS, OPERAND, SPLIT, PRECISION
            )  # fmt: skip
            store_rows(
                out, o, row, end - begin - at, head, heads, column, columns, CHUNK, COLUMNS, MAPS
            )  # fmt: skip
    if ends is not None:
        tl.store(ends + state_at + place, state, mask=held)
        if decays is not None:
            if column == 0:
                tl.store(decays + slot * heads + head, total)
        if key_decays is not None:
            if column == 0:
                key_at = key_decays + (slot * heads + head) * dim
                tl.store(key_at + tl.arange(0, DIM), key_total, mask=tl.arange(0, DIM) < dim)
        if value_decays is not None:
            n = tl.arange(0, COLUMNS)
            value_at = value_decays + (slot * heads + head) * columns + column
            tl.store(value_at + n, value_total, mask=n < columns - column)


def launch(p: Problem, t: Tiles, target: Target, roles: Roles, shared: bool) -> BoundLaunch:
    """Of the operands that ``roles`` names, in its order; ``shared``: one constant for all batch
    rows."""
    names, made = list(roles.operands(p)), roles.results(p)
    dim, columns = roles.sizes(p)
    # registers that decays between rows would take are free where pairs come prepared
    block = min(t.columns * (2 if p.key_parts or p.value_parts else 1), width(columns))
    split = target.hopper and p.operand == "float32" and t.chunk >= 64
    usual = (t.num_warps, t.num_stages) == (8, 2)  # of no config
    if split and not roles.query and width(dim) <= 128:
        block = min(128, width(columns))  # without a query registers are left
    if split:
        wide = min(block, width(dim)) == 128
        t = split_tiles(t, reads=bool(roles.query), keeps=roles.states, wide=wide)
    maps = maps_of(p, t.chunk, ((dim, width(dim)), (columns, block)), target)
    channels, some = (dim, width(dim)), (columns, block)
    query_heads, key_heads, value_heads = roles.heads(p)
    partner_heads = p.kv_heads if ARRAYS[roles.partner or "q"][1] else p.heads
    row_arrays = {
        "query": (query_heads, *channels),
        "key": (key_heads, *channels),
        "value": (value_heads, *some),
        "partner": (partner_heads, *some),
    }

    def given(name: str) -> Any:
        if name not in names:
            return None
        if name in row_arrays:
            return row_operand(names.index(name), p, t.chunk, *row_arrays[name], maps)
        return In(names.index(name))

    known = kernel_params(p, t, target)
    arguments: dict[str, Any] = {
        **{n: given(n) for n in (*row_arrays, *GATE_SUMS, "constant", *PREPARED, "cu", "starts")},
        **results({name: name in made for name in RESULTS}),
        "query_heads": query_heads,
        "key_heads": key_heads,
        "value_heads": value_heads,
        "partner_heads": partner_heads,
        "dim": dim,
        "columns": columns,
        "scale_in": p.scale if roles.later else 1.0,
        "scale_out": 1.0 if roles.later else p.scale,
        "constants": 0 if shared else p.heads,
        "SWAPPED": roles.swapped,
        "LATER": roles.later != p.reverse,
        "DIM": width(dim),
        "COLUMNS": block,
        "TRANSPOSED": roles.later,
        "ASYNCHRONOUS": target.hopper,
        "AHEAD": target.hopper and not roles.states,
        "MAPS": maps,
        "SPLIT": split,
    }
    grid = (p.batch * known["pieces"] * p.heads * -(-columns // block),)
    found = bound(
        walk, arguments, grid, t.num_warps, t.num_stages, known=known,
        options={} if roles.query or roles.states else sums_options(p, t, target),
        interpreted={"SPLIT": False},  # products of float32 numbers as they are
    )  # fmt: skip
    asked = roles.query and p.scalar and not (roles.partner or roles.ends)
    asked = asked and {p.dtype, p.out, p.narrowest} == {"float32"}  # and not those of float16
    fits = t.chunk == 64 and block == 64 and width(dim) in (64, 128) and maps == FULL
    if split and usual and asked and fits and compat.has_gluon():
        from ejkernel.kernels.triton.linear_attention import split_walk

        return split_walk.launch(known | arguments, found)
    return found
