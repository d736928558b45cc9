"""The choice between ring, all-gather and heads for sequence, from sizes and masks alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ejkernel.types.arrays import size_of
from ejkernel.types.attention.context.ring import Plan, Ring
from ejkernel.types.masks.rules import Rule

STRATEGIES = ("all_gather", "ring", "ring_packed", "ulysses")
# FLOPs for each byte of keys in which links of 300 GB/s send them to the next device of a GPU that
# computes 600 TFLOP/s
HIDDEN_INTENSITY = 2000.0
GATHERED_BYTES = 2**30
"""Most bytes of gathered keys and values that "auto" keeps on a device."""

GROUP_BYTES = 2**24
"""Least bytes of queries on a device for which a group of heads is exchanged on its own."""
MOST_GROUPS = 4
"""Most groups: the first exchange and the last, which nothing hides, are a quarter of all."""


class Choice(NamedTuple):
    """A strategy, and the reason for it."""

    strategy: str
    reason: str


def requested_strategy(cfg: Any, strategies: Sequence[str] = STRATEGIES) -> str | None:
    """Returns which of a kernel's ``strategies`` a config names; None: it leaves the choice."""
    named = cfg.get if isinstance(cfg, Mapping) else lambda name: getattr(cfg, name, None)
    strategy = None if cfg is None else named("context_parallel")
    if strategy in (None, "auto"):
        return None
    if strategy not in strategies:
        legal = ", ".join(("auto", *strategies))
        raise ValueError(f"cfg: context_parallel={strategy!r}, expected one of {legal}")
    return strategy


def divides_heads(a: Mapping[str, Any], ring: Ring) -> bool:
    """Returns whether every device can have the same number of query heads."""
    heads = a["query"].shape[2]
    return ring.size > 1 and heads > 0 and heads % ring.size == 0


def count_head_groups(a: Mapping[str, Any], ring: Ring) -> int:
    """Returns in how many groups heads are exchanged for sequence, 1 for small calls.

    A group has whole key heads. A bias would be gathered for each group.
    """
    q, kv_heads = a["query"], a["key"].shape[2]
    if not divides_heads(a, ring) or kv_heads % ring.size or a.get("bias") is not None:
        return 1
    size = math.prod(map(size_of, q.shape)) * np.dtype(q.dtype).itemsize
    fitting = (
        groups
        for groups in range(MOST_GROUPS, 1, -1)
        if kv_heads // ring.size % groups == 0 and size >= groups * GROUP_BYTES
    )
    return next(fitting, 1)


def choose_strategy(a: Mapping[str, Any], ring: Ring, plan: Plan, rules: Sequence[Rule]) -> Choice:
    """Returns what "auto" means for a call of canonical arguments."""
    q, k, v = a["query"], a["key"], a["value"]
    steps = plan.schedule.count
    if ring.size == 1:
        return Choice("ring", "one device")
    if steps < ring.size and steps <= 2:
        return Choice("ring", f"{steps} of {ring.size} shards of keys are visible")
    heads = divides_heads(a, ring) and a.get("bias") is None
    causal = any(rule.high_distance is not None for rule in rules)
    if causal and not ring.zigzag and heads:
        return Choice("ulysses", "contiguous shards of a causal sequence have unequal work")
    size = sum(np.dtype(x.dtype).itemsize * x.shape[3] for x in (k, v)) * k.shape[2]
    flops = 2 * q.shape[1] * q.shape[2] * (q.shape[3] + v.shape[3]) / (2 if causal else 1)
    if size and flops / size >= HIDDEN_INTENSITY:
        return Choice("ring", "keys are sent while others are used, in less time")
    if heads:
        return Choice("ulysses", "sending keys takes longer than using them")
    gathered = size * k.shape[0] * k.shape[1] * ring.size
    if gathered <= GATHERED_BYTES:
        return Choice("all_gather", f"gathered keys and values are {gathered >> 20} MiB")
    return Choice("ring", "gathered keys and values need too much memory")
