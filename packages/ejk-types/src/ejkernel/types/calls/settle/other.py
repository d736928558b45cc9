"""Cross-checks of single operations: latent attention, sparse attention, pooling, matmul."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types.arrays import at_most, is_eight_bit
from ejkernel.types.calls.settle.errors import invalid, out_of_range
from ejkernel.types.calls.settle.masking import packed
from ejkernel.types.calls.settle.softmax import _float_dtype, precision, scalar_index

Arguments = dict[str, Any]


def latent(a: Arguments) -> None:
    """Rotary forms, head groups and the default scale of latent attention."""
    query, w_kc, b_q, b_k = (a[name] for name in ("query", "w_kc", "b_q", "b_k"))
    heads, kv_heads, nope = query.shape[2], w_kc.shape[1], w_kc.shape[2]
    if kv_heads < 1 or heads % kv_heads:
        raise invalid("w_kc", f"kv_heads that divide the {heads} query heads", w_kc)
    if b_q is not None and b_k is None:
        raise ValueError("b_q: given without b_k, expected both, b_k alone or neither")
    rope = 0 if b_k is None else b_k.shape[-1]
    want = nope + (rope if b_q is None else 0)
    if query.shape[-1] != want:
        parts = "nope_dim + rope_dim" if b_q is None and b_k is not None else "nope_dim"
        raise invalid("query", f"last axis {want} = {parts}", query)
    if a["softmax_scale"] is None:
        a["softmax_scale"] = float(max(nope + rope, 1)) ** -0.5
    packed(a, "cu_seqlens", "query")
    if a["cu_seqlens"] is not None and query.shape[1] != a["key_value"].shape[1]:
        raise invalid(
            "key_value", f"kv_len equal to q_len {query.shape[1]} with cu_seqlens", a["key_value"]
        )


def latent_dim(a: Arguments) -> None:
    """The value part lies inside a cache row."""
    dim, whole = a["latent_dim"], a["latent_cache"].shape[-1]
    if not 1 <= dim <= whole:
        raise out_of_range("latent_dim", f"1 to {whole}, the last axis of latent_cache", dim)


def sparse_options(a: Arguments) -> None:
    """Counts and sizes of native sparse attention."""
    if a["block_size"] < 1:
        raise out_of_range("block_size", "an integer >= 1", a["block_size"])
    # blocks that no sequence fills are all alike: the tokens of one are not padded to its size
    a["block_size"] = at_most(a["block_size"], a["key"].shape[1] + 1)
    if a["max_block_count"] is not None and a["max_block_count"] < 1:
        raise out_of_range("max_block_count", "an integer >= 1, or None", a["max_block_count"])
    if isinstance(a["block_counts"], int) and a["block_counts"] < 1:
        raise out_of_range("block_counts", "an integer >= 1", a["block_counts"])
    if isinstance(a["block_counts"], int) and a["max_block_count"] is not None:
        a["block_counts"] = min(a["block_counts"], a["max_block_count"])
    if a["g_swa"] is not None and a["sliding_window"] is None:
        raise ValueError("g_swa: given without sliding_window, which switches that branch on")


def cache_form(a: Arguments) -> None:
    """The cache of ragged_page_attention_v3 is plain (rank 4) or packed (rank 5)."""
    cache, keys = a["kv_cache"], a["keys"]
    combined, dim = 2 * keys.shape[1], keys.shape[2]
    if cache.ndim == 4:
        legal: tuple[int, ...] = (combined, dim)
    else:
        packing = 32 // (np.dtype(cache.dtype).itemsize * 8)
        if packing < 1:
            raise invalid("kv_cache", "a packed cache of at most 32 bits per value", cache)
        legal = (-(-combined // packing), packing, -(-dim // 128) * 128)
    if cache.shape[2:] != legal:
        shape = ", ".join(map(str, legal))
        raise invalid(
            "kv_cache", f"[pages, page_size, {shape}] for {keys.shape[1]} kv heads", cache
        )
    for name in ("keys", "values"):
        small = np.dtype(a[name].dtype).itemsize < 2
        if small and a[name].dtype != cache.dtype:
            raise invalid(name, f"floats of at least 16 bits, or kv_cache's {cache.dtype}", a[name])
    table = a["block_tables"]
    n = a["kv_lens"].shape[0]
    if table.ndim == 1 and n and table.shape[0] % n:
        raise invalid("block_tables", f"a flat table of {n} equal rows", table)


def pooling(a: Arguments) -> None:
    """Token axis, chunk size and mask of mean_pooling agree."""
    x, cu, mask = a["x"], a["cu_seqlens"], a["attention_mask"]
    axis = 1 if cu is None else 0
    form = "float[batch, seq, *channels]" if cu is None else "float[tokens, *channels]"
    if x.ndim < axis + 2:
        raise invalid("x", f"{form} with at least one channel axis", x)
    if cu is not None and cu.shape[0] < 1:
        raise invalid("cu_seqlens", "int[sequences + 1], at least one entry", cu)
    if a["chunk_size"] is not None and a["chunk_size"] < 1:
        raise out_of_range("chunk_size", "an integer >= 1, or None", a["chunk_size"])
    if a["chunk_size"] is not None:
        a["chunk_size"] = max(at_most(a["chunk_size"], x.shape[axis]), 1)
    if mask is not None:
        if mask.shape != x.shape[: axis + 1]:
            raise invalid("attention_mask", f"bool or int{list(x.shape[: axis + 1])}", mask)
        a["attention_mask"] = mask if mask.dtype == jnp.bool_ else mask != 0


def groups(a: Arguments) -> None:
    """Shapes of grouped_matmul and its output dtype."""
    precision(a)
    lhs, rhs, out = a["lhs"], a["rhs"], a["existing_out"]
    inner, columns = rhs.shape[1:][::-1] if a["transpose_rhs"] else rhs.shape[1:]
    if lhs.shape[1] != inner:
        axis = 2 if a["transpose_rhs"] else 1
        raise invalid("rhs", f"axis {axis} equal to the inner axis {lhs.shape[1]} of lhs", rhs)
    total, held = a["group_sizes"].shape[0], rhs.shape[0]
    if a["group_offset"] is None and total != held:
        raise invalid("group_sizes", f"int[{held}], one per matrix of rhs", a["group_sizes"])
    if total < held:
        raise invalid("group_sizes", f"at least the {held} groups of rhs", a["group_sizes"])
    if out is not None and out.shape != (lhs.shape[0], columns):
        raise invalid("existing_out", f"float[{lhs.shape[0]}, {columns}]", out)
    if a["preferred_element_type"] is not None:
        a["preferred_element_type"] = _float_dtype(
            "preferred_element_type", a["preferred_element_type"], lower_bound=False
        )
    scalar_index(a, "group_offset")
    scale = a["rhs_scale"]
    if scale is None:
        return
    if scale.shape not in ((), (held,), (held, columns)):
        raise invalid("rhs_scale", f"float[], float[{held}] or float[{held}, {columns}]", scale)
    if not is_eight_bit(rhs):
        raise ValueError(
            f"rhs_scale: given with rhs of {rhs.dtype}; scales belong to int8 and 8-bit float "
            "matrices, others hold their scale themselves"
        )
