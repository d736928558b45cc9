"""Sets of argument names that kernels read together, for ``CallKernel.reads``.

A new option of an operation does not belong in any of them: every kernel that names the set would
then claim to read it.
"""

from __future__ import annotations

from collections.abc import Container

QKV = frozenset({"query", "key", "value"})
ATTENTION = QKV | {"mask_info", "softmax_scale"}
"""What every kernel of softmax attention over contiguous keys reads."""
FLASH = ATTENTION | {"softmax_aux", "logits_soft_cap", "return_lse"}
RING = FLASH | {
    "axis_name",
    "layout",
    "q_segment_ids",
    "kv_segment_ids",
    "causal",
    "causal_offset",
    "sliding_window",
}
"""What attention over a sharded sequence reads; its masks stay apart until positions are known."""
PACKED = frozenset({"cum_seqlens_q", "cum_seqlens_k"})
DROPOUT = frozenset({"dropout_prob", "dropout_seed"})
SCALED_OPERANDS = frozenset({"q_scale", "k_scale", "v_scale", "out_dtype"})
PATTERN = frozenset({"block_mask", "q_block_size", "kv_block_size"})
LATENT = frozenset({"query", "key_value", "w_kc", "w_vc", "b_q", "b_k", "cu_seqlens"})
"""The arrays of latent attention before its keys and values are expanded."""
FLASH_MLA = (FLASH - QKV) | LATENT

DECODE_OPTIONS = frozenset({"softmax_scale", "sliding_window", "logits_soft_cap", "softmax_aux"})
CACHE_SCALES = frozenset({"k_scale", "v_scale"})
TREE = frozenset({"tree_mask", "positions"})
"""Which of the new tokens a row sees; kernels without these take causal rows alone."""
PAGES = frozenset({"context_lens", "block_tables"})
RAGGED = PAGES | {"queries", "kv_pages", "query_start_loc", "num_seqs"}
RAGGED_UPDATE = frozenset(
    {
        "queries",
        "keys",
        "values",
        "kv_cache",
        "kv_lens",
        "block_tables",
        "query_start_loc",
        "distribution",
    }
)
"""The arrays of ragged attention that writes new keys and values to the pages first."""

RECURRENCE = QKV | {"initial_state", "cu_seqlens", "softmax_scale", "reverse", "return_state"}
"""What linear attention reads besides its gates."""
NATIVE_SPARSE = QKV | {
    "g_cmp",
    "g_slc",
    "g_swa",
    "block_indices",
    "block_counts",
    "block_size",
    "max_block_count",
    "cu_seqlens",
    "sliding_window",
    "softmax_scale",
}
CONVOLUTION = frozenset(
    {"x", "weight", "bias", "initial_state", "cu_seqlens", "activation", "return_state"}
)
GROUPED_PRODUCT = frozenset(
    {"lhs", "rhs", "group_sizes", "group_offset", "existing_out", "transpose_rhs"}
)


def lengths_name(names: Container[str]) -> str:
    """Returns the argument, among these, that has the length of every cached sequence."""
    return "kv_lens" if "kv_lens" in names else "context_lens"
