# Made by tools/stubs.py --write.
# ruff: noqa
# fmt: off
from ejkernel.types.calls.attention import Attention as Attention
from ejkernel.types.calls.blocksparse_attention import BlockSparseAttention as BlockSparseAttention
from ejkernel.types.calls.causal_conv1d import CausalConv1D as CausalConv1D
from ejkernel.types.calls.flash_attention import FlashAttention as FlashAttention
from ejkernel.types.calls.gated_delta_rule import GatedDeltaRule as GatedDeltaRule
from ejkernel.types.calls.grouped_matmul import GroupedMatmul as GroupedMatmul
from ejkernel.types.calls.linear import GLAttention as GLAttention
from ejkernel.types.calls.linear import LightningAttention as LightningAttention
from ejkernel.types.calls.linear import RecurrentAttention as RecurrentAttention
from ejkernel.types.calls.mean_pooling import MeanPooling as MeanPooling
from ejkernel.types.calls.mla_attention import FlashMLA as FlashMLA
from ejkernel.types.calls.mla_decode import MLADecode as MLADecode
from ejkernel.types.calls.native_sparse_attention import NativeSparseAttention as NativeSparseAttention
from ejkernel.types.calls.page_attention import PageAttention as PageAttention
from ejkernel.types.calls.ragged_decode_attention import RaggedDecodeAttention as RaggedDecodeAttention
from ejkernel.types.calls.ragged_page_attention import RaggedPageAttention as RaggedPageAttention
from ejkernel.types.calls.ragged_page_attention_v3 import RaggedPageAttentionv3 as RaggedPageAttentionv3
from ejkernel.types.calls.ring_attention import RingAttention as RingAttention
from ejkernel.types.calls.scaled_dot_product_attention import ScaledDotProductAttention as ScaledDotProductAttention
