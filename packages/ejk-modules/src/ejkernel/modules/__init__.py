# ruff: noqa: F401 (names are imported for type checkers, and lazily for everyone else)
"""One call per attention operation in JAX: the user's side of ejkernel.

Every operation is a function, a Kernel class for executors, and a Config dataclass. Rules that
hold for all of them:

* Arrays are ``[batch, seq, heads, head_dim]``; query head i reads key head
  ``i // (heads // kv_heads)``. Products and softmax accumulate in float32 or better; the output
  has the query's dtype, each gradient that of its input.
* Masks, windows, segments and lengths are ANDed; a row that sees no key gives exactly 0.
* ``platform``, ``cfg`` and ``mesh`` never change a result beyond rounding.
* All work under jit, grad, vmap, checkpoint, scan and shard_map. A wrong argument is an
  ``InvalidArgument`` (a TypeError and a ValueError) that names it.

Operations are imported on first use.
"""

from typing import TYPE_CHECKING, Any

from ejkernel.modules import _namespace
from ejkernel.modules._version import __version__

_namespace.check()

from ejkernel.modules._table import exports, load  # noqa: E402

_ERRORS = (
    "AutotuneError",
    "ConfigError",
    "EjkernelWarning",
    "InvalidArgument",
    "KernelNotFound",
    "KernelNotSupported",
    "NoConfigError",
)
_EXECUTOR = ("create_default_executor", "explain", "get_default_executor", "supports")

_ADAPTERS = ("equinox_attention", "flax_attention")

