"""Decides whether cuDNN computes a call exactly as specified; gives the reason if not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ejkernel.ops.utils.device import target_device
from ejkernel.types import MaskInfo
from ejkernel.types.masks.combine import mask_of


@dataclass(frozen=True)
class Pattern:
    """A mask as cuDNN knows it: causal from the top left, with a left window or without."""

    causal: bool
    left: int | None = None


def pattern_of(mask: MaskInfo, q_len: int, kv_len: int) -> Pattern | str:
    """The mask as a Pattern, or the reason why it is none."""
    arrays = ("attention_mask", "q_segment_ids", "q_positions", "kv_positions")
    for part in mask.terms:
        for name in arrays:
            if getattr(part, name) is not None:
                return f"mask_info: cuDNN takes no {name}"
    if len(mask.terms) > 1:
        return "mask_info: cuDNN takes one causal or window rule"
    if mask.chunk_size is not None:
        return "mask_info: cuDNN takes no chunk_size"
    window = mask.sliding_window
    if not mask.causal and window is None:
        return Pattern(False)
    if mask.causal_offset != 0:
        return f"causal_offset: cuDNN takes 0 only, got {mask.causal_offset}"
    if window is None:
        return Pattern(True)
    left, right = window
    if not mask.causal and right != 0:
        return f"sliding_window: cuDNN takes left windows only, got right {right}"
    if q_len > kv_len:
        return f"sliding_window: cuDNN needs q_len <= kv_len, got {q_len} and {kv_len}"
    return Pattern(True, left)


def _shapes(q: Any, k: Any, v: Any) -> str | None:
    dtypes = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= {"float16", "bfloat16"}:
        return f"query: cuDNN takes float16 or bfloat16 throughout, got {', '.join(sorted(dtypes))}"
    if 0 in (*q.shape, *k.shape):
        return "query: cuDNN takes no empty axis"
    if v.shape[-1] != q.shape[-1]:
        return f"value: cuDNN needs value_dim = head_dim, got {v.shape[-1]} and {q.shape[-1]}"
    capability = target_device().compute_capability
    if capability is None or capability < (8, 0):
        return "query: cuDNN's attention needs compute capability 8.0"
    largest = 256 if capability >= (9, 0) else 128
    if q.shape[-1] > largest or q.shape[-1] % 8:
        return f"query: cuDNN takes multiples of 8 up to {largest} here, got {q.shape[-1]}"
    return None


def reason_against(arguments: Mapping[str, Any]) -> str | None:
    """Returns the reason why cuDNN cannot do the call, from static properties; None if it can."""
    precision = arguments.get("precision")
    if precision is not None and str(precision).lower() not in ("default", "precision.default"):
        return f"precision: cuDNN has the default only, got {precision}"
    scale = arguments.get("softmax_scale")
    if scale is not None and not scale > 0:
        return f"softmax_scale: cuDNN needs it greater than 0, got {scale}"
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    reason = _shapes(q, k, v)
    if reason is not None:
        return reason
    pattern = pattern_of(mask_of(arguments), q.shape[1], k.shape[1])
    return pattern if isinstance(pattern, str) else None
