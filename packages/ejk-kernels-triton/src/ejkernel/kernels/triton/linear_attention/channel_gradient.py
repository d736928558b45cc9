"""Gradients of what meets through decaying channels, of keys or of values, and of the gate.

Where channels of values decay, what rows read comes from here as well: o_t is da_t with the values
as b, and asks for neither a nor dH.

With a the array that reads through the decaying channels and b the one that is read (q and k for
keys, do and v for values), c and d the other two, P[t, s] = scale c_t d_s, H the state before the
chunk, dH the gradient of the one after it, and D[t, s] what lies between two rows,

    da_t = sum over s of P[t, s] D[t, s] b_s + scale exp(since_t) c_t H
    db_s = sum over t of P[t, s] D[t, s] a_t + exp(rest_s) d_s dH

channel by channel. The gate of row r is in the exponents of all pairs around it:

    dg_r = sum over t >= r of a_t da_t - sum over s >= r of b_s db_s, in the chunk
         + sum over s of exp(rest_s) b_s (d_s dH) + exp(all) sum of H . dH

*Near* chunks (``channels``) compute just this: one product for da, one for db, one with a matrix of
0 and 1 for the sums. The first two take the same rounded numbers, so that the difference errs like
a sum in float32, by 2^-24 of its terms, and no sum runs past a chunk. Against float64 and with
bfloat16 inputs dg errs by 0.0034 to 0.0036 of its size this way and by 0.0024 to 0.0030 by halving,
as q and k are rounded once more, whether the gates of half a chunk sum up to 1.3 or to 38.

Others go by halving. A row of a cut's later half is reached through e_t a_t, one of its earlier
half through e_s b_s; one product with all pairs of that cut, both ways round, gives the share of da
for the former and of db for the latter. That share times a or b is what an exponent has gathered,
and goes back through the transposed matrix of 0 and 1 that made it. Nothing is subtracted from
anything: gates of any strength lose nothing.

Work split: some channels of one chunk of one head a program; P again for each.

Bound: q, k, v, do, the gate and two states a chunk are read, three gradients written: 2 x 8192
rows, 16 heads of 128, chunks of 64, bfloat16: 336 + 268 + 201 MB = 0.19 ms on an H200. What it
takes is instructions: 2,800 a warp of 16,384 programs, 0.20 ms if none ever waited. Measured: near
chunks 0.44 ms, by halving 1.5 ms; what rows read, alone, 0.21 ms.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton.bound_launch import BoundLaunch, TensorMap
from ejkernel.kernels.triton.common.sequences import find_segment
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.channels import load_cut, middle, near, sees
from ejkernel.kernels.triton.linear_attention.gather import gather_by_halves, gather_near
from ejkernel.kernels.triton.linear_attention.opening import kernel_params
from ejkernel.kernels.triton.linear_attention.problem import Problem
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
def load_state(
    states,
    which,
    dim,
    columns,
    row,
    column,
    there,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    MAPS: tl.constexpr,
):
    """From ``row`` and ``column`` on of a state [dim, columns]; whatever if it is not there."""
    if MAPS:
        tile = states.load([(which * dim + row).to(tl.int32), column])
    else:
        r = tl.arange(0, ROWS)[:, None]
        c = tl.arange(0, WIDTH)[None, :]
        states += (which * dim + row) * columns + column
        inside = (r < tl.where(there, dim - row, 0)) & (c < columns - column)
        tile = tl.load(states + r * columns + c, mask=inside, other=0.0)
    return tile


@triton.jit
def channel_gradient(
    reader,
    source,
    reader_other,
    source_other,
    gate,
    halves,
    cuts,
    pairs,
    totals,
    states,
    dstates,
    cu,
    dreader,
    dsource,
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
    NEAR: tl.constexpr,
    PARTS: tl.constexpr,
    MAPS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a, b, c, d are reader, source, reader_other, source_other; with ``pairs`` and
    ``totals`` the last two come prepared. Without ``dsource`` only what rows read is wanted."""
    across = (channels + CHANNELS - 1) // CHANNELS
    program = tl.program_id(0)
    channel = program % across * CHANNELS
    head = program // across % heads
    slot = (program // across // heads).to(tl.int64)
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
    reader_other_head = head // (heads // reader_other_heads)
    source_other_head = head // (heads // source_other_heads)

    n = tl.arange(0, CHANNELS)
    m = tl.arange(0, OTHERS)
    if pairs is not None:
        square = pairs + (slot * heads + head) * (CHUNK * CHUNK)
        products = tl.load(square + each[:, None] * CHUNK + each[None, :]).to(tl.float32)
    else:
        products = tl.zeros([CHUNK, CHUNK], tl.float32)
    reached = tl.zeros([CHUNK, CHANNELS], tl.float32)
    leaving = tl.zeros([CHUNK, CHANNELS], tl.float32)
    outside = tl.zeros([CHANNELS], tl.float32)
    # by address: all three are on their way at once
    a = None
    if reader is not None:
        a = load_rows(
            reader, base, length, at, reader_head, reader_heads, channel, channels, CHUNK, CHANNELS,
            0,
        )  # fmt: skip
    b = load_rows(
        source, base, length, at, source_head, source_heads, channel, channels, CHUNK, CHANNELS, 0
    )
    g = load_rows(gate, base, length, at, head, heads, channel, channels, CHUNK, CHANNELS, 0)
    there = at < length  # chunks without rows have no states
    for other in tl.range(0, others, OTHERS):
        c = load_rows(
            reader_other, base, length, at, reader_other_head, reader_other_heads, other, others,
            CHUNK, OTHERS, MAPS,
        ).to(OPERAND)  # fmt: skip
        d = load_rows(
            source_other, base, length, at, source_other_head, source_other_heads, other, others,
            CHUNK, OTHERS, MAPS,
        ).to(OPERAND)  # fmt: skip
        if OF_VALUES:
            h = load_state(
                states, slot * heads + head, others, channels, other, channel, there, OTHERS,
                CHANNELS, MAPS,
            )  # fmt: skip
        else:
            h = load_state(
                states, slot * heads + head, channels, others, channel, other, there, CHANNELS,
                OTHERS, MAPS,
            )  # fmt: skip
            h = tl.trans(h)
        reached = tl.dot(c, h.to(OPERAND), reached, input_precision=PRECISION)
        if pairs is None:
            products = tl.dot(c, tl.trans(d), products, input_precision=PRECISION)
        if dstates is not None:
            if OF_VALUES:
                dh = load_state(
                    dstates, slot * heads + head, others, channels, other, channel, there, OTHERS,
                    CHANNELS, MAPS,
                )  # fmt: skip
            else:
                dh = load_state(
                    dstates, slot * heads + head, channels, others, channel, other, there,
                    CHANNELS, OTHERS, MAPS,
                )  # fmt: skip
                dh = tl.trans(dh)
            leaving = tl.dot(d, dh.to(OPERAND), leaving, input_precision=PRECISION)
            both = h.to(tl.float32) * dh.to(tl.float32)
            if totals is not None:
                total_at = totals + (slot * heads + head) * others + other
                every = tl.exp(tl.load(total_at + m, mask=m < others - other, other=0.0))
                both = both * every[:, None]
            outside += tl.sum(both, 0)

    written = (each < end - begin - at)[:, None] & (n < channels - channel)[None, :]
    place = (row * heads + head) * channels + channel
    offsets = each[:, None] * (heads * channels) + n[None, :]
    seen = sees(REVERSED, CHUNK) | (each[:, None] == each[None, :])
    met = tl.where(seen, products * scale, 0.0).to(OPERAND)
    reached = reached * scale
    g = tl.maximum(g.to(tl.float32), -128.0)
    since, close = middle(load_cut(cuts, 0, CHUNK), g, REVERSED, PARTS, LEVELS, NEAR)
    half = halves + (slot * heads + head) * (2 * channels) + channel + n
    before = tl.load(half, mask=n < channels - channel, other=0.0)
    after = tl.load(half + channels, mask=n < channels - channel, other=0.0)
    outside = outside * tl.exp(before + after)
    if dreader is not None:
        dreader += place
    if dsource is not None:
        dsource += place
        dgate += place
    if close:
        gather_near(
            a, b, since, before, after, met, reached, leaving, outside, offsets, written, dreader,
            dsource, dgate, cuts, REVERSED, PRECISION,
        )  # fmt: skip
    else:
        gather_by_halves(
            a, b, g, met, reached, leaving, outside, offsets, written, dreader,
            dsource, dgate, cuts, REVERSED, PARTS, LEVELS, PRECISION,
        )  # fmt: skip


def launch(
    p: Problem, t: Tiles, target: Target, of_values: bool, wanted: tuple[tuple[str, str], ...]
) -> BoundLaunch:
    """Of operands (a), b, c, d, the gate, sums of its halves, cuts, (pairs and totals of the other
    gate), states, (their gradients) before every chunk, (cu): a and gradients of states where
    ``wanted``, of dreader, dsource and dgate with their dtypes, are more than what rows read."""
    known, made = kernel_params(p, t, target), [name for name, _ in wanted]
    channels, others = (p.value_dim, p.dim) if of_values else (p.dim, p.value_dim)
    mine, other = (p.value_parts, p.key_parts) if of_values else (p.key_parts, p.value_parts)
    gradients = "dsource" in made
    some = min(CHANNELS if gradients else 2 * CHANNELS, width(channels))
    rest = min(64 if p.operand == "bfloat16" else 32, width(others))
    maps = maps_of(p, t.chunk, ((channels, some), (others, rest)), target)
    # a, b, c, d of keys are q, k, do, v; of values do, v, q, k; prepared ones have all heads
    second = p.heads if other else p.kv_heads
    arrays = {
        "reader": (p.heads, channels, some),
        "source": (p.kv_heads, channels, some),
        "reader_other": (p.heads, others, rest),
        "source_other": (second, others, rest),
        "gate": (p.heads, channels, some),
    }
    operands = {
        **dict.fromkeys(arrays, True),
        "reader": gradients,
        "halves": True,
        "cuts": True,
        "pairs": other > 0,
        "totals": other > 0 and gradients,
        "states": True,
        "dstates": gradients,
        "cu": p.sequences > 0,
    }
    chunks = p.batch * known["pieces"] * (t.segment // t.chunk) * p.heads

    def given(name: str, operand: Any) -> Any:
        if operand is not None and name in ("reader_other", "source_other"):
            return row_operand(operand.index, p, t.chunk, *arrays[name], maps)
        if operand is not None and name in ("states", "dstates") and maps:
            block = (rest, some) if of_values else (some, rest)
            return TensorMap(operand.index, (chunks * p.dim, p.value_dim), block)
        return operand

    arguments: dict[str, Any] = {
        **{name: given(name, operand) for name, operand in inputs(operands).items()},
        **results({name: name in made for name in ("dreader", "dsource", "dgate")}),
        **{f"{name}_heads": arrays[name][0] for name in arrays if name != "gate"},
        "channels": channels,
        "others": others,
        "OF_VALUES": of_values,
        "CHANNELS": some,
        "OTHERS": rest,
        "NEAR": near(p, subtracts=gradients),
        "PARTS": mine,
        "MAPS": maps,
    }
    return bound(
        channel_gradient,
        arguments,
        (chunks * -(-channels // some),),
        t.num_warps,
        t.num_stages,
        channel_options(p, mine, target) if gradients else {},
        known=known,
    )
