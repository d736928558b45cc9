"""Assignment of tiles to programs, and the key blocks that each tile visits.

A persistent kernel starts one program a multiprocessor and loops over tiles, (batch and head,
query block) pairs numbered ``row * blocks + block``. Tiles are assigned to programs
here, ahead of time, as the hardware would do it: tiles stand in a queue, and the program that
is free first takes the next one. In the queue, heads whose keys and values fit the L2 cache
together follow each other, and within such a group the longest tiles come first. Lengths that are
known only when the kernel runs are sorted there; here the longest tile, the second longest and so
on are assigned to programs (``assign_places``).
"""

from __future__ import annotations

import functools
import heapq
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.types.masks.blocks import structural_ranges
from ejkernel.types.masks.structure import Band

Scalar = jax.Array | int

QUEUED = 2**16  # tiles up to which the queue is simulated
PLACED = 2**12  # places that are assigned together
TILE_COST = 0.5  # of starting and ending a tile, in key blocks
GUIDED_SHARE = 0.3
"""Share of the remaining work in the next batch of programs of a guided schedule.

Simulated, a causal call of 6.9 ms during which 4 multiprocessors are held for 2.7 ms ends after
7.1 ms, and after 9.6 with one program each; undisturbed, programs that take 3 us to begin cost 1%.
"""


class Tile(NamedTuple):
    """One query block and the key blocks it visits: [start, stop), from the last to the first.

    Blocks in [full_start, full_stop) are visible to every row.
    """

    batch: Scalar
    head: Scalar
    block: Scalar
    start: Scalar
    full_start: Scalar
    full_stop: Scalar
    stop: Scalar

    def masked(self, j: Scalar) -> jax.Array:
        return jnp.asarray((j < self.full_start) | (j >= self.full_stop))


