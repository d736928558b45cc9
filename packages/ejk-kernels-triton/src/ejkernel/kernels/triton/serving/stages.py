"""Stages of serving calls in Triton, a launch each.

A decoding call has ``decode_sequences`` and ``merge_sequences``; a ragged call builds its schedule,
may write the cache, decodes, prefills and merges.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.serving.decode import PagedSplit
from ejkernel.kernels.triton.serving.decode_tiles import (
    DecodeTiles,
    can_merge_at_end,
    count_work_ranges,
)
from ejkernel.kernels.triton.serving.few_rows import FewRowsAttention
from ejkernel.kernels.triton.serving.merge import PagedMerge
from ejkernel.kernels.triton.serving.packed_rows import packed_operands
from ejkernel.kernels.triton.serving.prefill import RaggedPrefill
from ejkernel.kernels.triton.serving.ragged_merge import RaggedMerge
from ejkernel.kernels.triton.serving.ragged_tiles import (
    RaggedTiles,
    count_counters,
    decode_problem,
    decode_ranges,
    is_few_rows,
)
from ejkernel.kernels.triton.serving.schedule import RaggedScheduleLaunch
from ejkernel.kernels.triton.serving.write import RaggedWrite
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types.serving.problem import PagedProblem, RaggedProblem

ONLY_MERGED = ("v_scale", "sink")  # operands that only the merge reads


def decode_sequences(work: Work, arrays: Arrays) -> Arrays:
    """Returns partial results of every split, or the output where this launch merges.

    It does where each sequence has one split, or where its tiles ask for it.
    """
    p, t, ranges = _work_ranges(work)
    launch = PagedSplit(p, t, ranges)
    if launch.direct:
        return call(launch, **arrays)
    if can_merge_at_end(p, t, ranges, work.target):
        return call(launch, **arrays, counters_in=jnp.zeros(launch.count_counters, jnp.int32))
    return call(launch, **{name: x for name, x in arrays.items() if name not in ONLY_MERGED})


def merge_sequences(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output of partial results, and the log-sum-exp if the call returns it."""
    if "o" in arrays:
        return {}
    launch = PagedMerge(*_work_ranges(work))
    merged = call(launch, **select_arrays(arrays, *launch.batching))
    return {"o": merged["o"], **({"lse": merged["lse_out"]} if "lse_out" in merged else {})}


def _work_ranges(work: Work) -> tuple[PagedProblem, DecodeTiles, int]:
    """Returns the problem, the tiles and the number of work ranges of both launches."""
    p, t = work.problem, work.tiles
    ranges = t.splits * p.batch if t.splits else count_work_ranges(p, t, work.target)
    # ranges of one sequence are its splits, which programs find without looking for the sequence
    return p, replace(t, splits=ranges) if p.batch == 1 else t, ranges


def build_schedule(work: Work, arrays: Arrays) -> Arrays:
    """Returns the tables of ``types.serving.schedule.RaggedSchedule``; none for few rows."""
    if is_few_rows(work.problem, work.tiles):
        return {}
    launch = RaggedScheduleLaunch(work.problem, work.tiles, work.target)
    return call(launch, **select_arrays(arrays, "starts", "lens", "valid"))


def write_cache(work: Work, arrays: Arrays) -> Arrays:
    """Returns the cache with the new keys and values, and the scale of the logits after that."""
    names = ("keys", "values", "tables", "sequences", "header", "k_scale", "v_scale")
    if is_few_rows(work.problem, work.tiles):
        names += packed_operands(work.problem)
    written = call(
        RaggedWrite(work.problem, work.tiles, work.target),
        **select_arrays(arrays, *names),
        first_rows=arrays.get("d_rows"),
        # XLA then copies a slice of stacked caches before the launch, at full speed (``in_place``)
        cache_in=jax.lax.optimization_barrier(arrays["k"]),
    )
    scale = arrays.get("logit_scale", arrays.get("k_scale"))
    written["k"] = written.pop("cache")
    return written | ({} if scale is None else {"k_scale": scale})


