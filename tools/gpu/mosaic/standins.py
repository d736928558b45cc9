"""Stand-ins on arrays for instructions that only the compiler has (``inline_mgpu``).

One for each function of ours that has them, by its module and name: ``masks.hide_outside``. Each is
called with the interpreter's ``Kernel``, the names that the function closes over, and its operands;
a reference is (key, transforms). The GPU runs the instructions themselves (``pytest -m gpu``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.pallas.gpu.common.eight_bit import in_operand_order
from ejkernel.kernels.pallas.gpu.flash_attention import list_kernel
from ejkernel.kernels.pallas.gpu.flash_attention.lists import EVERY, LIMIT, SOME
from ejkernel.kernels.pallas.gpu.grouped_matmul import fragments
from ejkernel.types.serving.split import MAX_FIXED_SPLITS, split_order, split_schedule
from ejktest.fragments import convert_columns, transpose_result

ALL: dict[str, Any] = {}
INT = jax.ShapeDtypeStruct((), jnp.int32)


def standin(name: str) -> Any:
    def register(function: Any) -> Any:
        ALL[name] = function
        return function

    return register


def _places(x: Any) -> tuple[Any, Any]:
    return lax.broadcasted_iota(jnp.int32, x.shape, 0), lax.broadcasted_iota(jnp.int32, x.shape, 1)


# ---- registers ---------------------------------------------------------------------------------


@standin("masks.hide_outside")
def hide_outside(k: Any, names: Any, x: Any, distance: Any, left: Any) -> Any:
    i, j = _places(x)
    far = distance + (i - j if names.transposed else j - i)
    if names.band.lo is not None:
        x = jnp.where(far >= names.band.lo, x, names.fill)
    if names.band.hi is not None:
        x = jnp.where(far <= names.band.hi, x, names.fill)
    if names.checks_rows or names.checks_columns:
        x = jnp.where((i if names.checks_rows else j) < left, x, names.fill)
    return x


@standin("masks.hide_unset")
def hide_unset(k: Any, names: Any, x: Any, bits: Any) -> Any:
    i, j = _places(x)
    shown = lax.shift_right_logical(jnp.broadcast_to(bits, x.shape), 8 * (i // 16) + j // 16) & 1
    return jnp.where(shown != 0, x, names.fill)


@standin("rows.scale_rows")
def scale_rows(k: Any, names: Any, x: Any, factors: Any) -> Any:
    scaled = x * factors[:, None]
    return jnp.where((factors == 0)[:, None], 0.0, scaled) if names.clear else scaled


@standin("rows.only_first")
def only_first(k: Any, names: Any, x: Any) -> Any:
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < names.count, x, names.other)


@standin("rows.multiply_add")
def multiply_add(k: Any, names: Any, x: Any, factors: Any, terms: Any) -> Any:
    if names.tile:
        factors, terms = factors[:, None], terms[:, None]
    return (x.astype(jnp.float32) * factors) + terms


@standin("warps.read_thread")
def read_thread(k: Any, names: Any) -> Any:
    return jnp.int32(k.warpgroup) * 128


@standin("lane_softmax.lane_sums")
def lane_sums(k: Any, names: Any, rows: Any, x: Any, *factors: Any) -> Any:
    return rows * (factors[0] if factors else 1.0) + jnp.sum(x, axis=1)


@standin("lane_softmax.sum_over_lanes")
def sum_over_lanes(k: Any, names: Any, rows: Any) -> Any:
    return rows


@standin("lane_softmax.raise_maxima")
def raise_maxima(k: Any, names: Any, m: Any, x: Any, *slack: Any) -> Any:
    top = jnp.maximum(m, jnp.max(x, axis=1))
    return jnp.where(top > m + (slack[0] if slack else names.slack), top, m)


@standin("lane_softmax.to_16_bit")
def to_16_bit(k: Any, names: Any, x: Any) -> Any:
    return x.astype(k.eqn.outvars[0].aval.dtype)


@standin("eight_bit.to_8_bit")
def to_8_bit(k: Any, names: Any, x: Any) -> Any:
    kind = k.eqn.outvars[0].aval.dtype
    largest = float(jnp.finfo(kind).max)
    return in_operand_order(jnp.clip(x, -largest, largest)).astype(kind)


@standin("lane_softmax.set_flag_if_any")
def set_flag_if_any(k: Any, names: Any, flags: Any, line: Any, bit: Any, rows: Any) -> None:
    def flag(host: Any, flags: Any, line: Any, bit: Any, rows: Any) -> None:
        if np.any(np.asarray(rows) != 0):
            at = int(line), int(bit) // 32
            mask = np.uint32(1 << int(bit) % 32).view(np.int32)
            host.put(flags, host.get(flags, at) | mask, at)

    k.on_host(flag, (), flags, line, bit, rows)


# ---- memory ------------------------------------------------------------------------------------


@standin("rows.store_row_range")
def store_row_range(k: Any, names: Any, ref: Any, x: Any, *numbers: Any) -> None:
    def store(host: Any, ref: Any, x: Any, *numbers: Any) -> None:
        batch, top, head, column, first, last = map(int, numbers)
        first, last = max(first, 0), min(last, x.shape[0])
        if first >= last:
            return
        columns = slice(column, column + x.shape[1])
        if names.heads:
            index = (batch, top, slice(head + first, head + last), columns)
        else:
            index = (batch, slice(top + first, top + last), head, columns)
        host.put(ref, np.asarray(x)[first:last], index)

    k.on_host(store, (), ref, x, *numbers)


@standin("rows.clear_rows")
def clear_rows(k: Any, names: Any, ref: Any, first: Any, last: Any) -> None:
    def clear(host: Any, ref: Any, first: Any, last: Any) -> None:
        rows, columns = host.shape(ref)
        for start, stop in ((0, min(int(first), rows)), (max(int(last), 0), rows)):
            if start < stop:
                index = (slice(start, stop), slice(0, columns))
                host.put(ref, np.zeros((stop - start, columns)), index)

    k.on_host(clear, (), ref, first, last)


@standin("rows.store_tile")
def store_tile(k: Any, names: Any, ref: Any, x: Any) -> None:
    k.on_host(lambda host, ref, x: host.put(ref, x), (), ref, x)


@standin("vector_rows.load_rows")
def load_rows(k: Any, names: Any, ref: Any) -> Any:
    kind = k.eqn.outvars[0].aval
    return k.on_host(lambda host, ref: (host.get(ref),), (kind,), ref)


@standin("vector_rows.store_rows")
def store_rows(k: Any, names: Any, ref: Any, x: Any, *others: Any) -> None:
    choice, factors = others[: len(names.types)], others[len(names.types) :]
    x = x * factors[0][:, None] if factors else x

    def put(host: Any, ref: Any, x: Any, *choice: Any) -> None:
        host.put(ref if not choice or choice[1] else choice[0], x)

    k.on_host(put, (), ref, x, *choice)


@standin("matrix_rows.read_matrices")
def read_matrices(k: Any, names: Any, ref: Any) -> Any:
    return load_rows(k, names, ref)


@standin("matrix_rows.write_matrices")
def write_matrices(k: Any, names: Any, ref: Any, x: Any, factors: Any) -> None:
    x = (x * factors[:, None]).astype(names.dtype)
    k.on_host(lambda host, ref, x: host.put(ref, x), (), ref, x)


@standin("convert.convert_rows")
def convert_rows(k: Any, names: Any, source: Any, target: Any) -> None:
    k.on_host(lambda host, source, target: host.put(target, host.get(source)), (), source, target)


@standin("fragments.load_fragment")
def load_fragment(k: Any, names: Any, ref: Any, part: Any) -> Any:
    kind = jax.ShapeDtypeStruct((fragments.ROWS, fragments.DEPTH), jnp.int8)

    def load(host: Any, ref: Any, part: Any) -> tuple[Any]:
        columns = slice(int(part) * fragments.ROWS, (int(part) + 1) * fragments.ROWS)
        depth = slice(0, fragments.DEPTH)
        at = (columns, depth) if names.transposed else (depth, columns)
        x = np.asarray(host.get(ref, at))
        return (x if names.transposed else x.T,)

    (x,) = k.on_host(load, (kind,), ref, part)
    return convert_columns(x, names.kind, names.dtype)


@standin("fragments.stage_result")
def stage_result(k: Any, names: Any, ref: Any, x: Any) -> None:
    rows = transpose_result(x, names.dtype)
    k.on_host(lambda host, ref, rows: host.put(ref, rows), (), ref, rows)


@standin("fragments.store_staged")
def store_staged(k: Any, names: Any, ref: Any, staged: Any, first: Any, last: Any) -> None:
    def copy(host: Any, ref: Any, staged: Any, first: Any, last: Any) -> None:
        rows, columns = host.shape(staged)
        first, last = max(int(first), 0), min(int(last), rows)
        if first < last:
            at = (slice(first, last), slice(0, columns))
            host.put(ref, host.get(staged, at), at)

    k.on_host(copy, (), ref, staged, first, last)


# ---- tile counters ------------------------------------------------------------------------------


@standin("work_counter.fetch_index_in_warp")
def fetch_index_in_warp(k: Any, names: Any, counter: Any) -> Any:
    return k.on_host(lambda host, counter: (host.take(counter),), (INT,), counter)


@standin("work_counter.prefetch_index")
def prefetch_index(k: Any, names: Any, counter: Any, words: Any, position: Any) -> None:
    def ask(host: Any, counter: Any, words: Any, position: Any) -> None:
        last = host.shape(words)[1] - 1
        host.put(words, np.int32(host.take(counter)), (int(position), last))

    k.on_host(ask, (), counter, words, position)


@standin("work_counter.fetch_index_in_warpgroup")
def fetch_index_in_warpgroup(
    k: Any, names: Any, counter: Any, words: Any, position: Any, asks: Any
) -> Any:
    def take(host: Any, counter: Any, words: Any, position: Any, asks: Any) -> Any:
        at = (int(position), host.shape(words)[1] - 1)
        if int(asks):
            host.put(words, np.int32(host.take(counter)), at)
        return (host.get(words, at),)

    return k.on_host(take, (INT,), counter, words, position, asks)


@standin("work_counter.load_word")
def load_word(k: Any, names: Any, words: Any, *position: Any) -> Any:
    def read(host: Any, words: Any, *position: Any) -> Any:
        return (host.get(words, tuple(map(int, position))),)

    return k.on_host(read, (INT,), words, *position)


@standin("mla_split.find_unit")
def find_unit(k: Any, names: Any, lengths: Any, unit: Any) -> Any:
    def find(host: Any, lengths: Any, unit: Any) -> Any:
        clipped = np.clip(host.get(lengths), 0, names.capacity)
        *work_range, cut = split_schedule(clipped, names.units, names.step)[int(unit)]
        return (*work_range, *cut)

    return k.on_host(find, (INT,) * 7, lengths, unit)


@standin("mla_merge.sum_partials")
def sum_partials(k: Any, names: Any, partial_o: Any, m: Any, total: Any, *scalars: Any) -> Any:
    kind = k.eqn.outvars[0].aval

    def add(host: Any, partial_o: Any, m: Any, total: Any, *scalars: Any) -> tuple[Any]:
        row, first, count = map(int, scalars[:-1])
        numbers = [first + i * names.stride for i in range(count)]
        highs, shares = (np.array([host.get(x, (n, row)) for n in numbers]) for x in (m, total))
        top = highs.max()
        weights = shares * np.exp2((highs - (0.0 if top == -np.inf else top)) * scalars[-1])
        weights /= weights.sum() or 1.0
        x = np.zeros(kind.shape, np.float32)
        for number, weight in zip(numbers, weights, strict=True):
            values = host.get(partial_o, (number, row, slice(0, *kind.shape)))
            x += np.asarray(values, np.float32) * weight
        return (x,)

    return k.on_host(add, (kind,), partial_o, m, total, *scalars)


@standin("mla_split.find_split")
def find_split(k: Any, names: Any, lengths: Any, unit: Any) -> Any:
    def find(host: Any, lengths: Any, unit: Any) -> Any:
        order = split_order(np.clip(host.get(lengths), 0, names.capacity), names.step)
        return order[int(unit)] if unit < len(order) else (0, MAX_FIXED_SPLITS)

    return k.on_host(find, (INT,) * 2, lengths, unit)


# ---- lists of tiles ------------------------------------------------------------------------------


@standin("list_kernel._make_list")
def make_list(k: Any, names: Any, item: Any, tiles: Any, lists: Any, lengths: Any) -> None:
    warps, n = list_kernel.THREADS // list_kernel.WARP, names.n

    def make(host: Any, item: Any, tiles: Any, lists: Any, lengths: Any) -> None:
        for row in {min(int(item) * warps + w, names.rows - 1) for w in range(warps)}:
            bits = host.get(tiles, (row, slice(0, n)))
            seen = bits & SOME != 0
            every = seen & (bits & EVERY != 0)
            visited = int(seen.sum())
            if names.by_query:
                length = max(visited, 1)
                blocks = [*np.flatnonzero(every), *np.flatnonzero(seen & ~every)]
                line = [int(every.sum()), length, *blocks, *[n] * (n - visited)]
            else:
                length = visited
                blocks = np.flatnonzero(seen) + LIMIT * ~every[seen]
                line = [length, *blocks, *[0] * (n - visited)]
            host.put(lists, line, (row, slice(0, len(line))))
            host.put(lengths, length, (row,))

    k.on_host(make, (), item, tiles, lists, lengths)


@standin("list_kernel._place_tiles")
def place_tiles(k: Any, names: Any, item: Any, *refs: Any) -> None:
    places, ranked = names.places, list_kernel.RANKED

    def put_order(host: Any, item: Any, lengths: Any, order: Any, *slots: Any) -> None:
        group, part = divmod(int(item), names.parts)
        mine = host.get(lengths, (group, slice(0, places)))
        ranks = np.argsort(np.argsort(-mine, kind="stable"), kind="stable")
        puts = {
            group * places + ranks[i]: group * places + i
            for i in range(part * ranked, min((part + 1) * ranked, places))
        }
        if group == part == 0:
            puts |= {i: -1 for i in range(names.groups * places, names.size)}
        for slot, value in puts.items():
            at = host.get(slots[0], (int(slot),)) if slots else slot
            host.put(order, value, (int(at),))

    k.on_host(put_order, (), item, *refs)
