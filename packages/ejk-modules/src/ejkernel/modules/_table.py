"""Names of the operations and where they live; modules are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.modules._op import Operation

# module under operations: (function, Kernel class, other exported names -> attribute)
OPERATIONS: dict[str, tuple[str, str, dict[str, str]]] = {
    "attention": ("attention", "Attention", {}),
    "blocksparse_attention": ("blocksparse_attention", "BlockSparseAttention", {}),
    "flash_attention": ("flash_attention", "FlashAttention", {}),
    "gla_attention": ("gla_attention", "GLAttention", {}),
    "grouped_matmul": ("grouped_matmul", "GroupedMatmul", {}),
    "lightning_attention": ("lightning_attention", "LightningAttention", {}),
    "mean_pooling": ("mean_pooling", "MeanPooling", {}),
    "mla_attention": ("mla_attention", "FlashMLA", {"flash_mla": "mla_attention"}),
    "mla_decode": ("mla_decode", "MLADecode", {}),
    "native_sparse_attention": ("native_sparse_attention", "NativeSparseAttention", {}),
    "page_attention": ("page_attention", "PageAttention", {}),
    "ragged_decode_attention": ("ragged_decode_attention", "RaggedDecodeAttention", {}),
    "ragged_page_attention": (
        "ragged_page_attention",
        "RaggedPageAttention",
        {
            "ragged_page_attention_v2": "ragged_page_attention",
            "RaggedPageAttentionv2": "RaggedPageAttention",
        },
    ),
    "ragged_page_attention_v3": ("ragged_page_attention_v3", "RaggedPageAttentionv3", {}),
    "recurrent_attention": ("recurrent_attention", "RecurrentAttention", {}),
    "ring_attention": (
        "ring_attention",
        "RingAttention",
        {"zigzag_shard": "zigzag_shard", "zigzag_unshard": "zigzag_unshard"},
    ),
    "scaled_dot_product_attention": (
        "scaled_dot_product_attention",
        "ScaledDotProductAttention",
        {},
    ),
}

CONFIGS = (
    *(kernel + "Config" for _, kernel, _ in OPERATIONS.values()),
    "RaggedPageAttentionv2Config",
)

# registry names that differ from the function's
REGISTRY_NAMES = {
    "recurrent": "recurrent_attention",
    "gla": "gla_attention",
    "lightning_attn": "lightning_attention",
}


def exports() -> dict[str, tuple[str, str]]:
    """Public name -> (module, attribute) of everything the operations export."""
    table: dict[str, tuple[str, str]] = {}
    for module, (function, kernel, others) in OPERATIONS.items():
        path = f"ejkernel.modules.operations.{module}"
        for name, attribute in {function: function, kernel: kernel, **others}.items():
            table[name] = (path, attribute)
    for name in CONFIGS:
        table[name] = ("ejkernel.modules._configs", name)
    return table


def load(path: str, attribute: str) -> Any:
    return getattr(importlib.import_module(path), attribute)


def operation_class(name: str) -> type[Operation]:
    """The Kernel class of a function's, alias's or registry name.

    Raises:
        KernelNotFound: there is no such operation; the message lists all.
    """
    from ejkernel.ops import KernelNotFound

    word = name.strip().lower()
    word = REGISTRY_NAMES.get(word, word)
    for module, (function, kernel, others) in OPERATIONS.items():
        if word == function or (word in others and others[word] == function):
            return load(f"ejkernel.modules.operations.{module}", kernel)
    known = ", ".join(sorted(function for function, _, _ in OPERATIONS.values()))
    raise KernelNotFound(f"operation {name!r} is unknown: expected one of {known}")