def decode_rows(work: Work, arrays: Arrays) -> Arrays:
    """Returns partial results of the sequences that are decoded; of few rows all outputs."""
    p, t = work.problem, work.tiles
    if is_few_rows(p, t):
        return _attend_few_rows(work, arrays)
    partial = call(
        decode_launch(p, t, work.target),
        **select_arrays(arrays, "q", "k", "tables", "tree", "positions", "k_scale"),
        lens=arrays["d_lens"],
        begins=arrays["d_begins"],
        rows=arrays["d_rows"],
        counts=arrays["d_counts"],
    )
    return {f"d_{name}": x for name, x in partial.items()}


def _attend_few_rows(work: Work, arrays: Arrays) -> Arrays:
    p, t = work.problem, work.tiles
    counters = arrays.get("counters")
    if counters is None:
        counters = jnp.zeros(count_counters(p, t), jnp.int32)
    names = ("q", "k", "tables", *packed_operands(p), "tree", "positions")
    names += ("k_scale", "v_scale", "sink")
    results = call(
        FewRowsAttention(p, t, work.target),
        **select_arrays(arrays, *names),
        counters_in=counters,
    )
    outputs = {"o": "o", "lse": "lse", "cache": "k"}
    return {outputs[name]: x for name, x in results.items() if name in outputs}


def decode_launch(problem: RaggedProblem, tiles: RaggedTiles, target: Target) -> PagedSplit:
    """Returns the split kernel over decoded sequences; the other sequences have length 0."""
    ranges = decode_ranges(problem, tiles, target)
    return PagedSplit(decode_problem(problem, tiles), tiles.decode, ranges)


def skip_long_prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns nothing: Triton has no kernel for long prefill.

    A stage in its place reads ``work_tiles`` and ``decode_rows``, and returns ``o`` with the rows
    of its sequences, the other rows unset.
    """
    return {}


def prefill_rows(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output with the rows of short prefill, and partial results of split tiles."""
    if is_few_rows(work.problem, work.tiles):
        return {}
    names = ("q", "k", "tables", "sequences", "header", "tree", "positions")
    names += ("k_scale", "v_scale", "sink")
    o = arrays.get("o")
    if o is not None:
        # XLA then copies a slice of padded rows before the launch (``in_place``)
        o = jax.lax.optimization_barrier(o)
    results = call(
        RaggedPrefill(work.problem, work.tiles, work.target),
        **select_arrays(arrays, *names),
        first_rows=arrays["d_rows"],
        o_in=o,
    )
    outputs = ("o", "lse")
    return {name if name in outputs else f"p_{name}": x for name, x in results.items()}


def merge_rows(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output, and the log-sum-exp, with the rows of partial results."""
    if is_few_rows(work.problem, work.tiles):
        return {}
    return _merge_partials(work, arrays, None)


def merge_rows_and_cache(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output, the log-sum-exp, and the cache of a call that wrote it."""
    if is_few_rows(work.problem, work.tiles):
        return {}
    merged = _merge_partials(work, arrays, arrays["k"])
    return {"k": merged.pop("cache"), **merged}


def _merge_partials(work: Work, arrays: Arrays, cache: jax.Array | None) -> Arrays:
    decoded = ("d_acc", "d_m", "d_l", "d_starts", "d_counts")
    prefilled = ("sequences", "header", "p_acc", "p_m", "p_l")
    return call(
        RaggedMerge(work.problem, work.tiles, work.target),
        **select_arrays(arrays, *decoded, *prefilled, "v_scale", "sink"),
        first_rows=arrays["d_rows"],
        o_in=arrays["o"],
        cache_in=cache,
        lse_in=arrays.get("lse"),
    )


def select_arrays(arrays: Arrays, *names: str) -> Arrays:
    """Returns the arrays of these names that a call has."""
    return {name: arrays[name] for name in names if name in arrays}
