"""The meaning of a call, defined once for every backend: one ``Call`` per operation.

A ``Call`` holds the operation's parameters with the words of their axes, the checks, and how what
is optional becomes canonical. Public functions, kernels and tools read it; none of them repeats it.
Importing :mod:`ejkernel.types` does not import this; each operation is imported on first use. The
stub next to this file names them for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    "Attention": "attention",
    "BlockSparseAttention": "blocksparse_attention",
    "CausalConv1D": "causal_conv1d",
    "FlashAttention": "flash_attention",
    "FlashMLA": "mla_attention",
    "GLAttention": "linear",
    "GatedDeltaRule": "gated_delta_rule",
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

__all__ = [*MODULES]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