_WHERE: dict[str, tuple[str, str]] = {
    **exports(),
    **{name: ("ejkernel.modules.adapters", name) for name in _ADAPTERS},
    **{name: ("ejkernel.ops", name) for name in _ERRORS},
    **{name: ("ejkernel.modules._executor", name) for name in _EXECUTOR},
}

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = load(*where)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from ejkernel.modules._configs import AttentionConfig as AttentionConfig
    from ejkernel.modules._configs import BlockSparseAttentionConfig as BlockSparseAttentionConfig
    from ejkernel.modules._configs import FlashAttentionConfig as FlashAttentionConfig
    from ejkernel.modules._configs import FlashMLAConfig as FlashMLAConfig
    from ejkernel.modules._configs import GLAttentionConfig as GLAttentionConfig
    from ejkernel.modules._configs import GroupedMatmulConfig as GroupedMatmulConfig
    from ejkernel.modules._configs import LightningAttentionConfig as LightningAttentionConfig
    from ejkernel.modules._configs import MeanPoolingConfig as MeanPoolingConfig
    from ejkernel.modules._configs import MLADecodeConfig as MLADecodeConfig
    from ejkernel.modules._configs import NativeSparseAttentionConfig as NativeSparseAttentionConfig
    from ejkernel.modules._configs import PageAttentionConfig as PageAttentionConfig
    from ejkernel.modules._configs import RaggedDecodeAttentionConfig as RaggedDecodeAttentionConfig
    from ejkernel.modules._configs import RaggedPageAttentionConfig as RaggedPageAttentionConfig
    from ejkernel.modules._configs import RaggedPageAttentionv2Config as RaggedPageAttentionv2Config
    from ejkernel.modules._configs import RaggedPageAttentionv3Config as RaggedPageAttentionv3Config
    from ejkernel.modules._configs import RecurrentAttentionConfig as RecurrentAttentionConfig
    from ejkernel.modules._configs import RingAttentionConfig as RingAttentionConfig
    from ejkernel.modules._configs import (
        ScaledDotProductAttentionConfig as ScaledDotProductAttentionConfig,
    )
    from ejkernel.modules._executor import create_default_executor as create_default_executor
    from ejkernel.modules._executor import explain as explain
    from ejkernel.modules._executor import get_default_executor as get_default_executor
    from ejkernel.modules._executor import supports as supports
    from ejkernel.modules.adapters import equinox_attention as equinox_attention
    from ejkernel.modules.adapters import flax_attention as flax_attention
    from ejkernel.modules.operations.attention import Attention as Attention
    from ejkernel.modules.operations.attention import attention as attention
    from ejkernel.modules.operations.blocksparse_attention import (
        BlockSparseAttention as BlockSparseAttention,
    )
    from ejkernel.modules.operations.blocksparse_attention import (
        blocksparse_attention as blocksparse_attention,
    )
    from ejkernel.modules.operations.flash_attention import FlashAttention as FlashAttention
    from ejkernel.modules.operations.flash_attention import flash_attention as flash_attention
    from ejkernel.modules.operations.gla_attention import GLAttention as GLAttention
    from ejkernel.modules.operations.gla_attention import gla_attention as gla_attention
    from ejkernel.modules.operations.grouped_matmul import GroupedMatmul as GroupedMatmul
    from ejkernel.modules.operations.grouped_matmul import grouped_matmul as grouped_matmul
    from ejkernel.modules.operations.lightning_attention import (
        LightningAttention as LightningAttention,
    )
    from ejkernel.modules.operations.lightning_attention import (
        lightning_attention as lightning_attention,
    )
    from ejkernel.modules.operations.mean_pooling import MeanPooling as MeanPooling
    from ejkernel.modules.operations.mean_pooling import mean_pooling as mean_pooling
    from ejkernel.modules.operations.mla_attention import FlashMLA as FlashMLA
    from ejkernel.modules.operations.mla_attention import mla_attention as flash_mla
    from ejkernel.modules.operations.mla_attention import mla_attention as mla_attention
    from ejkernel.modules.operations.mla_decode import MLADecode as MLADecode
    from ejkernel.modules.operations.mla_decode import mla_decode as mla_decode
    from ejkernel.modules.operations.native_sparse_attention import (
        NativeSparseAttention as NativeSparseAttention,
    )
    from ejkernel.modules.operations.native_sparse_attention import (
        native_sparse_attention as native_sparse_attention,
    )
    from ejkernel.modules.operations.page_attention import PageAttention as PageAttention
    from ejkernel.modules.operations.page_attention import page_attention as page_attention
    from ejkernel.modules.operations.ragged_decode_attention import (
        RaggedDecodeAttention as RaggedDecodeAttention,
    )
    from ejkernel.modules.operations.ragged_decode_attention import (
        ragged_decode_attention as ragged_decode_attention,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        RaggedPageAttention as RaggedPageAttention,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        RaggedPageAttention as RaggedPageAttentionv2,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        ragged_page_attention as ragged_page_attention,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        ragged_page_attention as ragged_page_attention_v2,
    )
    from ejkernel.modules.operations.ragged_page_attention_v3 import (
        RaggedPageAttentionv3 as RaggedPageAttentionv3,
    )
    from ejkernel.modules.operations.ragged_page_attention_v3 import (
        ragged_page_attention_v3 as ragged_page_attention_v3,
    )
    from ejkernel.modules.operations.recurrent_attention import (
        RecurrentAttention as RecurrentAttention,
    )
    from ejkernel.modules.operations.recurrent_attention import (
        recurrent_attention as recurrent_attention,
    )
    from ejkernel.modules.operations.ring_attention import RingAttention as RingAttention
    from ejkernel.modules.operations.ring_attention import ring_attention as ring_attention
    from ejkernel.modules.operations.ring_attention import zigzag_shard as zigzag_shard
    from ejkernel.modules.operations.ring_attention import zigzag_unshard as zigzag_unshard
    from ejkernel.modules.operations.scaled_dot_product_attention import (
        ScaledDotProductAttention as ScaledDotProductAttention,
    )
    from ejkernel.modules.operations.scaled_dot_product_attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from ejkernel.ops import AutotuneError as AutotuneError
    from ejkernel.ops import ConfigError as ConfigError
    from ejkernel.ops import EjkernelWarning as EjkernelWarning
    from ejkernel.ops import InvalidArgument as InvalidArgument
    from ejkernel.ops import KernelNotFound as KernelNotFound
    from ejkernel.ops import KernelNotSupported as KernelNotSupported
    from ejkernel.ops import NoConfigError as NoConfigError
