"""Stages of a ragged call in Triton: schedule, decode, prefill and merge, a launch each."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.launch import shapes_of
from ejkernel.kernels.triton.ragged_page_attention import plans
from ejkernel.ops.differentiate import Arrays, Work

LONG_PREFILL = ("long_sequences", "work_tiles", "decode_rows")  # tables of another kernel


def launch(plan: Any, work: Work, arrays: Arrays, *names: str) -> tuple[jax.Array, ...]:
    """Launches a kind of plan on the operands named, those that are given; returns its results."""
    read = {name: arrays[name] for name in names if name in arrays}
    return call_plan(plan(work.problem, work.tiles, work.target, shapes_of(read)), *read.values())


def schedule(work: Work, arrays: Arrays) -> Arrays:
    """Returns the tables of ``types.serving.schedule.RaggedSchedule``."""
    tables = launch(plans.SchedulePlan, work, arrays, "starts", "lens", "valid")
    return dict(zip((*plans.SCHEDULE, *LONG_PREFILL), tables, strict=False))


def decode(work: Work, arrays: Arrays) -> Arrays:
    """Returns partial results of the sequences that are decoded."""
    operands = {
        "q": arrays["q"],
        "k": arrays["k"],
        "lens": arrays["d_lens"],
        "tables": arrays["tables"],
        "begins": arrays["d_begins"],
        "rows": arrays["d_rows"],
        "counts": arrays["d_counts"],
    }
    if "k_scale" in arrays:
        operands["k_scale"] = arrays["k_scale"]
    partial = launch(plans.decode_plan, work, operands, *operands)
    return dict(zip(("d_acc", "d_m", "d_l", "d_starts"), partial, strict=True))


def no_long_prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns nothing: Triton has no kernel for long prefill.

    A stage in its place reads ``work_tiles`` and ``decode_rows``, and returns ``o`` with the rows
    of its sequences, the other rows unset.
    """
    return {}


def prefill(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output with the rows of short prefill, and partial results of split tiles."""
    results = launch(
        plans.PrefillPlan, work, arrays,
        "q", "k", "tables", "d_rows", "work", "facts", "k_scale", "v_scale", "sink", "o",
    )  # fmt: skip
    return dict(zip(("o", "p_acc", "p_m", "p_l"), results, strict=True))


def merge(work: Work, arrays: Arrays) -> Arrays:
    """Returns the output with the rows of partial results."""
    return {"o": _merge(work, arrays)[0]}


def merge_beside_cache(work: Work, arrays: Arrays) -> Arrays:
    """Returns the same, and the cache of a call that wrote it."""
    o, cache = _merge(work, arrays, "k")
    return {"o": o, "k": cache}


def _merge(work: Work, arrays: Arrays, *cache: str) -> tuple[jax.Array, ...]:
    return launch(
        plans.RaggedMergePlan, work, arrays,
        "d_acc", "d_m", "d_l", "d_starts", "d_counts", "d_rows", "work", "facts",
        "p_acc", "p_m", "p_l", "v_scale", "sink", "o", *cache,
    )  # fmt: skip
