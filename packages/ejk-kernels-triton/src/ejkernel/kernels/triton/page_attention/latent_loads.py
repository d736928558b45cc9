"""Latent decoding on Hopper: which rows of the cache a share has, and the warp that loads them.

Rows come by TMA into a ring of places, as many steps ahead as there are places, those of the
share's next sequence too: between two sequences there is no wait for memory. A page is looked up a
step before its rows are asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ejkernel.kernels.triton.bound_launch import RUNS as _RUNS
from ejkernel.kernels.triton.common.pages import block_pages, run_between
from ejkernel.kernels.triton.page_attention.shares import (
    cost,
    extent,
    find_share,
    part_of_sequence,
    store_starts,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

RUNS = gl.constexpr(_RUNS)


class Share(NamedTuple):
    """Work of a program: from ``t`` to ``end``, beginning in sequence ``b``.

    With SPLITS those are tiles of b. Without, they and ``before``, where b begins, count the costs
    of all sequences laid end to end, see ``split_kernel``. ``there``: whether there is anything.
    """

    t: Any
    end: Any
    b: Any
    before: Any
    there: Any


class Ring(NamedTuple):
    """Places of rows, values and the rest; ``landed`` and ``freed``: a barrier of each."""

    main: Any
    rest: Any
    landed: Any
    freed: Any


@gluon.jit
def share_of(
    sequences, sizes, starts, capacity,
    BLOCK: gl.constexpr, LANES: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
    ROUNDS: gl.constexpr,
):  # fmt: skip
    """The share of this program; the first one stores the first tile of every sequence."""
    share = gl.program_id(0)
    if SPLITS > 0:
        t, end, b = part_of_sequence(share, sequences, capacity, sizes, BLOCK, 1, SPLITS)
        return Share(t, end, b, gl.to_tensor(0), gl.to_tensor(True))
    else:
        # every warp has all lanes: none waits for the others
        EACH: gl.constexpr = gl.BlockedLayout([max(1, LANES // 32)], [32], [4], [0])
        lane = gl.arange(0, LANES, layout=EACH)
        t, end, b, before, total = find_share(
            share, lane, sequences, capacity, sizes, BLOCK, 1, OPENING, LANES, ROUNDS
        )
        if share == 0:
            store_starts(
                starts, total, lane, sequences, capacity, sizes, BLOCK, 1, OPENING, LANES, ROUNDS
            )
        return Share(t, end, b, before, gl.maximum(t, before + OPENING) < end)


@gluon.jit
def run_of(
    sequences, share, b, before, capacity, sizes,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
):  # fmt: skip
    """(length, first, stop, behind, more): tiles of sequence b in a share.

    ``behind``: where sequence b + 1 begins; ``more``: whether the share goes on there.
    """
    length, _, _, tiles = extent(sequences, b, None, capacity, sizes, BLOCK, 1)
    behind = before + cost(tiles, OPENING)
    if SPLITS > 0:
        return length, share.t, share.end, behind, gl.to_tensor(False)
    else:
        first = gl.maximum(share.t - before - OPENING, 0)
        stop = gl.minimum(share.end, behind) - before - OPENING
        more = (b + 1 < sizes.batch) & (behind + OPENING < share.end)
        return length, first, stop, behind, more


@gluon.jit
def load_rows(
    cache, sequences, sizes, share, ring, capacity,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, OPENING: gl.constexpr,
):  # fmt: skip
    """The warp that loads. Values behind a sequence's end are 0."""
    PLACES: gl.constexpr = ring.main.shape[0]
    BYTES: gl.constexpr = cache.k.nbytes_per_cta + cache.k_rest.nbytes_per_cta
    b = share.b
    before = share.before
    more = share.there
    place = 0
    phase = 1  # the first round waits for nobody
    while more:
        length, first, stop, before, more = run_of(
            sequences, share, b, before, capacity, sizes, BLOCK, SPLITS, OPENING
        )
        table = sequences.tables + b.to(gl.int64) * sizes.max_pages
        page = block_pages(table, first * BLOCK, stop * BLOCK, cache.PAGE, BLOCK)
        for tile in range(first, stop):
            key = tile * BLOCK
            row, count = run_between(page, key, length - 1, sizes.pages, cache.PAGE, BLOCK)
            page = block_pages(table, key + BLOCK, stop * BLOCK, cache.PAGE, BLOCK)
            landed = ring.landed.index(place)
            mbarrier.wait(ring.freed.index(place), phase)
            mbarrier.expect(landed, BYTES)
            where = [RUNS, row + count, RUNS - count, 0]
            tma.async_load(cache.k, where, landed, ring.main.index(place))
            tma.async_load(cache.k_rest, [row, cache.K.MAIN // 2], landed, ring.rest.index(place))
            place, phase = next_place(place, phase, PLACES)
        b += 1


@gluon.jit
def next_place(place, phase, PLACES: gl.constexpr):
    """(place, phase) of the next step; the phase turns when the ring begins again."""
    place = (gl.to_tensor(place) + 1) % PLACES
    return place, phase ^ (place == 0).to(gl.int32)
