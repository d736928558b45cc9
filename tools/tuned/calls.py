"""The calls worth tuning, those first that say most about others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ejkernel.modules.workloads import Call, call_of
from ejkernel.modules.workloads.families import AttentionShape
from ejkernel.modules.workloads.find import matching
from ejkernel.modules.workloads.shapes import SHAPES
from ejkernel.ops.config.nearness import payload_distance
from ejkernel.ops.core.invocation import Invocation
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
# Products of XLA reach about this part of what a fused kernel's would take.
PLAIN_PRODUCTS = 0.5
HOPELESS = 2.0


@dataclass(frozen=True)
class TableCall:
    """One call to tune."""

    call: Call
    inv: Invocation

    @property
    def name(self) -> str:
        return f"{self.call.operation} {self.call.name}"


def calls(ops: str, cases: str, device: str) -> Iterator[TableCall]:
    """Calls of the shapes for ``device`` with something to choose, one per key."""
    seen: set[str] = set()
    for shape in SHAPES:
        if shape.device != device or not matching([shape.name], cases):
            continue
        for operation in matching(filter(shape.serves, shape.operations), ops):
            call = call_of(shape, operation)
            inv = call.invocation()
            if "mesh" in call.options or inv.key in seen:
                continue
            seen.add(inv.key)
            found = TableCall(call, inv)
            if len(promising(found)) > 1:
                yield found


def promising(call: TableCall) -> list[Any]:
    """The candidates that are not hopeless."""
    inv = call.inv.bound
    space = call.inv.kernel.config_space(inv)
    return [cfg for i, cfg in enumerate(space) if not i or hopeless(call, cfg) is None]


def hopeless(call: TableCall, cfg: Any) -> str | None:
    """Why arithmetic rules a candidate out, None when it does not."""
    shape, kernel = call.call.shape, call.inv.kernel
    if kernel.config_platform(cfg) is not Platform.XLA or not kernel.trained:
        return None
    if call.call.device != "gpu" or not isinstance(shape, AttentionShape):
        return None
    pairs = shape.batch * shape.heads * shape.visible_pairs()
    if call.call.operation not in ("flash_attention", "scaled_dot_product_attention") or not pairs:
        return None
    inv = call.inv.bound
    if kernel.config_platform(kernel.heuristic_cfg(inv)) is Platform.XLA:
        return None  # there is no fused kernel
    fused = (1 + call.call.backward_factor) * call.call.flops
    plain = PLAIN_PRODUCTS * fused + LOGITS_BYTES * pairs * FLOPS_PER_BYTE
    if plain < HOPELESS * fused:
        return None
    return (
        f"XLA moves {LOGITS_BYTES * pairs / 1e9:.0f} GB of logits, by arithmetic "
        f"{plain / fused:.1f} times the work of a fused kernel"
    )


def in_order(found: Iterable[TableCall]) -> list[TableCall]:
    """Breadth first: of each group of near calls one, models before sweeps; then the others.

    Operations without GPU kernels of their own come after all that have some.
    """
    rank = {name: i for i, name in enumerate(FIRST)}

    def place(call: TableCall) -> tuple[int, bool]:
        return rank.get(call.call.operation, len(rank)), not call.call.source

    ordered = sorted(found, key=place)
    first: list[TableCall] = []
    others: list[TableCall] = []
    for call in ordered:
        near = any(_serves(known, call) for known in first)
        (others if near else first).append(call)

    def turn(call: TableCall) -> tuple[bool, bool, bool, int]:
        operation, plain = place(call)
        return operation == len(rank), call in others, plain, operation

    return sorted(ordered, key=turn)


def _serves(known: TableCall, call: TableCall) -> bool:
    like = call.inv.kernel.likeness
    return payload_distance(known.inv.payload, call.inv.payload, like) < math.inf
