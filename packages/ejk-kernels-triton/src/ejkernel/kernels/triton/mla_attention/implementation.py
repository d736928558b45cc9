"""Latent attention in Triton: flash attention on keys and values expanded from latent rows."""

from __future__ import annotations

from typing import Any

from ejkernel.kernels.triton.flash_attention.implementation import FlashAttention, ring_attention
from ejkernel.kernels.triton.grouped_matmul.implementation import grouped_matmul
from ejkernel.ops.differentiate import Work
from ejkernel.types import calls
from ejkernel.types.attention.latent import EINSUMS, RowProducts
from ejkernel.types.attention.mixins import FromLatent
from ejkernel.types.attention.row_products import products_in_order
from ejkernel.types.calls import arguments
from ejkernel.types.calls.shared_sequence import ShardedCall


class FlashMLA(FromLatent, FlashAttention):
    """The kernels of flash attention on keys and values expanded from latent rows; see
    ``mla_attention``.

    Dtypes, head dims (keys with the rotary part, and values) and ``cfg`` are as for
    ``flash_attention``. The backward pass expands again: expanded rows are not saved. In
    batch-invariant calls the kernel of grouped_matmul expands rows, elsewhere XLA's.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    call = calls.FlashMLA
    reads = arguments.FLASH_MLA | arguments.DROPOUT | {"bias"}

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def row_products(self, work: Work) -> RowProducts:
        return products_in_order(grouped_matmul) if work.batch_invariant else EINSUMS


mla_attention = FlashMLA()
mla_attention.context, mla_attention.sharded_call = ring_attention, ShardedCall
