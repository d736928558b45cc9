"""All mask arguments of a call become one MaskInfo; packed lengths fit their arrays."""

from __future__ import annotations

from typing import Any

from ejkernel.types.calls.settle.errors import invalid, out_of_range
from ejkernel.types.combine import combine_masks, mask_of_rule
from ejkernel.types.fields import checked_rule

Arguments = dict[str, Any]

_SETTLED = {
    "attention_mask": None,
    "causal": False,
    "causal_offset": 0,
    "sliding_window": None,
    "chunk_size": None,
}


def packed_pair(a: Arguments) -> None:
    """Cumulative lengths of queries and keys: batch 1, the same sequences, k not alone."""
    q, k = a["cum_seqlens_q"], a["cum_seqlens_k"]
    if q is None:
        if k is not None:
            raise ValueError("cum_seqlens_k: given without cum_seqlens_q, expected both or neither")
        return
    packed(a, "cum_seqlens_q", "query")
    if k is None and a["query"].shape[1] != a["key"].shape[1]:
        raise invalid(
            "cum_seqlens_k",
            f"an array, since q_len {a['query'].shape[1]} and kv_len {a['key'].shape[1]} differ",
            k,
        )
    if k is not None and k.shape != q.shape:
        raise invalid("cum_seqlens_k", f"as many sequences as cum_seqlens_q, int{list(q.shape)}", k)


def one_packing(a: Arguments) -> None:
    """The same array given for queries and keys is given once: then indices serve as positions."""
    if a["cum_seqlens_k"] is a["cum_seqlens_q"]:
        a["cum_seqlens_k"] = None


def packed(a: Arguments, name: str, data: str) -> None:
    """Cumulative lengths hold at least one entry and the packed array has batch 1."""
    cu = a[name]
    if cu is None:
        return
    if cu.shape[0] < 1:
        raise invalid(name, "int[sequences + 1], at least one entry", cu)
    if a[data].shape[0] != 1:
        raise invalid(data, f"batch 1 with {name}", a[data])


def plus_one(a: Arguments, name: str, counted: str) -> None:
    """One more start than there are sequences."""
    n = a[counted].shape[0]
    if a[name].shape != (n + 1,):
        raise invalid(name, f"int[{n + 1}], one more than {counted}", a[name])


def masks(a: Arguments) -> None:
    """Every constraint of the call merged into ``mask_info``; the arguments behind are cleared.

    Packed calls are the exception: there causal and window rules count inside the sequences, so
    the implementation joins all of them with the cumulative lengths at once, and ``mask_info`` is
    only checked.
    """
    query, key = a["query"], a["key" if "key" in a else "key_value"]
    chunk = a.get("chunk_size")
    if chunk is not None and chunk < 1:
        raise out_of_range("chunk_size", "an integer >= 1", chunk)
    packed_call = a.get("cum_seqlens_q", a.get("cu_seqlens")) is not None
    constraints = {name: a[name] for name in _SETTLED if name in a and not packed_call}
    if a["mask_info"] is None and constraints.get("attention_mask") is None:
        numbers = {**_SETTLED, **constraints}
        del numbers["attention_mask"]
        a["mask_info"] = mask_of_rule(checked_rule(**numbers))
    else:
        a["mask_info"] = combine_masks(
            a["mask_info"],
            **constraints,
            q_len=query.shape[1],
            kv_len=key.shape[1],
            batch=query.shape[0],
            heads=query.shape[2],
        )
    a.update({name: _SETTLED[name] for name in constraints})


def block_mask(a: Arguments) -> None:
    """Block sizes >= 1 and a block mask ``[1 or batch, 1 or heads, q_blocks, kv_blocks]``."""
    for name in ("q_block_size", "kv_block_size"):
        if a[name] < 1:
            raise out_of_range(name, "an integer >= 1", a[name])
    mask = a["block_mask"]
    if mask is None:
        return
    blocks = (
        -(-a["query"].shape[1] // a["q_block_size"]),
        -(-a["key"].shape[1] // a["kv_block_size"]),
    )
    if mask.ndim == 2:
        mask = mask[None, None]
    if mask.shape[-2:] != blocks:
        raise invalid(
            "block_mask",
            f"bool[.., {blocks[0]}, {blocks[1]}]: blocks of {a['q_block_size']} query rows and "
            f"{a['kv_block_size']} keys",
            a["block_mask"],
        )
    a["block_mask"] = mask