def band_blocks(first: Scalar, last: Scalar, length: int, band: Band, block: int):
    """(start, full_start, full_stop, stop) of the key blocks seen from rows first..last.

    At least one block is visited, with its hidden pairs masked. Works on traced values.
    """
    blocks = -(-length // block)
    start: Scalar = 0
    full_start: Scalar = 0
    stop: Scalar = blocks
    full_stop: Scalar = length // block
    if band.lo is not None:
        start = lax.div(jnp.maximum(first + band.lo, 0), block)
        full_start = lax.div(jnp.maximum(last + band.lo, 0) + block - 1, block)
    if band.hi is not None:
        stop = jnp.minimum(blocks, lax.div(jnp.maximum(last + band.hi + block, 0), block))
        full_stop = jnp.minimum(full_stop, lax.div(jnp.maximum(first + band.hi + 1, 0), block))
    stop = jnp.maximum(jnp.asarray(stop, jnp.int32), 1)
    start = jnp.minimum(jnp.asarray(start, jnp.int32), stop - 1)
    return start, jnp.asarray(full_start, jnp.int32), jnp.asarray(full_stop, jnp.int32), stop


def queue_order(rows: int, costs: np.ndarray, group: int) -> np.ndarray:
    """Returns tile indices in the order of the queue; ``costs`` has one value per query block."""
    blocks = len(costs)
    longest_first = np.argsort(-costs, kind="stable")
    out = []
    for first in range(0, rows, group):
        members = np.arange(first, min(first + group, rows))
        out.append((members[None, :] * blocks + longest_first[:, None]).ravel())
    return np.concatenate(out)


@functools.lru_cache(maxsize=64)
def _assigned(rows: int, costs: tuple[float, ...], group: int, programs: int) -> np.ndarray:
    numbers = queue_order(rows, np.asarray(costs), group)
    if len(numbers) > QUEUED or len(set(costs)) == 1:
        width = -(-len(numbers) // programs)
        padded = np.full(width * programs, -1)
        padded[: len(numbers)] = numbers
        waves = padded.reshape(width, programs)
        waves[1::2] = waves[1::2, ::-1]  # back and forth: costs that rise and fall even out
        return np.pad(waves.T, [(0, 0), (0, 1)], constant_values=-1).astype(np.int32)
    return _simulate_queue(numbers, np.tile(costs, rows), programs)


def _run_queue(costs: list[float], programs: int) -> tuple[list[int], float]:
    """Returns the program that takes each cost, the one that is free first, and when all end."""
    free = [(0.0, p) for p in range(programs)]
    takers = []
    for cost in costs:
        time, p = free[0]
        heapq.heapreplace(free, (time + cost, p))
        takers.append(p)
    return takers, max(free)[0]


def _simulate_queue(tiles: np.ndarray, costs: np.ndarray, programs: int) -> np.ndarray:
    """Returns the tiles of each program, if the one that is free first takes the next.

    ``tiles`` are tiles in the order of the queue, ``costs[tile]`` is the cost of a tile.
    """
    takers, _ = _run_queue((costs[tiles] + TILE_COST).tolist(), programs)
    taken: list[list[int]] = [[] for _ in range(programs)]
    for tile, p in zip(tiles.tolist(), takers, strict=True):
        taken[p].append(tile)
    return _padded(taken)


@functools.lru_cache(maxsize=64)
def rows_together(rows: int, costs: tuple[float, ...], programs: int) -> int:
    """Returns how many rows of tiles to take from a queue together, longest tiles first.

    Short tiles of a row fill the ends of long ones of the rows with it; more rows read more keys
    at a time. The fewest that end at most 1% after the best. ``costs``: of the tiles of a row.
    """
    counts = [n for n in (1, 2, 4, 8, 16) if rows % n == 0]
    if len(set(costs)) == 1 or rows * len(costs) > QUEUED:
        return 1
    longest_first = np.sort(np.asarray(costs))[::-1] + TILE_COST
    ends = [
        _run_queue(np.tile(np.repeat(longest_first, n), rows // n).tolist(), programs)[1]
        for n in counts
    ]
    return next(n for n, end in zip(counts, ends, strict=True) if end <= 1.01 * min(ends))


def assign_lengths(costs: np.ndarray, group: int, programs: int) -> np.ndarray:
    """Assigns tiles like ``assign``, with costs ``[rows, blocks]`` for each row of tiles."""
    rows, blocks = costs.shape
    flat = costs.reshape(-1)
    numbers = np.arange(rows * blocks)
    # the longest of a few rows first
    order = np.lexsort((-flat, numbers // (group * blocks)))
    return _simulate_queue(numbers[order], flat, programs)


def assign(rows: int, costs: np.ndarray, group: int, programs: int) -> np.ndarray:
    """int32 ``[programs, n]``: the tiles of each program in order, then -1.

    Every program has at least one tile if there are at least as many tiles as programs.
    """
    return _assigned(rows, tuple(float(c) for c in costs), group, programs)


@functools.lru_cache(maxsize=64)
def _guided(rows: int, costs: tuple[float, ...], group: int, programs: int) -> np.ndarray:
    numbers, of_row = queue_order(rows, np.asarray(costs), group), np.tile(costs, rows)
    if len(numbers) > QUEUED:
        return np.pad(numbers[:, None], [(0, 0), (0, 1)], constant_values=-1).astype(np.int32)
    done = np.cumsum(of_row[numbers] + TILE_COST)
    taken: list[list[int]] = []
    first = 0
    while first < len(numbers):
        before = done[first - 1] if first else 0.0
        end = np.searchsorted(done, before + GUIDED_SHARE * (done[-1] - before), side="right")
        last = min(max(int(end), first + programs), len(numbers))
        wave = _simulate_queue(numbers[first:last], of_row, min(programs, last - first))
        taken += [row[row >= 0].tolist() for row in wave]
        first = last
    return _padded(taken)


def assign_guided(rows: int, costs: np.ndarray, group: int, programs: int) -> np.ndarray:
    """Assigns tiles like ``assign``, to more programs than run at once, of less and less work.

    This is guided self-scheduling (Polychronopoulos and Kuck 1987), in batches of ``programs`` of
    equal work as in factoring (Hummel, Schonberg and Flynn 1992).

    ``programs``: that run at once. The others begin where one of these has ended, in order.
    """
    return _guided(rows, tuple(float(c) for c in costs), group, programs)


def assign_places(groups: int, places: int, programs: int) -> np.ndarray:
    """int32 ``[programs, n]``: like ``assign``, of tiles known by the order of their lengths.

    Place ``g * places + i`` is the i-th longest tile of group g.
    """
    taken: list[list[int]] = [[] for _ in range(programs)]
    groups_at_once = max(PLACED // places, 1)
    for first in range(0, groups, groups_at_once):
        assigned = _assign_group(min(groups_at_once, groups - first), places, programs)
        for mine, new in zip(taken, assigned, strict=True):
            mine += [first * places + number for number in new]
    return _padded(taken)


@functools.lru_cache(maxsize=64)
def _assign_group(groups: int, places: int, programs: int) -> list[list[int]]:
    """Assigns the places of a few groups to programs.

    From the first place to the last, costs of tiles of packed sequences of one length fall
    linearly; of many lengths, they fall like a power of that. Each place goes to the program with
    the least work under the worst of these models.
    """
    linear = np.arange(places, 0, -1) / places
    costs = np.stack([linear**power for power in (0, 1, 2, 3, 5)], axis=1)  # [places, models]
    costs = costs / costs.mean(axis=0) + TILE_COST / 8
    work = np.zeros((programs, costs.shape[1]))
    taken: list[list[int]] = [[] for _ in range(programs)]
    for number in range(groups * places):
        work_after = work + costs[number % places]
        p = int(np.argmin(work_after.max(axis=1)))
        work[p] = work_after[p]
        taken[p].append(number)
    return taken


def _padded(taken: list[list[int]]) -> np.ndarray:
    lists = np.full((len(taken), max(map(len, taken)) + 1), -1, np.int32)
    for p, mine in enumerate(taken):
        lists[p, : len(mine)] = mine
    return lists


def band_costs(q_len: int, kv_len: int, band: Band, block_q: int, block_kv: int) -> np.ndarray:
    """Returns the number of key blocks that each query block visits."""
    of_queries, _ = structural_ranges([band], q_len, kv_len, block_q, block_kv)
    return np.maximum(of_queries.stop - of_queries.start, 1)
