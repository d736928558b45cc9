"""Decays per channel of queries and keys applied to a chunk, once for all passes.

    pairs[t, s] = sum over channels of q_t exp(decay from s to t) k_s     (``channels.add_scores``)
    q_decayed_t = q_t exp(since_t)   k_decayed_s = k_s exp(until_s)   totals = sum of the gates

since the state before the chunk, until the state after it. A ``chunk_loop`` then treats them like
rows without decays: its columns, which share all of this, do not repeat the halvings. The pass of
the gradients of keys and values takes the same arrays, the pairs transposed. For decays per channel
of values the two arrays are do and v; before there is a do, v alone.

Work split: one chunk of one head a program, some channels one after another.

Bound: q, k and the gates are read, two arrays like q and the pairs are written: memory. 2 x 8192
rows, 16 heads of 128, chunks of 64, bfloat16: 201 + 134 + 34 MB = 0.086 ms on an H200. The limit is
instructions: 4,700 a warp of 4096 programs, 0.08 ms if none ever waited. Measured: near chunks
0.20 ms, by halving 0.77 ms, one array alone 0.085 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.launch import BATCHED, struct
from ejkernel.kernels.triton.linear_attention.channels import (
    add_scores,
    decay_from_middle,
    load_cut_matrix,
    matrix_sums,
    near_limit,
    visible_rows,
)
from ejkernel.kernels.triton.linear_attention.launch import LinearLaunch
from ejkernel.kernels.triton.linear_attention.rows import HeadRows, find_chunk, load_chunk_rows
from ejkernel.kernels.triton.linear_attention.tiles import CHANNELS, channel_options, maps_of, width


class Sizes(NamedTuple):
    """Sizes of a call: heads of all arrays, of the one that reads and of the one that is read."""

    rows: int
    heads: int
    reader_heads: int
    source_heads: int
    channels: int
    sequences: int
    pieces: int


class Tile(NamedTuple):
    """Constants; PARTS: bfloat16 parts of a gate, NEAR: see ``channels.near_limit``."""

    REVERSED: bool
    CHUNK: int
    SEGMENT: int
    CHANNELS: int
    LANES: int
    LEVELS: int
    NEAR: float
    PARTS: int
    MAPS: int
    DTYPE: Any
    PRECISION: str


@triton.jit
def decay_channels(
    reader, source, gate, cut_matrices, cu, pairs, reader_decayed, source_decayed, totals, halves,
    sizes, tile,
):  # fmt: skip
    """Writes scores and decayed rows of one chunk and head; without ``reader`` only source rows."""
    REVERSED: tl.constexpr = tile.REVERSED
    CHUNK: tl.constexpr = tile.CHUNK
    CHANNELS: tl.constexpr = tile.CHANNELS
    DTYPE: tl.constexpr = tile.DTYPE
    heads, channels = sizes.heads, sizes.channels
    program = tl.program_id(0)
    head = program % heads
    slot = (program // heads).to(tl.int64)
    chunk = find_chunk(cu, slot, sizes, CHUNK, tile.SEGMENT, tile.LANES)
    chunk_row = tl.arange(0, CHUNK)
    reader_head = head // (heads // sizes.reader_heads)
    source_head = head // (heads // sizes.source_heads)
    reader_rows = HeadRows(reader, reader_head, sizes.reader_heads, channels)
    source_rows = HeadRows(source, source_head, sizes.source_heads, channels)
    gate_rows = HeadRows(gate, head, heads, channels)
    n = tl.arange(0, CHANNELS)
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    visible = visible_rows(REVERSED, CHUNK) | (chunk_row[:, None] == chunk_row[None, :])
    to_middle = load_cut_matrix(cut_matrices, 0, CHUNK)
    to_start = load_cut_matrix(cut_matrices, 1, CHUNK)
    to_end = load_cut_matrix(cut_matrices, 2, CHUNK)
    for channel in tl.range(0, channels, CHANNELS, disable_licm=True):
        if reader is not None:
            q = load_chunk_rows(reader_rows, chunk, channel, CHUNK, CHANNELS, tile.MAPS).to(DTYPE)
        k = load_chunk_rows(source_rows, chunk, channel, CHUNK, CHANNELS, tile.MAPS).to(DTYPE)
        g = load_chunk_rows(gate_rows, chunk, channel, CHUNK, CHANNELS, tile.MAPS)
        g = tl.maximum(g.to(tl.float32), -128.0)
        since_mid, is_near = decay_from_middle(
            to_middle, g, REVERSED, tile.PARTS, tile.LEVELS, tile.NEAR
        )
        since = matrix_sums(to_start, g, tile.PARTS)
        until = matrix_sums(to_end, g, tile.PARTS)
        if reader is not None:
            if is_near:
                reader_mid = (q.to(tl.float32) * tl.exp(since_mid)).to(DTYPE)
                source_mid = (k.to(tl.float32) * tl.exp(-since_mid)).to(DTYPE)
                products = tl.dot(reader_mid, tl.trans(source_mid), input_precision=tile.PRECISION)
                scores += tl.where(visible, products, 0.0)
            else:
                scores = add_scores(
                    scores, q, k, g, REVERSED, tile.PARTS, tile.LEVELS, tile.PRECISION
                )
        position = (chunk.row * heads + head) * channels + channel
        offsets = chunk_row[:, None] * (heads * channels) + n[None, :]
        # rows after the last sequence get the zeros that they read as
        written = (chunk_row < chunk.size - chunk.at)[:, None] & (n < channels - channel)[None, :]
        if reader is not None:
            q = (q.to(tl.float32) * tl.exp(since)).to(DTYPE)
            tl.store(reader_decayed + position + offsets, q, mask=written)
        k = (k.to(tl.float32) * tl.exp(until)).to(DTYPE)
        tl.store(source_decayed + position + offsets, k, mask=written)
        # sums of all gates, and of the gates before and after the middle, stand in single rows
        inside = (n < channels - channel)[None, :]
        last = (chunk_row == (0 if REVERSED else CHUNK - 1))[:, None] & inside
        mid = (chunk_row == (CHUNK // 2 if REVERSED else CHUNK // 2 - 1))[:, None] & inside
        none = tl.zeros([CHUNK, 1], tl.int32)
        total = totals + (slot * heads + head) * channels + channel + n[None, :] + none
        half = halves + (slot * heads + head) * (2 * channels) + channel + n[None, :] + none
        tl.store(total, since, mask=last)
        tl.store(half, since, mask=mid)
        tl.store(half + channels, since_mid, mask=last)
    if reader is not None:
        square = chunk_row[:, None] * CHUNK + chunk_row[None, :]
        tl.store(pairs + (slot * heads + head) * (CHUNK * CHUNK) + square, scores.to(DTYPE))


@dataclass(frozen=True)
class DecayChannels(LinearLaunch):
    """Launch of ``decay_channels``: q, k and gates of keys, or do, v and gates of values."""

    kernel = decay_channels
    batching: ClassVar = dict.fromkeys(("reader", "source", "gate", "cut_matrices", "cu"), BATCHED)

    of_values: bool

    @property
    def channels(self) -> int:
        """Channels that decay."""
        return self.problem.value_dim if self.of_values else self.problem.dim

    @property
    def parts(self) -> int:
        """Bfloat16 parts of a gate."""
        return self.problem.value_parts if self.of_values else self.problem.key_parts

    def outputs(self):
        p, chunk, reads = self.problem, self.tiles.chunk, self.has("reader")
        rows = struct(p.compute_dtype, p.batch, p.rows, p.heads, self.channels)
        return {
            "pairs": struct(p.compute_dtype, self.chunks, p.heads, chunk, chunk) if reads else None,
            "reader_decayed": rows if reads else None,
            "source_decayed": rows,
            "totals": struct("float32", self.chunks, p.heads, self.channels),
            "halves": struct("float32", self.chunks, p.heads, 2, self.channels),
        }

    def grid(self, target):
        return (self.chunks * self.problem.heads,)

    def options(self, target):
        return {**super().options(target), **channel_options(self.problem, self.parts, target)}

    def arguments(self, target):
        p, t, channels = self.problem, self.tiles, self.channels
        block = min(CHANNELS, width(channels))
        maps = maps_of(p, t.chunk, ((channels, block),), target)
        return {
            "reader": self.rows_of("reader", p.heads, channels, block, maps),
            "source": self.rows_of("source", p.kv_heads, channels, block, maps),
            "gate": self.rows_of("gate", p.heads, channels, block, maps),
            "sizes": Sizes(
                p.rows, p.heads, p.heads, p.kv_heads, channels, p.sequences, self.pieces
            ),
            "tile": Tile(
                REVERSED=p.reverse,
                CHUNK=t.chunk,
                SEGMENT=t.segment,
                CHANNELS=block,
                LANES=self.lanes,
                LEVELS=self.levels,
                NEAR=near_limit(p),
                PARTS=self.parts,
                MAPS=maps,
                DTYPE=self.compute_dtype,
                PRECISION=self.precision(target),
            ),
        }
