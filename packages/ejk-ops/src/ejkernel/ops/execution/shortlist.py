"""Which candidates are worth compiling: few, and some of every platform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel.ops.core.kernel import Kernel


def shortlist(kernel: Kernel[Any, Any], configs: Sequence[Any], limit: int) -> list[Any]:
    """At most ``limit`` of the configs, in their order; the first one is always kept.

    Implementations list their candidates best first, after their own arithmetic on registers,
    shared memory and waves. Platforms take turns, so that none is left out by another's length.
    """
    if len(configs) <= limit:
        return list(configs)
    queues: dict[Any, list[int]] = {}
    for index, cfg in enumerate(configs):
        queues.setdefault(kernel.config_platform(cfg), []).append(index)
    kept: list[int] = []
    for turn in range(max(map(len, queues.values()))):
        kept += [queue[turn] for queue in queues.values() if turn < len(queue)]
    return [configs[index] for index in sorted(kept[: max(limit, 1)])]
