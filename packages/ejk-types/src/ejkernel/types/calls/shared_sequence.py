"""Calls of attention on a shard of their sequence, by the ring kernel of the same backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ejkernel.types.attention.latent import drop_masked_rows, expand_rows
from ejkernel.types.calls.ring_attention import RingAttention
from ejkernel.types.masks.combine import mask_of

SHARED = (
    "query", "key", "value", "bias", "softmax_aux", "mask_info", "softmax_scale", "dropout_prob",
    "dropout_seed", "logits_soft_cap", "return_lse", "precision", "logits_dtype", "score_mod",
    "mask_mod",
)  # fmt: skip


def without_packing(a: Mapping[str, Any]) -> dict[str, Any]:
    """Returns canonical arguments whose cumulative lengths are joined with the mask.

    Segment ids may be sharded with their tokens, cumulative lengths may not.
    """
    packed = next((n for n in ("cum_seqlens_q", "cu_seqlens") if a.get(n) is not None), None)
    if packed is None:
        return dict(a)
    mask = mask_of({**a, "cum_seqlens_q": a[packed]})
    others = ("cum_seqlens_q", "cum_seqlens_k", "cu_seqlens", "attention_mask", "sliding_window")
    merged = {name: None for name in others if name in a}
    return {**a, **merged, "causal": False, "causal_offset": 0, "mask_info": mask}


def ring_arguments(a: Mapping[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
    """Returns canonical arguments of ring_attention over mesh axes, of one device's arguments."""
    if "key_value" in a:
        q, k, v = expand_rows(drop_masked_rows(_without_mask(a), a["mask_info"]))
        a = {**a, "query": q, "key": k, "value": v}
    shared = {name: a[name] for name in SHARED if name in a}
    axis = axes[0] if len(axes) == 1 else axes
    return {**RingAttention.boundary.defaults, **shared, "axis_name": axis}


def _without_mask(a: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in a.items() if name != "mask_info"}


class ShardedCall:
    """A kernel on a shard of the sequence, with the interface and the arrays of the kernel.

    ``PartitionedKernel`` runs it in place of ``kernel``: outputs and residuals of a device are
    parts of those that ``kernel`` has for the full arrays.
    """

    arguments = staticmethod(ring_arguments)
    without_packing = staticmethod(without_packing)

    def __init__(self, kernel: Any, axes: tuple[str, ...]) -> None:
        self.kernel, self.ring, self.axes = kernel, kernel.context, axes

    @property
    def has_backward(self) -> bool:
        return self.kernel.has_backward

    def problem(self, a: Mapping[str, Any]) -> Any:
        return self.ring.problem(ring_arguments(a, self.axes))

    def tiles(self, problem: Any, target: Any, cfg: Any = None) -> Any:
        return self.ring.tiles(problem, target, cfg)

    def operands(self, a: Mapping[str, Any], problem: Any) -> dict[str, Any]:
        return self.ring.operands(ring_arguments(a, self.axes), problem)

    def precompute(self, work: Any, arrays: dict[str, Any]) -> dict[str, Any]:
        return arrays

    def forward(self, work: Any, arrays: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        work = replace(work, kernel=self.ring)
        if not self.has_backward:
            o, lse = self.ring.outputs(work, arrays)
            return (o, self._lse(lse)), ()
        (o, lse), scales = self.ring.forward(work, arrays)
        return (o, self._lse(lse)), self.kernel.saved_of(work.problem.calls[0][1], scales)

    def _lse(self, lse: Any) -> Any:
        """Exchanges the axes of queries and heads where the kernel has them in that order."""
        return lse.swapaxes(1, 2) if self.kernel.heads_first else lse

    def backward(self, work, arrays, outputs, saved, cotangents) -> Mapping[str, Any]:
        work, (o, lse), (do, dlse) = replace(work, kernel=self.ring), outputs, cotangents
        lse, dlse = self._lse(lse), self._lse(dlse)
        sinks = arrays.get("softmax_aux")
        scales = self.kernel.scales_of(work.problem.calls[0][1], saved, lse, sinks)
        return self.ring.backward(work, arrays, (o, lse), scales, (do, dlse))
