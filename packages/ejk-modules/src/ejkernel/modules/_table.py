"""Names of the operations and where they live; modules are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel.modules._op import Operation

OPERATIONS = {
    "attention": "Attention",
    "blocksparse_attention": "BlockSparseAttention",
    "causal_conv1d": "CausalConv1D",
    "flash_attention": "FlashAttention",
    "gated_delta_rule": "GatedDeltaRule",
    "gla_attention": "GLAttention",
    "grouped_matmul": "GroupedMatmul",
    "lightning_attention": "LightningAttention",
    "mean_pooling": "MeanPooling",
    "mla_attention": "FlashMLA",
    "mla_decode": "MLADecode",
    "native_sparse_attention": "NativeSparseAttention",
    "page_attention": "PageAttention",
    "ragged_decode_attention": "RaggedDecodeAttention",
    "ragged_page_attention": "RaggedPageAttention",
    "ragged_page_attention_v3": "RaggedPageAttentionv3",
    "recurrent_attention": "RecurrentAttention",
    "ring_attention": "RingAttention",
    "scaled_dot_product_attention": "ScaledDotProductAttention",
}
"""The functions, each in a module of its name, and their Kernel classes."""

ALIASES = {
    "flash_mla": "mla_attention",
    "gated_delta_net": "gated_delta_rule",
    "kimi_delta_attention": "gated_delta_rule",
    "ragged_page_attention_v2": "ragged_page_attention",
}
"""Other names of functions."""

CONFIGS = (*(kernel + "Config" for kernel in OPERATIONS.values()), "RaggedPageAttentionv2Config")

# registry names that differ from the function's
REGISTRY_NAMES = {
    "recurrent": "recurrent_attention",
    "gla": "gla_attention",
    "lightning_attn": "lightning_attention",
}


def home(function: str) -> str:
    """The module of an operation."""
    return f"ejkernel.modules.operations.{function}"


def exports() -> dict[str, tuple[str, str]]:
    """Public name -> (module, attribute) of everything the operations export."""
    return {
        **{name: (home(name), name) for name in OPERATIONS},
        **{kernel: (home(name), kernel) for name, kernel in OPERATIONS.items()},
        **{alias: (home(name), name) for alias, name in ALIASES.items()},
        **{name: (home("ring_attention"), name) for name in ("zigzag_shard", "zigzag_unshard")},
        "RaggedPageAttentionv2": (home("ragged_page_attention"), "RaggedPageAttention"),
        **{name: ("ejkernel.modules._configs", name) for name in CONFIGS},
    }


def load(path: str, attribute: str) -> Any:
    return getattr(importlib.import_module(path), attribute)


def operation_class(name: str) -> type[Operation]:
    """The Kernel class of a function's, alias's or registry name.

    Raises:
        KernelNotFound: there is no such operation; the message names a similar one and lists all.
    """
    import difflib

    from ejkernel.ops import KernelNotFound

    word = name.strip().lower()
    word = {**REGISTRY_NAMES, **ALIASES}.get(word, word)
    if word not in OPERATIONS:
        names = sorted({*OPERATIONS, *ALIASES, *REGISTRY_NAMES})
        similar = difflib.get_close_matches(word, names, 1)
        hint = f"did you mean {similar[0]!r}? " if similar else ""
        listed = ", ".join(sorted(OPERATIONS))
        raise KernelNotFound(f"operation {name!r} is unknown: {hint}expected one of {listed}")
    return load(home(word), OPERATIONS[word])
