"""Lists of tiles and their order, made on the device: a small kernel each.

A warp makes a list. Its threads vote, 32 tiles at a time, whether theirs is visited, and find its
position by counting the votes before their own. The position of a tile among the tiles ordered
together is the number of longer ones, and of equally long ones before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import math as _math

from ejkernel.kernels.pallas.compat import untracked
from ejkernel.kernels.pallas.gpu.common.registers import (
    SCALAR,
    arith,
    asm,
    compare,
    constant,
    i32,
    indices,
    memref,
    scf,
    thread,
    when,
)
from ejkernel.kernels.pallas.gpu.flash_attention.lists import COUNTS, EVERY, LIMIT, SOME
from ejkernel.types.masks.blocks import cdiv

math: Any = _math

WARP = 32
THREADS = 128  # of a program
RANKED = 16  # tiles of a program that finds ranks
VOTES = 8  # taken before the first is used: reads of memory that overlap


class TileBits(NamedTuple):
    """Visibility of tiles, to make lists of.

    Attributes:
        tiles: int8 ``[#b, #h, rows, tiles]``, bits ``SOME`` and ``EVERY``.
        by_query: whether lists are as in ``forward_lists``, else as in ``backward_lists``.
    """

    tiles: jax.Array
    by_query: bool


class Lengths(NamedTuple):
    """Tiles to be ordered.

    Attributes:
        lengths: int32 ``[groups, places]``; the tiles of a group are ordered together.
        slots: int32, slot of the i-th longest tile of group g at ``g * places + i``; then the
            slots of -1. None: the slot is that index.
    """

    lengths: jax.Array
    slots: np.ndarray | None = None


def make_lists(*sides: TileBits) -> list[tuple[jax.Array, jax.Array]]:
    """Returns (lists, their lengths ``[#b, #h, rows]``) of each side, in one launch."""
    rows = [x.tiles.reshape(-1, x.tiles.shape[-1]) for x in sides]
    kinds, programs = [], []
    for x, side in zip(rows, sides, strict=True):
        start = COUNTS if side.by_query else 1
        kinds += [_int32(len(x), start + x.shape[1]), _int32(len(x))]
        programs.append(cdiv(len(x), THREADS // WARP))

    def work(n: int) -> Callable[..., None]:
        def make(item: Any, tiles: Any, lists: Any, lengths: Any) -> None:
            _make_list(item, tiles, lists, lengths, rows[n].shape, sides[n].by_query)

        return make

    made = _launch_lists("tile_lists", [work(n) for n in range(len(sides))], programs, rows, kinds)
    return [
        (lists.reshape(*side.tiles.shape[:3], -1), lengths.reshape(side.tiles.shape[:3]))
        for side, lists, lengths in zip(sides, made[::2], made[1::2], strict=True)
    ]


def longest_first(*orders: Lengths) -> list[jax.Array]:
    """Returns the tiles' indices at their slots, int32, in one launch."""
    inputs, kinds, programs = [], [], []
    for lengths, slots in orders:
        inputs.append(lengths)
        kinds.append(_int32(lengths.size if slots is None else slots.size))
        programs.append(len(lengths) * cdiv(lengths.shape[1], RANKED))
    constants = [jnp.asarray(x.slots) for x in orders if x.slots is not None]
    number = {n: i for i, n in enumerate(n for n, x in enumerate(orders) if x.slots is not None)}

    def work(n: int) -> Callable[..., None]:
        lengths, slots = orders[n]

        def make(item: Any, lengths_ref: Any, order: Any, *constants: Any) -> None:
            slots_ref = None if slots is None else constants[number[n]]
            size = 0 if slots is None else slots.size
            _place_tiles(item, lengths_ref, order, slots_ref, lengths.shape, size)

        return make

    works = [work(n) for n in range(len(orders))]
    return list(_launch_lists("tile_order", works, programs, inputs, kinds, constants))


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _launch_lists(
    name: str, works: Sequence[Callable[..., None]], programs: Sequence[int],
    inputs: Sequence[jax.Array], kinds: Sequence[Any], constants: Sequence[jax.Array] = (),
) -> Any:  # fmt: skip
    """Launches the ``works`` as one kernel; returns all outputs, in their order.

    Work n has ``programs[n]`` programs, and is called as ``work(item, input, *outputs,
    *constants)`` with an item below that, its own input and outputs, and all constants. ``kinds``
    are the types of all outputs, as many of each work.
    """
    outputs = len(kinds) // len(works)

    def body(*refs: Any) -> None:
        input_refs, constant_refs, output_refs = (
            refs[: len(inputs)],
            refs[len(inputs) : len(inputs) + len(constants)],
            refs[len(inputs) + len(constants) :],
        )
        item, first = lax.axis_index("item"), 0
        for n, (work, count) in enumerate(zip(works, programs, strict=True)):
            mine = output_refs[n * outputs : (n + 1) * outputs]

            def run_work(
                work: Any = work, first: int = first, n: int = n, mine: Any = mine
            ) -> None:
                work(item - first, input_refs[n], *mine, *constant_refs)

            pl.when((item >= first) & (item < first + count))(run_work)
            first += count

    kernel = plgpu.kernel(
        body,
        out_type=tuple(kinds),
        grid=(sum(programs),),
        grid_names=("item",),
        num_threads=1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return untracked(kernel, tuple(kinds))(*inputs, *constants)


def _by_thread(function: Callable[..., None], item: Any, *refs: Any) -> None:
    """Runs ``function(item, *refs)`` in each thread, in the compiler's own operations."""
    made = plgpu.inline_mgpu(arg_types=(SCALAR, *(plgpu.RefType(),) * len(refs)))
    made(lambda _, item, *refs: function(item.registers.item(), *refs))(jnp.int32(item), *refs)


def _store_if(test: Any, value: Any, ref: Any, *index: Any) -> None:
    with when(test):
        memref.store(value, ref, indices(*index))


def _vote(test: Any) -> Any:
    """Returns a bit for each thread of the warp."""
    text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return asm(text, "=r,r", i32(), arith.extui(i32(), test))


def _loop(count: int, step: int, body: Callable[..., list[Any]], *carry: Any) -> list[Any]:
    """``carry = body(i, *carry)`` for i = 0, step, .. below ``count``."""
    loop = scf.ForOp(*indices(constant(0), constant(count), constant(step)), list(carry))
    with ir.InsertionPoint(loop.body):
        i = arith.index_cast(i32(), loop.induction_variable)
        scf.yield_(body(i, *loop.inner_iter_args))
    return list(loop.results)


def _make_list(
    item: Any, tiles: Any, lists: Any, lengths: Any, shape: tuple[int, ...], by_query: bool
) -> None:
    """Makes the lists of rows ``4 * item`` on, one a warp: the work of ``make_lists``.

    ``tiles`` int8 of this shape (rows, n), ``lists`` int32 ``[rows, COUNTS or 1 + n]``, ``lengths``
    int32 ``[rows]``. The warp reads its row twice: it counts, then it stores at counted positions.
    """
    rows, n = shape
    step = min(VOTES, cdiv(n, WARP)) * WARP

    def by_thread(item: Any, tiles: Any, lists: Any, lengths: Any) -> None:
        t, zero = thread(), constant(0)
        lane = arith.andi(t, constant(WARP - 1))
        row = arith.addi(arith.muli(item, constant(THREADS // WARP)), arith.shrui(t, constant(5)))
        # several warps may make the last list, identically
        row = arith.minsi(row, constant(rows - 1))
        before = arith.subi(arith.shli(constant(1), lane), constant(1))

        def votes(first: Any) -> list[tuple[Any, ...]]:
            """Returns (column, inside, any, all, votes of both) of tiles starting at ``first``."""
            columns = [
                arith.addi(first, arith.addi(lane, constant(c))) for c in range(0, step, WARP)
            ]
            loaded = [
                memref.load(tiles, indices(row, arith.minsi(column, constant(n - 1))))
                for column in columns
            ]
            out = []
            for column, bits in zip(columns, loaded, strict=True):
                inside = compare("slt", column, constant(n))
                bits = arith.select(inside, arith.extui(i32(), bits), zero)
                any_pair, all_pairs = (
                    compare("ne", arith.andi(bits, constant(bit)), zero) for bit in (SOME, EVERY)
                )
                all_pairs = arith.andi(any_pair, all_pairs)
                out.append((column, inside, any_pair, all_pairs, _vote(any_pair), _vote(all_pairs)))
            return out

        def count(first: Any, visited: Any, full: Any) -> list[Any]:
            for *_, any_votes, all_votes in votes(first):
                visited = arith.addi(visited, math.ctpop(any_votes))
                full = arith.addi(full, math.ctpop(all_votes))
            return [visited, full]

        visited, full = _loop(n, step, count, zero, zero)
        # rows of queries that see nothing visit the block past the end
        length = arith.maxsi(visited, constant(1)) if by_query else visited
        head = (full, length) if by_query else (length,)
        for entry, value in enumerate(head):
            _store_if(compare("eq", lane, constant(entry)), value, lists, row, constant(entry))
        _store_if(compare("eq", lane, constant(len(head))), length, lengths, row)

        def earlier(votes: Any) -> Any:
            return math.ctpop(arith.andi(votes, before))

        def put(first: Any, left: Any, right: Any) -> list[Any]:
            """Stores fully visible tiles starting at ``left``, the others starting at ``right``."""
            for column, inside, any_pair, all_pairs, any_votes, all_votes in votes(first):
                if by_query:
                    partial_votes = arith.xori(any_votes, all_votes)
                    position = arith.select(
                        all_pairs,
                        arith.addi(left, earlier(all_votes)),
                        arith.addi(right, earlier(partial_votes)),
                    )
                    value, nothing = column, constant(n)
                    left = arith.addi(left, math.ctpop(all_votes))
                    right = arith.addi(right, math.ctpop(partial_votes))
                else:
                    position = arith.addi(left, earlier(any_votes))
                    value = arith.select(all_pairs, column, arith.addi(column, constant(LIMIT)))
                    nothing = zero
                    left = arith.addi(left, math.ctpop(any_votes))
                _store_if(any_pair, value, lists, row, position)
                # positions that no tile takes
                unused = arith.andi(inside, compare("sge", column, visited))
                end = arith.addi(column, constant(len(head)))
                _store_if(unused, nothing, lists, row, end)
            return [left, right]

        start = constant(len(head))
        _loop(n, step, put, start, arith.addi(start, full))

    _by_thread(by_thread, item, tiles, lists, lengths)


def _place_tiles(
    item: Any, lengths: Any, order: Any, slots: Any, shape: tuple[int, ...], size: int
) -> None:
    """Stores ``RANKED`` tiles of a group where their ranks say: the work of ``longest_first``.

    ``lengths`` int32 of this shape (groups, places); ``order`` and ``slots`` int32 ``[size]``, or
    ``order`` has one entry for each tile and slots are None. A warp compares its tiles with all
    tiles of the group: the rank of a tile is the number of longer ones. The first program also
    stores -1 at the slots that no tile takes.
    """
    groups, places = shape
    parts = cdiv(places, RANKED)
    per_warp = RANKED * WARP // THREADS  # tiles of a warp
    step = min(16, cdiv(places, WARP)) * WARP

    def by_thread(item: Any, lengths: Any, order: Any, slots: Any = None) -> None:
        t = thread()
        lane = arith.andi(t, constant(WARP - 1))
        group, part = arith.divsi(item, constant(parts)), arith.remsi(item, constant(parts))
        first_place = arith.muli(group, constant(places))
        warp = arith.muli(arith.shrui(t, constant(5)), constant(per_warp))
        first = arith.addi(arith.muli(part, constant(RANKED)), warp)
        mine = [arith.addi(first, constant(i)) for i in range(per_warp)]
        last = constant(places - 1)
        own_lengths = [memref.load(lengths, indices(group, arith.minsi(i, last))) for i in mine]

        def count(begin: Any, *ranks: Any) -> list[Any]:
            begin = arith.addi(begin, lane)
            others = [arith.addi(begin, constant(c)) for c in range(0, step, WARP)]
            loaded = [memref.load(lengths, indices(group, arith.minsi(i, last))) for i in others]
            out = list(ranks)
            for i, length in zip(others, loaded, strict=True):
                inside = compare("slt", i, constant(places))
                length = arith.select(inside, length, constant(-1))
                for n in range(per_warp):
                    # equally long tiles keep their order
                    less = arith.extui(i32(), compare("slt", i, mine[n]))
                    votes = _vote(compare("sgt", arith.addi(length, less), own_lengths[n]))
                    out[n] = arith.addi(out[n], math.ctpop(votes))
            return out

        ranks = _loop(places, step, count, *[constant(0)] * per_warp)
        # a thread for each of the warp's tiles
        rank = ranks[0]
        for n in range(1, per_warp):
            rank = arith.select(compare("eq", lane, constant(n)), ranks[n], rank)
        index = arith.addi(first, lane)
        inside = arith.andi(
            compare("slt", lane, constant(per_warp)), compare("slt", index, constant(places))
        )
        slot = arith.addi(first_place, arith.minsi(rank, last))
        if slots is not None:
            slot = memref.load(slots, indices(slot))
        _store_if(inside, arith.addi(first_place, index), order, slot)
        for e in range(groups * places, size, THREADS):
            end = arith.addi(t, constant(e))
            left = arith.andi(compare("eq", item, constant(0)), compare("slt", end, constant(size)))
            slot = memref.load(slots, indices(arith.minsi(end, constant(size - 1))))
            _store_if(left, constant(-1), order, slot)

    refs = (lengths, order) if slots is None else (lengths, order, slots)
    _by_thread(by_thread, item, *refs)
