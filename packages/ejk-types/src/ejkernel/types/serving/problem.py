"""Static properties of calls over a cache: hashable, so that they can key programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax.numpy as jnp

from ejkernel.types.serving.layout import KVLayout

ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element, by the dtypes that kernels read caches in."""

# of every batch-invariant call:
INVARIANT_PAGES = 2**16  # of a table, of any width
INVARIANT_ROWS = 2**16  # of a ragged call, of any number of rows


@dataclass(frozen=True)
class PagedProblem:
    """Sizes, dtypes and options of attention over a paged cache.

    Attributes:
        batch, heads, kv_heads, dim, value_dim: sizes. A batch row is one sequence.
        pages, page_size: sizes of the cache.
        max_pages: columns of the block table.
        query_dtype: dtype of the query and of the output.
        key_dtype, value_dtype: dtypes of the cache.
        scale: factor of the logits.
        layout: memory layout of a token in the cache.
        soft_cap: cap of the logits, or None.
        window_left: number of keys that a row sees before its own, or None for all.
        num_splits: number of splits of every sequence that the call requests, or None.
        tokens: largest number of query tokens of a sequence.
        return_lse: whether the call returns the log-sum-exp of every row.
        tree_columns: new tokens that a mask says of whether a row sees them; 0: rows are causal.
        positioned: whether positions are given, by which the window is measured.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    pages: int
    page_size: int
    max_pages: int
    query_dtype: str
    key_dtype: str
    value_dtype: str
    scale: float
    layout: KVLayout
    soft_cap: float | None = None
    window_left: int | None = None
    num_splits: int | None = None
    tokens: int = 1
    return_lse: bool = False
    tree_columns: int = 0
    positioned: bool = False

    @classmethod
    def from_arguments(
        cls, a: Mapping[str, Any], query: Any, key: Any, value: Any, **sizes: Any
    ) -> Self:
        """Returns the problem of a call with canonical arguments ``a``.

        ``query``, ``key`` and ``value`` are its query and its caches, arrays or their types.
        ``sizes`` are fields that the shapes of these do not say.
        """
        window = a["sliding_window"]
        fields: dict[str, Any] = {
            "batch": query.shape[0],
            "heads": query.shape[-2],
            "kv_heads": key.shape[2],
            "dim": query.shape[-1],
            "value_dim": value.shape[-1],
            "pages": key.shape[0],
            "page_size": key.shape[1],
            "query_dtype": jnp.dtype(query.dtype).name,
            "key_dtype": jnp.dtype(key.dtype).name,
            "value_dtype": jnp.dtype(value.dtype).name,
            "scale": a["softmax_scale"],
            "soft_cap": a["logits_soft_cap"],
            # a longer window hides nothing, and int32 holds a position minus this one
            "window_left": None if window is None else min(window[0], 2**30),
            "num_splits": a.get("num_splits"),
            "return_lse": a.get("return_lse", False),
            "tree_columns": 0 if a.get("tree_mask") is None else a["tree_mask"].shape[-1],
            "positioned": a.get("positions") is not None,
        } | sizes
        if "layout" not in fields:
            dims = (fields["kv_heads"], fields["dim"], fields["value_dim"])
            fields["layout"] = KVLayout.separate(*dims)
        return cls(**fields)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table can name."""
        return self.max_pages * self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and the value of one token and head."""
        key_bytes = self.dim * ITEMSIZE[self.key_dtype]
        if self.layout.is_latent:
            return key_bytes
        return key_bytes + self.value_dim * ITEMSIZE[self.value_dtype]

    @property
    def is_eight_bit(self) -> bool:
        """Returns whether keys and values are stored in 8 bits."""
        return ITEMSIZE[self.key_dtype] == ITEMSIZE[self.value_dtype] == 1

    def of_sequence(self) -> Self:
        """Returns the problem of one sequence, with a table and a cache of fixed sizes."""
        return replace(self, batch=1, pages=1, max_pages=INVARIANT_PAGES if self.max_pages else 1)

    def folded(self, size: int, pages: int) -> Self:
        """Returns this problem ``size`` times along the batch axis, over ``pages`` pages."""
        return replace(self, batch=self.batch * size, pages=pages)


@dataclass(frozen=True)
class LatentProblem(PagedProblem):
    """Attention over a cache of latent rows, which all heads share.

    ``dim`` is the width of a row, ``value_dim`` the width of its latent part.
    """

    @property
    def latent_dim(self) -> int:
        """Columns of a row that are keys and values."""
        return self.value_dim

    @property
    def rope_dim(self) -> int:
        """Columns of a row that are keys only."""
        return self.dim - self.value_dim


@dataclass(frozen=True)
class RaggedProblem:
    """Attention of packed query rows of any mix of prefill and decode.

    Attributes:
        paged: the problem of one new token per sequence, a batch row each.
        rows: packed query rows.
        written_dtypes: dtypes of the new keys and values, where the call writes them.
        planned: whether the call has an ``AttentionPlan``.
        max_query_len: rows that a sequence has at most, as a plan promises; None: any number.
    """

    paged: PagedProblem
    rows: int
    written_dtypes: tuple[str, ...] = ()
    planned: bool = False
    max_query_len: int | None = None

    @classmethod
    def from_arguments(
        cls, a: Mapping[str, Any], cache: Any, lengths: Any, kv_heads: int,
        written_dtypes: tuple[str, ...] = (),
    ) -> Self:  # fmt: skip
        """Returns the problem of a call with canonical arguments ``a``.

        ``cache`` interleaves the key and the value of each head, and may be packed:
        ``[pages, page_size, packed_kv_heads, packing, padded_head_dim]``.
        """
        queries, table, n = a["queries"], a["block_tables"], lengths.shape[0]
        heads = math.prod(cache.shape[2:-1]) // 2
        paged = PagedProblem.from_arguments(
            a,
            queries,
            cache,
            cache,
            batch=n,
            kv_heads=kv_heads,
            value_dim=queries.shape[2],
            max_pages=table.shape[1] if table.ndim == 2 else table.shape[0] // max(n, 1),
            layout=KVLayout.interleaved(heads, cache.shape[-1]),
        )
        plan = a.get("plan")
        promised = None if plan is None else plan.max_query_len
        return cls(paged, queries.shape[0], written_dtypes, plan is not None, promised)

    @property
    def sequences(self) -> int:
        """Sequences, those without rows included."""
        return self.paged.batch

    def of_sequence(self) -> Self:
        """Returns the problem of one sequence, of which no other one's rows say anything."""
        paged = self.paged.of_sequence()
        return replace(self, paged=paged, rows=INVARIANT_ROWS, max_query_len=None)
