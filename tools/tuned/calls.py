"""The calls worth tuning, first those that say most about others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from ejkernel.modules.cli.tuning import Task, select_tasks, task_of
from ejkernel.modules.workloads import call_of
from ejkernel.modules.workloads.families import AttentionShape
from ejkernel.modules.workloads.find import matching
from ejkernel.modules.workloads.shapes import SHAPES
from ejkernel.ops.config.key_distance import key_distance
from ejkernel.ops.platforms import Platform

# Operations with kernels of their own for GPUs, by how many people wait for them; others last.
FIRST = ("flash_attention", "page_attention", "grouped_matmul", "mla_decode")

# Plain XLA attention keeps the logits in memory. Bytes per visible pair, forward: float32 logits
# written and read twice, 16-bit weights written and read; backward: both again with one reading
# less, float32 gradients of the weights written and read, 16-bit ones of the logits written and
# read twice.
LOGITS_BYTES = (4 + 8 + 2 + 2) + (4 + 4 + 2 + 2) + (4 + 4) + (2 + 4)
# Operations that a fused kernel does while memory moves a byte: 0.4 of the peak over the bandwidth
# is 82 on an H200, 80 on an A100 of 40 GB.
FLOPS_PER_BYTE = 80.0
# XLA's matmuls take about this part of a fused kernel's time.
MATMUL_SHARE = 0.5
PRUNED_RATIO = 2.0
PRUNED = ("flash_attention", "scaled_dot_product_attention")


def named_tasks(ops: str, cases: str, device: str) -> list[Task]:
    """Returns the calls of the shapes for ``device`` with something to choose, one per key."""
    tasks = (task_of(call, may_fail=True) for call in _named_calls(ops, cases, device))
    return select_tasks(tasks, count=_count_promising)[0]


def _named_calls(ops: str, cases: str, device: str) -> Iterator[Any]:
    for shape in SHAPES:
        if shape.device == device and matching([shape.name], cases):
            for operation in matching(filter(shape.serves, shape.operations), ops):
                call = call_of(shape, operation)
                if "mesh" not in call.options:
                    yield call


def _count_promising(task: Task) -> int:
    space = task.inv.kernel.config_space(task.inv)
    return sum(not i or pruned_reason(task, cfg) is None for i, cfg in enumerate(space))


def pruned_reason(task: Task, cfg: Any) -> str | None:
    """Returns why arithmetic rules a candidate out, None if it is worth its time."""
    call, kernel = task.call, task.inv.kernel
    if call is None or call.device != "gpu" or not isinstance(call.shape, AttentionShape):
        return None
    if kernel.config_platform(cfg) is not Platform.XLA or call.operation not in PRUNED:
        return None
    if kernel.config_platform(kernel.heuristic_cfg(task.inv)) is Platform.XLA:
        return None  # there is no fused kernel
    logits_bytes = LOGITS_BYTES * call.shape.batch * call.shape.heads * call.shape.visible_pairs()
    fused = (1 + call.backward_factor) * call.flops
    ratio = MATMUL_SHARE + logits_bytes * FLOPS_PER_BYTE / fused
    if ratio < PRUNED_RATIO:
        return None
    return (
        f"XLA moves {logits_bytes / 1e9:.0f} GB of logits, by arithmetic {ratio:.1f} times the "
        "work of a fused kernel"
    )


def in_order(tasks: Iterable[Task]) -> list[Task]:
    """Sorts breadth first: of each group of near calls one, models before sweeps; then the others.

    Operations without GPU kernels of their own come after all that have some.
    """
    rank = {name: i for i, name in enumerate(FIRST)}
    first: list[Task] = []

    def precedence(task: Task) -> tuple[int, bool]:
        return rank.get(task.operation, len(rank)), not (task.call and task.call.source)

    ordered = sorted(tasks, key=precedence)
    for task in ordered:
        if not any(_serves(other, task) for other in first):
            first.append(task)

    def key(task: Task) -> tuple[bool, bool, bool, int]:
        operation, unnamed = precedence(task)
        return operation == len(rank), task not in first, unnamed, operation

    return sorted(ordered, key=key)


def _serves(tuned: Task, task: Task) -> bool:
    """Returns whether the config of one call is near enough for another."""
    rules = task.inv.kernel.similarity
    return key_distance(tuned.inv.payload, task.inv.payload, rules) < math.inf
