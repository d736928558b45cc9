"""Stages of a ragged call in Triton: schedule, decode, prefill and merge, a launch each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.ragged_page_attention.tiles import Tiles, decode_problem, decode_shares
from ejkernel.kernels.triton.targets import Target
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.types.serving.problem import RaggedProblem

if TYPE_CHECKING:
    from ejkernel.kernels.triton.page_attention.split_kernel import PagedSplit


def schedule(work: Work, arrays: Arrays) -> Arrays:
    """Returns the tables of ``types.serving.schedule.RaggedSchedule``."""
    from ejkernel.kernels.triton.ragged_page_attention.schedule_kernel import RaggedScheduleLaunch

    launch = RaggedScheduleLaunch(work.problem, work.tiles, work.target)
    return call(launch, **select(arrays, "starts", "lens", "valid"))


def decode(work: Work, arrays: Arrays) -> Arrays:
    """Returns partial results of the sequences that are decoded."""
    p, t = work.problem, work.tiles
    partial = call(
        decode_launch(p, t, work.target),
        **select(arrays, "q", "k", "tables", "k_scale"),
        lens=arrays["d_lens"],
        begins=arrays["d_begins"],
        rows=arrays["d_rows"],
        counts=arrays["d_counts"],
    )
    return {f"d_{name}": x for name, x in partial.items()}


def decode_launch(problem: RaggedProblem, tiles: Tiles, target: Target) -> PagedSplit:
    """Returns the split kernel over decoded sequences; the other sequences have length 0."""
    from ejkernel.kernels.triton.page_attention.split_kernel import PagedSplit

    shares = decode_shares(problem, tiles, target)
    return PagedSplit(decode_problem(problem, tiles), tiles.decode, shares)


def no_long_prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns nothing: Triton has no kernel for long prefill.

    A stage in its place reads ``work_tiles`` and ``decode_rows``, and returns ``o`` with the rows
    of its sequences, the other rows unset.
    """
    return {}


def prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output with the rows of short prefill, and partial results of split tiles."""
    from ejkernel.kernels.triton.ragged_page_attention.prefill_kernel import RaggedPrefill

    results = call(
        RaggedPrefill(work.problem, work.tiles, work.target),
        **select(arrays, "q", "k", "tables", "work", "facts", "k_scale", "v_scale", "sink"),
        first_rows=arrays["d_rows"],
        o_in=arrays.get("o"),
    )
    return {name if name == "o" else f"p_{name}": x for name, x in results.items()}


def merge(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output with the rows of partial results."""
    return {"o": _merge(work, arrays, None)["o"]}


def merge_beside_cache(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output, and the cache of a call that wrote it."""
    merged = _merge(work, arrays, arrays["k"])
    return {"o": merged["o"], "k": merged["cache"]}


def _merge(work: Work, arrays: Arrays, cache: jax.Array | None) -> Arrays:
    from ejkernel.kernels.triton.ragged_page_attention.merge_kernel import RaggedMerge

    names = ("d_acc", "d_m", "d_l", "d_starts", "d_counts", "work", "facts", "p_acc", "p_m", "p_l")
    return call(
        RaggedMerge(work.problem, work.tiles, work.target),
        **select(arrays, *names, "v_scale", "sink"),
        first_rows=arrays["d_rows"],
        o_in=arrays["o"],
        cache_in=cache,
    )


def select(arrays: Arrays, *names: str) -> Arrays:
    """Returns the arrays of these names that a call has."""
    return {name: arrays[name] for name in names if name in arrays}
