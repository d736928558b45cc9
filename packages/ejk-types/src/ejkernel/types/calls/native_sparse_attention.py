"""The call of native_sparse_attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.calls import drawn, settle
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I


class NativeSparseAttention(Call):
    """Compressed, selected and sliding branches over blocks of keys."""

    name = "native_sparse_attention"
    outputs = ("batch seq heads v_dim",)

    @staticmethod
    def takes(
        query: F[Array, "batch seq heads head_dim"],
        key: F[Array, "batch seq kv_heads head_dim"],
        value: F[Array, "batch seq kv_heads v_dim"],
        g_cmp: F[Array, "batch seq heads"] | None = None,
        g_slc: F[Array, "batch seq heads"] | None = None,
        block_indices: I[Array, "batch seq kv_heads selected"] | None = None,
        block_counts: int | I[Array, "batch seq kv_heads"] = 16,
        cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
        *,
        g_swa: F[Array, "batch seq heads"] | None = None,
        block_size: int = 64,
        max_block_count: int | None = None,
        sliding_window: int | tuple[int, int] | None = None,
        softmax_scale: float | None = None,
    ) -> None: ...

    @staticmethod
    def check_values(a: Arguments) -> None:
        settle.check_block_counts(a)
        settle.check_packed(a, "cu_seqlens", "query", axis=1)

    @staticmethod
    def canonicalise(a: Arguments) -> None:
        settle.grouped_heads(a)
        settle.packed(a, "cu_seqlens", "query")
        settle.sparse_options(a)
        settle.softmax_options(a)

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Sequences of equal length; of each token the last blocks before it."""
        found = drawn.normal(a, rng, "query", "key", "value", "g_cmp", "g_slc", "g_swa")
        s, cu, indices = a["query"].shape[1], a["cu_seqlens"], a["block_indices"]
        if cu is not None:
            found["cu_seqlens"] = drawn.starts(cu.shape[0] - 1, s)
        if indices is not None:
            own = np.arange(s)[None, :, None, None] // a["block_size"]
            own = own - np.arange(indices.shape[-1])
            found["block_indices"] = np.broadcast_to(own, indices.shape).astype(np.int32)
        if hasattr(a["block_counts"], "shape"):
            bound = a["max_block_count"] or -(-s // a["block_size"])
            found["block_counts"] = np.full(a["block_counts"].shape, bound, np.int32)
        return found
