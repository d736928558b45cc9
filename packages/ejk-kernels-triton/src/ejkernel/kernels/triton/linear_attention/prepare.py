"""What decays per channel of queries and keys make of a chunk, once for all walks.

    pairs[t, s] = sum over channels of q_t exp(decay from s to t) k_s       (``channels.scores``)
    reading_t = q_t exp(since_t)     entering_s = k_s exp(rest_s)     totals = sum of the gates

since the state before the chunk, rest until the one after it. A walk then treats them like
undecayed rows: its columns, which share all of this, do not repeat the halvings. The walk of the
gradients of what was read takes the same arrays, the pairs transposed. For decays per channel of
values they are those of do and v; before there is a do, those of v alone.

Work split: one chunk of one head a program, some channels in turn.

Bound: q, k and the gates are read, two arrays like q and the pairs are written: memory. 2 x 8192
rows, 16 heads of 128, chunks of 64, bfloat16: 201 + 134 + 34 MB = 0.086 ms on an H200. What it
takes is instructions: 4,700 a warp of 4096 programs, 0.08 ms if none ever waited. Measured: near
chunks 0.20 ms, by halving 0.77 ms, one array alone 0.085 ms.
"""

from __future__ import annotations

from ejkernel.kernels.triton.bound_launch import BoundLaunch
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.channels import (
    load_cut,
    middle,
    near,
    scores,
    sees,
    sums,
)
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
from ejkernel.kernels.triton.linear_attention.roles import prepared_results
from ejkernel.kernels.triton.linear_attention.rows import load_rows, row_operand
from ejkernel.kernels.triton.linear_attention.tiles import (
    CHANNELS,
    Tiles,
    channel_options,
    maps_of,
    width,
)
from ejkernel.kernels.triton.plan import bound, inputs, results
from ejkernel.kernels.triton.targets import Target


@triton.jit
def prepare(
    reader,
    source,
    gate,
    cuts,
    cu,
    pairs,
    reading,
    entering,
    totals,
    halves,
    rows,
    heads,
    reader_heads,
    source_heads,
    channels,
    sequences,
    pieces,
    REVERSED: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHANNELS: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    NEAR: tl.constexpr,
    PARTS: tl.constexpr,
    MAPS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    head = program % heads
    slot = (program // heads).to(tl.int64)
    segment = slot // (SEGMENT // CHUNK)
    at = (slot % (SEGMENT // CHUNK)).to(tl.int32) * CHUNK
    batch, begin, end, used = find_segment(cu, segment, pieces, rows, sequences, SEGMENT, LANES)
    length = used - begin
    base = batch * rows + begin
    row = base + at
    each = tl.arange(0, CHUNK)
    # chunks behind the segment may not even begin in the array
    base = tl.where(at < length, base, base - at)
    reader_head = head // (heads // reader_heads)
    source_head = head // (heads // source_heads)
    n = tl.arange(0, CHANNELS)
    found = tl.zeros([CHUNK, CHUNK], tl.float32)
    seen = sees(REVERSED, CHUNK) | (each[:, None] == each[None, :])
    to_middle = load_cut(cuts, 0, CHUNK)
    to_start = load_cut(cuts, 1, CHUNK)
    to_end = load_cut(cuts, 2, CHUNK)
    for channel in tl.range(0, channels, CHANNELS, disable_licm=True):
        if reader is not None:
            q = load_rows(
                reader, base, length, at, reader_head, reader_heads, channel, channels, CHUNK,
                CHANNELS, MAPS,
            ).to(OPERAND)  # fmt: skip
        k = load_rows(
            source, base, length, at, source_head, source_heads, channel, channels, CHUNK,
            CHANNELS, MAPS,
        ).to(OPERAND)  # fmt: skip
        g = load_rows(gate, base, length, at, head, heads, channel, channels, CHUNK, CHANNELS, MAPS)
        g = tl.maximum(g.to(tl.float32), -128.0)
        since_mid, close = middle(to_middle, g, REVERSED, PARTS, LEVELS, NEAR)
        since = sums(to_start, g, PARTS)
        rest = sums(to_end, g, PARTS)
        if reader is not None:
            if close:
                reader_mid = (q.to(tl.float32) * tl.exp(since_mid)).to(OPERAND)
                source_mid = (k.to(tl.float32) * tl.exp(-since_mid)).to(OPERAND)
                met = tl.dot(reader_mid, tl.trans(source_mid), input_precision=PRECISION)
                found += tl.where(seen, met, 0.0)
            else:
                found = scores(found, q, k, g, REVERSED, PARTS, LEVELS, PRECISION)
        place = (row * heads + head) * channels + channel
        offsets = each[:, None] * (heads * channels) + n[None, :]
        # rows behind the last sequence get the zeros that they read as
        written = (each < end - begin - at)[:, None] & (n < channels - channel)[None, :]
        if reader is not None:
            q = (q.to(tl.float32) * tl.exp(since)).to(OPERAND)
            tl.store(reading + place + offsets, q, mask=written)
        k = (k.to(tl.float32) * tl.exp(rest)).to(OPERAND)
        tl.store(entering + place + offsets, k, mask=written)
        # sums of all gates, and of those before and after the middle, stand in single rows
        inside = (n < channels - channel)[None, :]
        last = (each == (0 if REVERSED else CHUNK - 1))[:, None] & inside
        mid = (each == (CHUNK // 2 if REVERSED else CHUNK // 2 - 1))[:, None] & inside
        none = tl.zeros([CHUNK, 1], tl.int32)
        total = totals + (slot * heads + head) * channels + channel + n[None, :] + none
        half = halves + (slot * heads + head) * (2 * channels) + channel + n[None, :] + none
        tl.store(total, since, mask=last)
        tl.store(half, since, mask=mid)
        tl.store(half + channels, since_mid, mask=last)
    if reader is not None:
        square = each[:, None] * CHUNK + each[None, :]
        tl.store(pairs + (slot * heads + head) * (CHUNK * CHUNK) + square, found.to(OPERAND))


def launch(p: Problem, t: Tiles, target: Target, of_values: bool, reads: bool) -> BoundLaunch:
    """Of operands (q), k and the gates of keys, or (do), v and those of values; then cuts, (cu)."""
    known, channels = kernel_params(p, t, target), p.value_dim if of_values else p.dim
    parts = p.value_parts if of_values else p.key_parts
    some = min(CHANNELS, width(channels))
    maps = maps_of(p, t.chunk, ((channels, some),), target)
    made = prepared_results(reads)
    heads = {"reader": p.heads, "source": p.kv_heads, "gate": p.heads}
    given = [name for name in heads if reads or name != "reader"]
    rows = {
        name: row_operand(i, p, t.chunk, heads[name], channels, some, maps)
        for i, name in enumerate(given)
    }
    arguments = {
        **{name: rows.get(name) for name in heads},
        **inputs({"cuts": True, "cu": p.sequences > 0}, first=len(given)),
        **results({name: name in made for name in prepared_results(True)}),
        "reader_heads": p.heads,
        "source_heads": p.kv_heads,
        "channels": channels,
        "CHANNELS": some,
        "NEAR": near(p),
        "PARTS": parts,
        "MAPS": maps,
    }
    grid = (p.batch * known["pieces"] * (t.segment // t.chunk) * p.heads,)
    options = channel_options(p, parts, target)
    return bound(prepare, arguments, grid, t.num_warps, t.num_stages, options, known=known)
