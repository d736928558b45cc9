"""The call of native_sparse_attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.types.arrays import at_most
from ejkernel.types.calls import canonicalize, values
from ejkernel.types.calls.spec import Arguments, Call
from ejkernel.types.calls.words import Array, F, I


class NativeSparseAttention(Call):
    """Compressed, selected and sliding branches over blocks of keys."""

    name = "native_sparse_attention"
    outputs = ("batch seq heads v_dim",)
    normal_samples = True
    whole_groups = True

    @staticmethod
    def signature(
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

    @classmethod
    def check_values(cls, a: Arguments) -> None:
        """Every token reads at least one block."""
        super().check_values(a)
        counts = values.concrete_value(a["block_counts"])
        if counts is not None and counts.ndim and counts.dtype.kind in "iu":
            values.check_entries("block_counts", counts, counts < 1, "a count >= 1")

    @classmethod
    def canonicalize(cls, a: Arguments) -> None:
        """Counts and sizes."""
        super().canonicalize(a)
        canonicalize.positive(a, "block_size")
        # blocks that no sequence fills are all alike: the tokens of one are not padded to its size
        a["block_size"] = at_most(a["block_size"], a["key"].shape[1] + 1)
        canonicalize.positive(a, "max_block_count", "an integer >= 1, or None")
        if isinstance(a["block_counts"], int):
            canonicalize.positive(a, "block_counts")
            a["block_counts"] = min(a["block_counts"], a["max_block_count"] or a["block_counts"])
        if a["g_swa"] is not None and a["sliding_window"] is None:
            raise ValueError("g_swa: given without sliding_window, which switches that branch on")

    @classmethod
    def samples(cls, a: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns samples that choose the last blocks before each token."""
        samples = super().samples(a, rng)
        s, indices = a["query"].shape[1], a["block_indices"]
        if indices is not None:
            blocks = np.arange(s)[None, :, None, None] // a["block_size"]
            blocks = blocks - np.arange(indices.shape[-1])
            samples["block_indices"] = np.broadcast_to(blocks, indices.shape).astype(np.int32)
        if hasattr(a["block_counts"], "shape"):
            bound = a["max_block_count"] or -(-s // a["block_size"])
            samples["block_counts"] = np.full(a["block_counts"].shape, bound, np.int32)
        return samples
