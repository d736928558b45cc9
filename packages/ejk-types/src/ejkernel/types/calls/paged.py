"""The shared part of calls over page tables: checks of lengths, starts and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import MAX_LENGTH, is_symbolic
from ejkernel.types.attention.device_merge import merge_over_devices
from ejkernel.types.attention.softmax import count_sinks, name_lse, name_output
from ejkernel.types.calls import arguments
from ejkernel.types.calls.signature import axes_of
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.values import check_entries, concrete_indices, concrete_value
from ejkernel.types.calls.words import describe_value, out_of_range
from ejkernel.types.errors import InvalidArgument
from ejkernel.types.masks.segments import check_starts
from ejkernel.types.serving.plan import AttentionPlan, make_plan
from ejkernel.types.serving.problem import RaggedProblem
from ejkernel.types.serving.sharded_pages import local_rows
from ejkernel.types.serving.tree import new_rows, prepare_tree
from ejkernel.types.serving.write import row_positions

_FOREIGN_ORDERS = ((0, 2, 1, 3), (1, 2, 0, 3))
"""Where caches of other libraries keep our axes: heads before a page's tokens, or before all."""


class PagedCall(Call):
    """A call that reads a cache of pages, its first array of pages, through ``block_tables``."""

    shards_pages: ClassVar[bool] = True
    sequence_hint: ClassVar[str] = "shard heads or rows"
    refused_axes: ClassVar[Mapping[str, str]] = {
        "pages": "spread pages by mesh= and in_specs=, or shard heads or rows",
        "page_size": "shard heads or rows, or spread pages by mesh= and in_specs=",
    }
    NOT_OVER_DEVICES: ClassVar[tuple[str, ...]] = ("sliding_window", "tree_mask", "positions")
    """Arguments that say which keys a row sees by their places."""

    # ---- pages of one sequence on several devices -------------------------------------------

    @classmethod
    def visible_keys(cls, a: Arguments) -> tuple[Any, Any]:
        """Returns the sequence of every query row, and the keys that it sees of it."""
        raise NotImplementedError

    @classmethod
    def with_rows(cls, a: Arguments, tables: Any, lengths: Any) -> Arguments:
        """Returns the call in which every query row is a sequence, of this table and length."""
        raise NotImplementedError

    @classmethod
    def attend_to_shard(cls, a: Arguments, shard: Any, run: Callable[[Arguments], Any]) -> Any:
        """Returns the result of a call, the attention of the devices merged.

        Raises:
            ValueError: an argument that depends on the places of keys.
        """
        for name in cls.NOT_OVER_DEVICES:
            if a.get(name) is not None:
                raise ValueError(
                    f"{name}: given with pages that are sharded over devices, expected None: a "
                    "device does not know the places of its keys; shard heads or rows instead"
                )
        axes, sinks = shard.layout.axes("pages"), a["softmax_aux"]
        sequence, visible = cls.visible_keys(a)
        page_size = a[cls.boundary.pools[0]].shape[1]
        sizes = shard.local("pages"), shard.sizes["pages"], page_size
        tables = a["block_tables"].reshape(-1, cls._table_columns(a))
        local = local_rows(tables, sequence, visible, shard.offset("pages"), sizes)
        part = {**cls.with_rows(a, *local), "softmax_aux": None, "return_lse": True}
        o, lse, *others = run(part)
        merged, lse = merge_over_devices(o, lse, axes)
        if sinks is not None:
            merged, lse = count_sinks(merged, lse, sinks)
        query = a[cls.boundary.names[0]]
        rows = query.shape[:-1]
        outputs = merged.astype(o.dtype).reshape(*rows, o.shape[-1]), lse.reshape(rows), *others
        return cls.results(a, outputs)

    @classmethod
    def _lengths(cls) -> str:
        return arguments.lengths_name(cls.boundary.names)

    @classmethod
    def _table_columns(cls, a: Arguments) -> Any:
        """Pages per sequence in ``block_tables``, which may be flat."""
        shape = a["block_tables"].shape
        return shape[1] if len(shape) == 2 else shape[0] // max(a[cls._lengths()].shape[0], 1)

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """A row of the table names at most ``MAX_LENGTH`` tokens."""
        super().canonicalize(a)
        columns, page_size = cls._table_columns(a), a[cls.boundary.pools[0]].shape[1]
        if not is_symbolic(columns) and columns * page_size > MAX_LENGTH:
            raise ValueError(
                f"block_tables: given {columns} pages of {page_size} tokens per sequence, "
                f"expected at most {MAX_LENGTH} tokens"
            )

    @classmethod
    def cautions(cls, a: Arguments) -> Iterator[str]:
        """Yield also a sentence about an int8 cache whose integers count as they are."""
        yield from super().cautions(a)
        pools = cls.boundary.pools
        caches = {"k_scale": a[pools[0]], "v_scale": a[pools[-1]]}
        missing = [n for n, x in caches.items() if a.get(n, 1.0) is None and x.dtype == np.int8]
        if missing:
            # standard normal keys and values, page_attention over 512 to 4096 keys: the root mean
            # square of the difference over that of the output
            yield (
                f"{cls.name}: an int8 cache without {' and '.join(missing)} counts its integers as "
                "they are: with standard normal keys and values an error of about 42%, with scales "
                "of max(abs(x)) / 127 one of 1.6%; give the scales that the cache was written with "
                "(1.0 if it holds whole numbers)"
            )

    @classmethod
    def check_tables(cls, a: Arguments, count: int | None = None) -> None:
        """Check known lengths, and the table entries that they use, of ``count`` sequences.

        Lengths that only the device knows are clipped to the table later.
        """
        lens, table = concrete_indices(a[cls._lengths()]), concrete_value(a["block_tables"])
        if lens is None:
            return
        if table is not None:
            shape = len(lens), cls._table_columns(a)
            table = table.reshape(-1)[: math.prod(shape)].reshape(shape)
            table = table[:count]
        pool = cls.boundary.pools[0]
        cache, lens = a[pool], lens[:count]
        complaint = cls._misfit(a, lens, table, *cache.shape[:2])
        if complaint is None:
            return
        (p,) = (p for p in cls.boundary.parameters if p.name == pool)
        layout = axes_of(p, cache)
        form = f"{describe_value(cache)} is read as [{', '.join(layout)}]"
        for order in _FOREIGN_ORDERS if len(layout) == 4 else ():
            sizes = [cache.shape[axis] for axis in order]
            if cls._misfit(a, lens, table, *sizes[:2]) is None:
                other = ", ".join(layout[order.index(axis)] for axis in range(4))
                raise ValueError(
                    f"{pool}: {form}, so that {complaint}; all of them would fit [{other}]: "
                    "transpose the cache if that is its layout"
                )
        raise ValueError(f"{complaint} ({pool} {form})")

    @classmethod
    def _misfit(
        cls, a: Arguments, lens: np.ndarray, table: np.ndarray | None, pages: int, page_size: int
    ) -> str | None:
        """The first length or table entry that does not fit a cache, in words."""
        columns = cls._table_columns(a)
        wrong = np.flatnonzero((lens < 0) | (lens > columns * page_size))
        if wrong.size:
            r = int(wrong[0])
            legal = f"0 to {columns * page_size}, {columns} pages of {page_size} tokens"
            return f"{cls._lengths()}[{r}]: given {int(lens[r])}, expected {legal}"
        if table is None:
            return None
        used = np.arange(columns) * page_size < lens[:, None]
        bad = np.argwhere(used & ((table < 0) | (table >= pages)))
        if not bad.size:
            return None
        r, c = map(int, bad[0])
        entry, legal = int(table[r, c]), f"a page from 0 to {pages - 1}"
        return f"block_tables[{r}, {c}]: given {entry}, expected {legal}"


