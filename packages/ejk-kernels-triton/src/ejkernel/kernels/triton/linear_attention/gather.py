"""What a chunk of rows makes of its gradients, near or by halving: see ``channel_gradient``.

``met``: products of the other two arrays, of rows that read with those they see and themselves.
``reached``, ``leaving``: what rows get of the state before the chunk, and of the gradient of the
one after it, not yet decayed. ``outside``: what every gate of the chunk gets of both. Without
``dsource`` only what rows read is wanted.
"""

from __future__ import annotations

from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.linear_attention.channels import (
    load_cut,
    meeting,
    reach,
    reads,
    sees,
    sums,
)


@triton.jit
def put(pointer, offsets, x, written):
    tl.store(pointer + offsets, x.to(pointer.dtype.element_ty), mask=written)


@triton.jit
def gather_near(
    a,
    b,
    since,
    before,
    after,
    met,
    reached,
    leaving,
    outside,
    offsets,
    written,
    dreader,
    dsource,
    dgate,
    cuts,
    REVERSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """From the middle of the chunk, with one product for each gradient."""
    CHUNK: tl.constexpr = b.shape[0]
    up = tl.exp(since)
    down = tl.exp(-since)
    entering = (b.to(tl.float32) * down).to(met.dtype)
    read = tl.dot(met, entering, input_precision=PRECISION)
    read += reached * tl.exp(before)[None, :]
    if dreader is not None:
        put(dreader, offsets, up * read, written)
    if dsource is not None:
        reading = (a.to(tl.float32) * up).to(met.dtype)
        sent = tl.dot(tl.trans(met), reading, input_precision=PRECISION)
        leaving = leaving * tl.exp(after)[None, :]
        sent += leaving
        put(dsource, offsets, down * sent, written)
        # the diagonal, which no gate decays, is in both
        entering = entering.to(tl.float32)
        gathered = reading.to(tl.float32) * read - entering * sent
        found = sums(load_cut(cuts, 3, CHUNK), gathered, 3)
        found += (outside + tl.sum(entering * leaving, 0))[None, :]
        put(dgate, offsets, found, written)


@triton.jit
def gather_by_halves(
    a,
    b,
    gate,
    met,
    reached,
    leaving,
    outside,
    offsets,
    written,
    dreader,
    dsource,
    dgate,
    cuts,
    REVERSED: tl.constexpr,
    PARTS: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Cut by cut, without a difference."""
    CHUNK: tl.constexpr = b.shape[0]
    r = tl.arange(0, CHUNK)
    own = tl.where(r[:, None] == r[None, :], met, 0.0)
    da = tl.exp(sums(load_cut(cuts, 1, CHUNK), gate, PARTS)) * reached
    if dsource is not None:
        db = tl.exp(sums(load_cut(cuts, 2, CHUNK), gate, PARTS)) * leaving
        beginning = load_cut(cuts, 3, CHUNK)
        found = sums(beginning, a.to(tl.float32) * da, 3) + outside[None, :]
        found += sums(1.0 - beginning, b.to(tl.float32) * db, 3)
        db += tl.dot(own, a.to(met.dtype), input_precision=PRECISION)
    da += tl.dot(own, b.to(met.dtype), input_precision=PRECISION)
    met = tl.where(sees(REVERSED, CHUNK), met, 0.0)
    if dsource is not None:
        met += tl.trans(met)  # every pair of rows both ways round
    for level in tl.range(0, LEVELS):
        cut = reach(level, REVERSED, CHUNK)
        e = tl.exp(sums(cut, gate, PARTS))
        reading = reads(level, REVERSED, CHUNK)
        one = b.to(tl.float32)
        if dsource is not None:
            one = tl.where(reading, a, b).to(tl.float32)
        pairs = tl.where(meeting(level, CHUNK), met, 0.0)
        got = e * tl.dot(pairs, (one * e).to(met.dtype), input_precision=PRECISION)
        da += tl.where(reading, got, 0.0)
        if dsource is not None:
            db += tl.where(reading, 0.0, got)
            found += sums(tl.trans(cut), got * one, 3)
    if dreader is not None:
        put(dreader, offsets, da, written)
    if dsource is not None:
        put(dsource, offsets, db, written)
        put(dgate, offsets, found, written)
