"""The launches of a ragged call, one after the other; mapped calls run in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bridge import call_plan
from ejkernel.kernels.triton.launch import shapes_of
from ejkernel.kernels.triton.ragged_page_attention import plans
from ejkernel.ops.differentiate import Work
from ejkernel.ops.execution.program_cache import PROGRAMS_LIMIT
from ejkernel.ops.in_turn import in_turn

# [T, h, d], cache, [n], [n, columns], [n + 1], [1 or 3], [1, h, sinks], [1, 1 or hk] twice
NAMES = ("q", "k", "lens", "tables", "starts", "valid", "sink", "k_scale", "v_scale")


def launch(plan: Any, work: Work, arrays: dict[str, Any], *names: str) -> tuple[jax.Array, ...]:
    """The results of a kind of plan on the operands named, those that are there."""
    given = {name: arrays[name] for name in names if name in arrays}
    return call_plan(plan(work.problem, work.tiles, work.target, shapes_of(given)), *given.values())


def scheduled(work: Work, arrays: dict[str, Any]) -> dict[str, Any]:
    """``arrays`` and which sequence is done how."""
    found = launch(plans.SchedulePlan, work, arrays, "starts", "lens", "valid")
    names = plans.SCHEDULE if work.tiles.long is None else plans.SCHEDULE + plans.QUEUE
    return arrays | dict(zip(names, found, strict=True))


def attended(work: Work, arrays: dict[str, Any], *cache: str) -> tuple[jax.Array, ...]:
    """``o [T, h, d]`` of ``scheduled`` arrays, and the ``cache`` of a call that wrote it."""
    decoded = {
        "q": arrays["q"],
        "k": arrays["k"],
        "lens": arrays["d_lens"],
        "tables": arrays["tables"],
        "begins": arrays["d_begins"],
        "rows": arrays["d_rows"],
        "counts": arrays["d_counts"],
    }
    if "k_scale" in arrays:
        decoded["k_scale"] = arrays["k_scale"]
    parts = launch(plans.decode_plan, work, decoded, *decoded)
    arrays = arrays | dict(zip(("d_acc", "d_m", "d_l", "d_starts"), parts, strict=True))
    if work.tiles.long is not None:
        given = (arrays[name] for name in ("q", "k", "tables", "lines", "own"))
        o = work.tiles.long(*given)
        arrays = arrays | {"o": o}
    tiles = launch(
        plans.PrefillPlan, work, arrays,
        "q", "k", "tables", "d_rows", "work", "facts", "k_scale", "v_scale", "sink", "o",
    )  # fmt: skip
    arrays = arrays | dict(zip(("o", "p_acc", "p_m", "p_l"), tiles, strict=True))
    return launch(
        plans.RaggedMergePlan, work, arrays,
        "d_acc", "d_m", "d_l", "d_starts", "d_counts", "d_rows", "work", "facts",
        "p_acc", "p_m", "p_l", "v_scale", "sink", "o", *cache,
    )  # fmt: skip


@functools.lru_cache(maxsize=PROGRAMS_LIMIT)
def looped(run: Callable[..., Any], work: Work, names: tuple[str, ...]) -> Callable[..., Any]:
    """``run(work, arrays)`` of arrays in the order of ``names``, None for those not given.

    Mapped calls are one loop: packed rows of several calls have no one order.
    """

    def flat(*arrays: Any) -> Any:
        given = zip(names, arrays, strict=True)
        return run(work, {name: x for name, x in given if x is not None})

    mapped = custom_vmap(flat)

    @mapped.def_vmap
    def rule(size: int, batched: Any, *arrays: Any) -> Any:
        out = in_turn(mapped, arrays, [any(jax.tree.leaves(b)) for b in batched])
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def attention(work: Work, arrays: dict[str, Any]) -> jax.Array:
    """``o [T, h, d]`` of the arrays in ``NAMES``."""
    return attended(work, scheduled(work, arrays))[0]


attend = partial(looped, attention)