class RaggedCall(PagedCall):
    """A call of packed query rows of several sequences over a cache of pages.

    A ``plan`` stands for starts, lengths and the number of sequences: in canonical form these are
    the plan's.
    """

    merged: ClassVar[Mapping[str, str]] = {"plan": "query_start_loc"}
    untuned_arguments: ClassVar[frozenset[str]] = Call.untuned_arguments | arguments.TREE | {"plan"}
    sequence_hint: ClassVar[str] = (
        "shard heads or pages, or give each device its own rows and tables in a shard_map"
    )

    @classmethod
    def _valid_sequences(cls, a: Arguments) -> Any:
        """Returns the number of sequences that count."""
        return a["num_seqs"].reshape(())

    @classmethod
    def count_all(cls, a: Arguments) -> None:
        """Let all sequences count, in place."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, args: tuple, kwargs: Mapping[str, Any]) -> Arguments:
        """A plan has its own axes only: none of layers or of a batch."""
        a = super().prepare(args, kwargs)
        if isinstance(a["plan"], AttentionPlan):
            _check_arrays(a["plan"])
        return a

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """A plan is of as many rows and sequences as the call has."""
        super().canonicalize(a)
        plan = a["plan"]
        if plan is None:
            return
        _check_arrays(plan)
        planned = plan.rows.shape[1], plan.lens.shape[0]
        legal = a["queries"].shape[0], a[cls._lengths()].shape[0]
        if planned != legal:
            theirs, ours = (f"{size[0]} rows and {size[1]} sequences" for size in (planned, legal))
            raise InvalidArgument(
                f"plan: expected a plan of {ours}, as plan_ragged_attention({cls._lengths()}, "
                f"query_start_loc, ..., tokens={legal[0]}) makes it, given one of {theirs}"
            )
        a[cls._lengths()], a["query_start_loc"] = plan.lens, plan.starts
        cls.count_all(a)

    @classmethod
    def canonicalize_tree(cls, a: Arguments) -> None:
        """Joins a window with the mask of the new tokens, by their positions."""
        tokens, n = a["queries"].shape[0], a[cls._lengths()].shape[0]
        if (a["tree_mask"] is None and a["positions"] is None) or 0 in (tokens, n):
            a["tree_mask"] = a["positions"] = None
            return
        capacity = cls._table_columns(a) * a[cls.boundary.pools[0]].shape[1]
        lens, starts = a[cls._lengths()], a["query_start_loc"]
        sequence, _ = row_positions(lens, starts, cls._valid_sequences(a), tokens, capacity)
        rows = new_rows(jnp.asarray(starts), jnp.asarray(lens), sequence, capacity)
        tree = a["tree_mask"], a["positions"], a["sliding_window"]
        a["tree_mask"], a["positions"] = prepare_tree(*tree, rows)

    @classmethod
    def check_contents(cls, a: Arguments) -> None:
        """Check that a plan was made from the starts and lengths of the call."""
        super().check_contents(a)
        if a["plan"] is None:
            return
        plan, n = a["plan"], a[cls._lengths()].shape[0]
        count = min(int(np.asarray(cls._valid_sequences(a))), n)
        made = make_plan(a[cls._lengths()], a["query_start_loc"], count, a["queries"].shape[0])
        for name in ("lens", "starts"):
            ours, theirs = (np.asarray(getattr(x, name)) for x in (made, plan))
            if not np.array_equal(ours, theirs):
                i = int(np.flatnonzero(ours != theirs)[0])
                raise ValueError(
                    f"plan: given {name}[{i}] = {int(theirs[i])}, expected {int(ours[i])}, as the "
                    "call has it: a plan is made from the starts and lengths of its step"
                )
        if plan.max_query_len is not None:
            counts = np.diff(np.asarray(made.starts))
            if counts.size and counts.max() > plan.max_query_len:
                r = int(counts.argmax())
                raise ValueError(
                    f"plan: given max_query_len={plan.max_query_len}, expected at least the "
                    f"{int(counts[r])} rows of sequence {r}"
                )

    @classmethod
    def visible_keys(cls, a: Arguments) -> tuple[Any, Any]:
        capacity = cls._table_columns(a) * a[cls.boundary.pools[0]].shape[1]
        count, tokens = cls._valid_sequences(a), a["queries"].shape[0]
        arrays = a[cls._lengths()], a["query_start_loc"], count
        sequence, position = row_positions(*arrays, tokens, capacity)
        return sequence, position + 1

    @classmethod
    def with_rows(cls, a: Arguments, tables: Any, lengths: Any) -> Arguments:
        starts = jnp.arange(a["queries"].shape[0] + 1, dtype=jnp.int32)
        rows = {cls._lengths(): lengths, "block_tables": tables, "query_start_loc": starts}
        return {**a, **rows, "plan": None}

    @classmethod
    def empty_outputs(cls, a: Mapping[str, Any], problem: Any) -> tuple[Any, ...] | None:
        """Zero, lse -inf, where an axis of the queries, the cache or the table has no entries."""
        queries, cache = a["queries"], a[cls.boundary.pools[0]]
        shapes = (*queries.shape, *cache.shape, *a["block_tables"].shape)
        if 0 not in shapes:
            return None
        lse = jnp.full(queries.shape[:-1], -jnp.inf, jnp.float32)
        return jnp.zeros(queries.shape, queries.dtype), lse

    @classmethod
    def plan_operands(cls, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the operand of stages that a plan is besides starts and lengths."""
        plan = arrays.get("plan")
        return {} if plan is None else {"packed_rows": plan.rows}

    @classmethod
    def stage_outputs(cls, problem: RaggedProblem) -> tuple[str, ...]:
        """Returns the names of the arrays that the last stage leaves."""
        return ("o", "lse") if problem.paged.return_lse else ("o",)

    @classmethod
    def outputs_of_stages(
        cls, arrays: Mapping[str, Any], problem: RaggedProblem, outputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Returns the outputs of the call from the arrays of the last stage."""
        o, *others = outputs
        if problem.paged.return_lse:
            others[0] = name_lse(others[0])
        return (name_output(o), *others)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns samples whose plan is theirs."""
        samples, plan = super().samples(a, rng), a.get("plan")
        if isinstance(plan, AttentionPlan):
            lens, starts = samples[cls._lengths()], samples["query_start_loc"]
            tokens = a["queries"].shape[0]
            samples["plan"] = make_plan(lens, starts, len(lens), tokens, plan.max_query_len)
        return samples

    @classmethod
    def fold_batch(cls, *args: Any) -> None:
        """Returns None: packed rows of several calls have no one order, so calls are a loop."""

    @classmethod
    def check_sequences(cls, a: Arguments, count: int) -> None:
        """Check known row starts and cached lengths of the first ``count`` packed sequences."""
        name, starts = cls._lengths(), concrete_indices(a["query_start_loc"])
        if starts is None or starts.size == 0:
            return
        used, tokens = starts[: count + 1], a["queries"].shape[0]
        check_starts(used, "query_start_loc")
        if used[-1] > tokens:
            last = f"query_start_loc[{len(used) - 1}]"
            raise out_of_range(last, f"at most the {tokens} rows of queries", int(used[-1]))
        lens = concrete_indices(a[name])
        if lens is None:
            return
        counts = np.diff(used.astype(np.int64))

        def legal(row: int) -> str:
            return f"at least its {int(counts[row])} query rows"

        check_entries(name, lens, lens[: len(counts)] < counts, legal)


def _check_arrays(plan: AttentionPlan) -> None:
    """Checks the arrays of a plan, which whatever maps over a pytree may have replaced.

    Raises:
        InvalidArgument: wrong class, dtype, rank or sizes that disagree.
    """
    arrays = {"lens": plan.lens, "starts": plan.starts, "rows": plan.rows}
    shapes = [getattr(x, "shape", ()) for x in arrays.values()]
    (*_, n), (*_, t) = shapes[0] or (0,), shapes[2] or (0,)
    if shapes == [(n,), (n + 1,), (4, t)]:
        if all(jnp.issubdtype(x.dtype, jnp.integer) for x in arrays.values()):
            return
    described = ", ".join(f"{name} {describe_value(x)}" for name, x in arrays.items())
    raise InvalidArgument(
        f"plan: expected lens int[n], starts int[n+1] and rows int[4, tokens], given {described}"
    )
