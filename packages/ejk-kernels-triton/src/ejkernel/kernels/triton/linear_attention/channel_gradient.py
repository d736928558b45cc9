"""The gradient of a decay per channel, of keys or of values.

With a the array that reads through the decaying channels and b the one that is read (q and k for
keys, do and v for values), c and d the other two, P[t, s] = scale c_t d_s, H the state before the
chunk and dH the gradient of the one after it, the exponents of a chunk gather, channel by channel,

    halving   e_t a_t sum_s P[t, s] e_s b_s for rows that read, the same with a and b for the others
    since     scale exp(since_t) a_t (c_t H)
    rest      exp(rest_s) b_s (d_s dH)
    all       exp(all) sum of H . dH

and every gate gets what the exponents that it is in have gathered: a product with the transposed
matrix of 0 and 1 that made them (``channels``). Nothing is subtracted from anything.

Work split: some channels of one chunk of one head a program; P again for each.

Bound: as ``gate_gradient``, and the gradient itself in float32: 268 + 268 + 134 MB = 0.16 ms for
2 x 8192 rows, 16 heads of 128, chunks of 64, bfloat16 on an H200. Products with 0 and 1, and P for
every 16 channels, are 190 GFLOP = 0.27 ms: arithmetic.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from ejkernel.kernels.triton.common.sequences import find_piece, lane_count, piece_count
from ejkernel.kernels.triton.launch import In, Launch, Out
from ejkernel.kernels.triton.linear_attention.channels import crossing, edges, reach, scores, sums
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.rows import load_rows, maps_of, row_operand
from ejkernel.kernels.triton.linear_attention.tiles import Tiles, width
from ejkernel.kernels.triton.targets import Target


@triton.jit
def channel_gradient(
    reader,
    source,
    reader_other,
    source_other,
    gate,
    gate_other,
    states,
    dstates,
    cu,
    dgate,
    rows,
    heads,
    reader_heads,
    source_heads,
    reader_other_heads,
    source_other_heads,
    channels,
    others,
    sequences,
    pieces,
    scale,
    OF_VALUES: tl.constexpr,
    REVERSED: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHANNELS: tl.constexpr,
    OTHERS: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    OTHER_PARTS: tl.constexpr,
    MAPS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a, b, c, d are reader, source, reader_other, source_other."""
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    channel = program % across * CHANNELS
    head = program // across % heads
    slot = (program // across // heads).to(tl.int64)
    segment = slot // (SEGMENT // CHUNK)
    at = (slot % (SEGMENT // CHUNK)).to(tl.int32) * CHUNK
    batch = segment // pieces
    piece = (segment % pieces).to(tl.int32)
    begin = piece * SEGMENT
    end = tl.minimum(rows, begin + SEGMENT)
    used = end
    if cu is not None:
        cu += batch * (sequences + 1)
        sequence, start, end, begin = find_piece(cu, sequences, rows, piece, SEGMENT, LANES)
        end = tl.minimum(end, begin + SEGMENT)
        begin = tl.maximum(begin, start)
        used = tl.where(sequence < sequences, end, begin)
    length = used - begin
    base = batch * rows + begin
    row = base + at
    each = tl.arange(0, CHUNK)
    # chunks behind the segment may not even begin in the array
    base = tl.where(at < length, base, base - at)
    reader_head = head // (heads // reader_heads)
    source_head = head // (heads // source_heads)
    reader_other_head = head // (heads // reader_other_heads)
    source_other_head = head // (heads // source_other_heads)

    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    reached = tl.zeros([CHUNK, CHANNELS], tl.float32)
    leaving = tl.zeros([CHUNK, CHANNELS], tl.float32)
    outside = tl.zeros([CHANNELS], tl.float32)
    n = tl.arange(0, CHANNELS)
    state_at = (slot * heads + head) * channels * others
    wide = tl.where(at < length, channels - channel, 0)  # chunks without rows have no states
    for other in tl.range(0, others, OTHERS):
        c = load_rows(
            reader_other, base, length, at, reader_other_head, reader_other_heads, other, others,
            CHUNK, OTHERS, MAPS,
        ).to(OPERAND)  # fmt: skip
        d = load_rows(
            source_other, base, length, at, source_other_head, source_other_heads, other, others,
            CHUNK, OTHERS, MAPS,
        ).to(OPERAND)  # fmt: skip
        m = tl.arange(0, OTHERS)[:, None]
        if OF_VALUES:
            place = (other + m) * channels + channel + n[None, :]
        else:
            place = (channel + n[None, :]) * others + other + m
        held = (m < others - other) & (n[None, :] < wide)
        h = tl.load(states + state_at + place, mask=held, other=0.0)
        dh = tl.load(dstates + state_at + place, mask=held, other=0.0)
        both = h.to(tl.float32) * dh.to(tl.float32)
        if gate_other is not None:
            g = load_rows(
                gate_other, base, length, at, head, heads, other, others, CHUNK, OTHERS, MAPS
            )  # fmt: skip
            g = tl.maximum(g.to(tl.float32), -128.0)
            products += scores(c, d, g, REVERSED, REVERSED, OTHER_PARTS, LEVELS, PRECISION)
            since_other, rest_other = edges(g, REVERSED, REVERSED, OTHER_PARTS)
            c = (c.to(tl.float32) * tl.exp(since_other)).to(OPERAND)
            d = (d.to(tl.float32) * tl.exp(rest_other)).to(OPERAND)
            both = both * tl.exp(tl.sum(g, 0))[:, None]
        else:
            products = tl.dot(c, tl.trans(d), products, input_precision=PRECISION)
        outside += tl.sum(both, 0)
        reached = tl.dot(c, h.to(OPERAND), reached, input_precision=PRECISION)
        leaving = tl.dot(d, dh.to(OPERAND), leaving, input_precision=PRECISION)

    a = load_rows(
        reader, base, length, at, reader_head, reader_heads, channel, channels, CHUNK, CHANNELS,
        MAPS,
    ).to(tl.float32)  # fmt: skip
    b = load_rows(
        source, base, length, at, source_head, source_heads, channel, channels, CHUNK, CHANNELS,
        MAPS,
    ).to(tl.float32)  # fmt: skip
    g = load_rows(gate, base, length, at, head, heads, channel, channels, CHUNK, CHANNELS, MAPS)
    g = tl.maximum(g.to(tl.float32), -128.0)
    since, rest = edges(g, REVERSED, REVERSED, PARTS)
    products = products * scale
    if REVERSED:
        first = reach(CHUNK, 0, REVERSED, CHUNK)
        second = reach(CHUNK, 1, REVERSED, CHUNK)
    else:
        first = reach(CHUNK, 1, REVERSED, CHUNK)
        second = reach(CHUNK, 0, REVERSED, CHUNK)
    found = sums(tl.trans(first), a * reached * tl.exp(since) * scale, 3)
    found += sums(tl.trans(second), b * leaving * tl.exp(rest), 3)
    found += (outside * tl.exp(tl.sum(g, 0)))[None, :]
    for level in tl.static_range(LEVELS):
        cut = reach(1 << level, 2, REVERSED, CHUNK)
        e = tl.exp(sums(cut, g, PARTS))
        met = tl.where(crossing(1 << level, REVERSED, CHUNK), products, 0.0).to(OPERAND)
        read = tl.dot(met, (b * e).to(OPERAND), input_precision=PRECISION)
        sent = tl.dot(tl.trans(met), (a * e).to(OPERAND), input_precision=PRECISION)
        found += sums(tl.trans(cut), e * (read * a + sent * b), 3)
    written = (each < end - begin - at)[:, None] & (n < channels - channel)[None, :]
    pointers = dgate + (row * heads + head) * channels + channel
    pointers += each[:, None] * (heads * channels) + n[None, :]
    tl.store(pointers, found, mask=written)


def launch(p: Problem, t: Tiles, target: Target, of_values: bool) -> Launch:
    """Of operands q, k, v, do, the gates of keys and of values as far as they are given, states
    and their gradients before every chunk, (cu)."""
    pieces = piece_count(p.rows, p.sequences, t.segment)
    channels, others = (p.value_dim, p.dim) if of_values else (p.dim, p.value_dim)
    # halvings take registers; eight warps have twice as many
    warps = max(8, t.num_warps) if t.chunk >= 64 else t.num_warps
    some, rest = min(16, width(channels)), min(t.columns, width(others))
    maps = maps_of(p, t.chunk, ((channels, some), (others, rest)), target)
    # q, k, v, do: a, b, c, d of keys are q, k, do, v; of values do, v, q, k
    order = (3, 2, 0, 1) if of_values else (0, 1, 3, 2)
    heads = [(p.heads, p.kv_heads, p.kv_heads, p.heads)[i] for i in order]
    names = ("reader", "source", "reader_other", "source_other")
    sizes = ((channels, some), (channels, some), (others, rest), (others, rest))
    gates = ["key"] * bool(p.key_parts) + ["value"] * bool(p.value_parts)
    mine, other = ("value", "key") if of_values else ("key", "value")
    parts = {"key": p.key_parts, "value": p.value_parts}

    def gate(name: str, size: tuple[int, int]) -> Any:
        if name not in gates:
            return None
        return row_operand(4 + gates.index(name), p, t.chunk, p.heads, *size, maps)

    n = 4 + len(gates)
    arguments: dict[str, Any] = {
        **{
            name: row_operand(i, p, t.chunk, count, *size, maps)
            for name, i, count, size in zip(names, order, heads, sizes, strict=True)
        },
        "gate": gate(mine, (channels, some)),
        "gate_other": gate(other, (others, rest)),
        "states": In(n),
        "dstates": In(n + 1),
        "cu": In(n + 2) if p.sequences else None,
        "dgate": Out(0),
        "rows": p.rows,
        "heads": p.heads,
        **{f"{name}_heads": count for name, count in zip(names, heads, strict=True)},
        "channels": channels,
        "others": others,
        "sequences": p.sequences,
        "pieces": pieces,
        "scale": float(p.scale),
    }
    constants = {
        "OF_VALUES": of_values,
        "REVERSED": p.reverse,
        "CHUNK": t.chunk,
        "SEGMENT": t.segment,
        "CHANNELS": some,
        "OTHERS": rest,
        "LANES": lane_count(p.sequences),
        "LEVELS": t.chunk.bit_length() - 1,
        "PARTS": parts[mine],
        "OTHER_PARTS": parts[other],
        "MAPS": maps,
        "OPERAND": getattr(tl, p.operand),
        "PRECISION": "tf32" if target.platform == "cuda" else "ieee",
    }
    grid = (p.batch * pieces * (t.segment // t.chunk) * p.heads * -(-channels // some),)
    return Launch(channel_gradient, arguments, constants, grid, warps, t.num_stages)
