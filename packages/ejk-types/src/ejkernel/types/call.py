"""A call of attention by the names of its arguments: its mask and its static facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ejkernel.types.arrays import result_dtype
from ejkernel.types.combine import combine_masks
from ejkernel.types.mask_info import MaskInfo
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Unsupported

_ARRAYS = ("mask_info", "attention_mask", "cum_seqlens_q", "cum_seqlens_k")


def mask_of(a: Mapping[str, Any]) -> MaskInfo:
    """The one mask of a call."""
    q, k = a["query"], a["key"]
    return combine_masks(
        **{name: a.get(name) for name in _ARRAYS},
        causal=a.get("causal", False),
        causal_offset=a.get("causal_offset", 0),
        sliding_window=a.get("sliding_window"),
        q_len=q.shape[1],
        kv_len=k.shape[1],
        batch=q.shape[0],
        heads=q.shape[2],
    )


def read_mask(a: Mapping[str, Any], read: Callable[[MaskInfo], Any]) -> Any:
    """What ``read`` makes of the call's mask, from shapes alone: static facts, not arrays.

    Raises:
        Unsupported: ``read`` raised it.
    """
    given = {name: a.get(name) for name in _ARRAYS}
    if all(x is None for x in given.values()):
        return read(mask_of(a))
    found: list[Any] = []

    def probe(arrays: dict[str, Any]) -> int:
        try:
            found.append(read(mask_of({**a, **arrays})))
        except Unsupported as error:
            found.append(error)
        return 0

    jax.eval_shape(probe, given)
    if isinstance(found[0], Unsupported):
        raise found[0]
    return found[0]


def problem_of(a: Mapping[str, Any], **own: Any) -> Problem:
    """The static facts of a settled call; ``own`` are the fields only some kernels ask for."""
    q, k, v = a["query"], a["key"], a["value"]
    return Problem(
        batch=q.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=result_dtype(q.dtype, k.dtype, v.dtype).name,
        scale=a["softmax_scale"],
        soft_cap=a.get("logits_soft_cap"),
        **own,
    )
