"""ring_attention: what is local and what global, and which lengths a ring can cut."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.types.calls.settle.errors import invalid
from ejkernel.types.combine import combine_masks

Arguments = dict[str, Any]
LAYOUTS = ("contiguous", "zigzag")


def axis_is_bound(name: Any) -> bool:
    """Whether a mesh axis is bound here, as it is inside ``shard_map``."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def ring_layout(a: Arguments) -> None:
    """A known layout, and lengths that fit it where the arrays are one device's."""
    if a["layout"] not in LAYOUTS:
        raise ValueError(f"layout: given {a['layout']!r}, expected one of {', '.join(LAYOUTS)}")
    if axis_is_bound(a["axis_name"]):
        check_ring_lengths(a, 1, whole_keys=jax.lax.axis_size(a["axis_name"]))


def ring_masks(a: Arguments) -> None:
    """Segment ids of keys default to those of queries; array masks fit their arrays."""
    q_ids, kv_ids = a["q_segment_ids"], a["kv_segment_ids"]
    query, key = a["query"], a["key"]
    if q_ids is None and kv_ids is not None:
        raise ValueError("kv_segment_ids: given without q_segment_ids, expected both or neither")
    if q_ids is not None and kv_ids is None:
        if query.shape[1] != key.shape[1]:
            raise invalid("kv_segment_ids", "an array, since q_len and kv_len differ", kv_ids)
        a["kv_segment_ids"] = q_ids
    if a["mask_info"] is None or axis_is_bound(a["axis_name"]):
        return
    a["mask_info"] = combine_masks(
        a["mask_info"],
        q_len=query.shape[1],
        kv_len=key.shape[1],
        batch=query.shape[0],
        heads=query.shape[2],
    )


def check_ring_lengths(a: Arguments, devices: int, *, whole_keys: int) -> None:
    """Lengths divide over the ring; the key axis of a bias is whole."""
    step = devices * (2 if a["layout"] == "zigzag" else 1)
    for name in ("query", "key"):
        if a[name].shape[1] % step:
            why = f"the {devices} devices of axis {a['axis_name']!r}"
            if a["layout"] == "zigzag":
                why = f"two chunks on each of {why}" if devices > 1 else "the two chunks of zigzag"
            raise invalid(name, f"a length divisible by {step}, for {why}", a[name])
    keys = a["key"].shape[1] * whole_keys
    if a["bias"] is not None and a["bias"].shape[-1] != keys:
        raise invalid("bias", f"all {keys} keys on its last axis", a["bias"])
