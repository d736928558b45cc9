# ruff: noqa: F401 (names are imported for type checkers, and lazily for everyone else)
"""What a call means, said once for every backend: one ``Call`` an operation.

A ``Call`` holds the operation's parameters with the words of their axes, the checks, and how what
is optional is settled. Public functions, kernels and tools read it; none of them repeats it.
Importing :mod:`ejkernel.types` does not import this; each operation is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.types.calls.attention import Attention
    from ejkernel.types.calls.blocksparse_attention import BlockSparseAttention
    from ejkernel.types.calls.flash_attention import FlashAttention
    from ejkernel.types.calls.grouped_matmul import GroupedMatmul
    from ejkernel.types.calls.linear import GLAttention, LightningAttention, RecurrentAttention
    from ejkernel.types.calls.mean_pooling import MeanPooling
    from ejkernel.types.calls.mla_attention import FlashMLA
    from ejkernel.types.calls.mla_decode import MLADecode
    from ejkernel.types.calls.native_sparse_attention import NativeSparseAttention
    from ejkernel.types.calls.page_attention import PageAttention
    from ejkernel.types.calls.ragged_decode_attention import RaggedDecodeAttention
    from ejkernel.types.calls.ragged_page_attention import RaggedPageAttention
    from ejkernel.types.calls.ragged_page_attention_v3 import RaggedPageAttentionv3
    from ejkernel.types.calls.ring_attention import RingAttention
    from ejkernel.types.calls.scaled_dot_product_attention import ScaledDotProductAttention

_MODULES = {
    "Attention": "attention",
    "BlockSparseAttention": "blocksparse_attention",
    "FlashAttention": "flash_attention",
    "FlashMLA": "mla_attention",
    "GLAttention": "linear",
    "GroupedMatmul": "grouped_matmul",
    "LightningAttention": "linear",
    "MLADecode": "mla_decode",
    "MeanPooling": "mean_pooling",
    "NativeSparseAttention": "native_sparse_attention",
    "PageAttention": "page_attention",
    "RaggedDecodeAttention": "ragged_decode_attention",
    "RaggedPageAttention": "ragged_page_attention",
    "RaggedPageAttentionv3": "ragged_page_attention_v3",
    "RecurrentAttention": "linear",
    "RingAttention": "ring_attention",
    "ScaledDotProductAttention": "scaled_dot_product_attention",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
