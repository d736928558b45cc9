"""Which candidates are worth compiling: few, near the heuristic, and some of every platform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ejkernel.ops.utils.serialization import to_plain

if TYPE_CHECKING:
    from ejkernel.ops.core.kernel import Kernel


def shortlist(kernel: Kernel[Any, Any], configs: Sequence[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the configs, in their order; the first one is always kept.

    Implementations leave out what their own arithmetic on registers, shared memory and waves
    rules out, and list their heuristic config first. What is left is ranked by the steps it lies
    from that, and platforms take turns, so that none is crowded out by another's length.
    """
    if len(configs) <= limit:
        return list(configs)
    queues: dict[Any, list[int]] = {}
    for index, cfg in enumerate(configs):
        queues.setdefault(kernel.config_platform(cfg), []).append(index)
    for queue in queues.values():
        first = _plain(configs[queue[0]])
        queue.sort(key=lambda index: _steps(_plain(configs[index]), first))
    kept: list[int] = []
    for turn in range(max(map(len, queues.values()))):
        kept += [queue[turn] for queue in queues.values() if turn < len(queue)]
    return [configs[index] for index in sorted(kept[: max(limit, 1)])]


def _plain(cfg: Any) -> Any:
    try:
        return to_plain(cfg)
    except TypeError:
        return None


def _steps(a: Any, b: Any) -> float:
    """How many doublings two configs lie apart; a field that only one of them sets is half one."""
    if isinstance(a, dict) and isinstance(b, dict):
        return sum(_steps(a.get(k), b.get(k)) for k in {**a, **b})
    if a == b:
        return 0.0
    if a is None or b is None:
        return 0.5
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    return abs(math.log2(a / b)) if numbers and a > 0 and b > 0 else 1.0
