"""The call of ring_attention."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel.types.arrays import MAX_LENGTH
from ejkernel.types.calls.canonicalize import Arguments
from ejkernel.types.calls.distributed import leaf_axes, shift_mods
from ejkernel.types.calls.softmax import AttentionCall
from ejkernel.types.calls.words import Array, F, I, Key, invalid, out_of_range
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.mask_info import MaskInfo
from ejkernel.types.mods import MODS

LAYOUTS = ("contiguous", "zigzag")


class RingAttention(AttentionCall):
    """Attention with the sequence axis spread over devices, and the zigzag layout helpers."""

    name = "ring_attention"
    seeds = ("dropout_seed",)
    sequence_hint = "axis_name is the mesh axis that shards a sequence"
    symbolic = ("batch",)  # lengths decide how many hops the ring takes

    @staticmethod
    def signature(
        query: F[Array, "batch q_len heads head_dim"],
        key: F[Array, "batch kv_len kv_heads head_dim"],
        value: F[Array, "batch kv_len kv_heads v_dim"],
        bias: F[Array, "#batch #heads #q_len kv_total"] | None = None,
        softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
        *,
        axis_name: str,
        mask_info: MaskInfo | None = None,
        q_segment_ids: I[Array, "#batch q_len"] | None = None,
        kv_segment_ids: I[Array, "#batch kv_len"] | None = None,
        causal: bool = False,
        causal_offset: int = 0,
        sliding_window: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | I[Array, ""] | Key[Array, ""] | None = None,
        layout: Literal["contiguous", "zigzag"] = "contiguous",
        return_lse: bool = False,
        precision: jax.lax.PrecisionLike = None,
        logits_dtype: DTypeLike = jnp.float32,
    ) -> None: ...

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """A known layout, lengths that fit it where the arrays are one device's, ids of keys."""
        super().canonicalize(a)
        if a["layout"] not in LAYOUTS:
            raise ValueError(f"layout: given {a['layout']!r}, expected one of {', '.join(LAYOUTS)}")
        bound = axis_is_bound(a["axis_name"])
        if bound:
            check_ring_lengths(a, 1, shards=jax.lax.axis_size(a["axis_name"]))
        q_ids, kv_ids = a["q_segment_ids"], a["kv_segment_ids"]
        if q_ids is None and kv_ids is not None:
            alone = "given without q_segment_ids, expected both or neither"
            raise ValueError(f"kv_segment_ids: {alone}")
        if q_ids is not None and kv_ids is None:
            if a["query"].shape[1] != a["key"].shape[1]:
                raise invalid("kv_segment_ids", "an array, since q_len and kv_len differ", kv_ids)
            a["kv_segment_ids"] = q_ids
        if a["mask_info"] is not None and not bound:
            a["mask_info"] = mask_of({name: a[name] for name in ("query", "key", "mask_info")})

    @classmethod
    def array_axes(cls, a: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
        """Also of functions of indices, which flash_attention over a shared sequence may have."""
        axes = super().array_axes(a)
        for name in MODS:
            leaves = leaf_axes(a.get(name))
            if leaves is not None:
                axes[name] = leaves
        return axes

    @classmethod
    def whole_axes(cls, sizes: Mapping[str, int]) -> dict[str, str]:
        """None: the arrays are a device's own part of the sequence."""
        return {}

    @classmethod
    def to_shard(cls, a: Arguments, shard: Any) -> None:
        super().to_shard(a, shard)
        shift_mods(a, shard)


def axis_is_bound(name: Any) -> bool:
    """Returns whether a mesh axis is bound here, as it is inside ``shard_map``."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def check_ring_lengths(a: Arguments, devices: int, *, shards: int) -> None:
    """Lengths fit the ring and divide over it; the key axis of a bias is whole.

    Global arrays are divided over ``devices``; of local ones each of ``shards`` devices has one.
    """
    step = devices * (2 if a["layout"] == "zigzag" else 1)
    for name in ("query", "key"):
        if a[name].shape[1] > MAX_LENGTH // shards:
            ring = f"the {shards} devices of axis {a['axis_name']!r}"
            legal = f"at most {MAX_LENGTH // shards}, {MAX_LENGTH} on {ring}"
            raise out_of_range(f"{name}.shape[1]", legal, a[name].shape[1])
        if a[name].shape[1] % step:
            why = f"the {devices} devices of axis {a['axis_name']!r}"
            if a["layout"] == "zigzag":
                why = f"two chunks on each of {why}" if devices > 1 else "the two chunks of zigzag"
            raise invalid(name, f"a length divisible by {step}, for {why}", a[name])
    keys = a["key"].shape[1] * shards
    if a["bias"] is not None and a["bias"].shape[-1] != keys:
        raise invalid("bias", f"all {keys} keys on its last axis", a["bias"])
