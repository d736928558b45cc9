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

_WHERE: dict[str, tuple[str, str]] = {
    **exports(),
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
    from ejkernel.modules._configs import (
        AttentionConfig,
        BlockSparseAttentionConfig,
        FlashAttentionConfig,
        FlashMLAConfig,
        GLAttentionConfig,
        GroupedMatmulConfig,
        LightningAttentionConfig,
        MeanPoolingConfig,
        MLADecodeConfig,
        NativeSparseAttentionConfig,
        PageAttentionConfig,
        RaggedDecodeAttentionConfig,
        RaggedPageAttentionConfig,
        RaggedPageAttentionv2Config,
        RaggedPageAttentionv3Config,
        RecurrentAttentionConfig,
        RingAttentionConfig,
        ScaledDotProductAttentionConfig,
    )
    from ejkernel.modules._executor import (
        create_default_executor,
        explain,
        get_default_executor,
        supports,
    )
    from ejkernel.modules.operations.attention import Attention, attention
    from ejkernel.modules.operations.blocksparse_attention import (
        BlockSparseAttention,
        blocksparse_attention,
    )
    from ejkernel.modules.operations.flash_attention import FlashAttention, flash_attention
    from ejkernel.modules.operations.gla_attention import GLAttention, gla_attention
    from ejkernel.modules.operations.grouped_matmul import GroupedMatmul, grouped_matmul
    from ejkernel.modules.operations.lightning_attention import (
        LightningAttention,
        lightning_attention,
    )
    from ejkernel.modules.operations.mean_pooling import MeanPooling, mean_pooling
    from ejkernel.modules.operations.mla_attention import FlashMLA, mla_attention
    from ejkernel.modules.operations.mla_attention import mla_attention as flash_mla
    from ejkernel.modules.operations.mla_decode import MLADecode, mla_decode
    from ejkernel.modules.operations.native_sparse_attention import (
        NativeSparseAttention,
        native_sparse_attention,
    )
    from ejkernel.modules.operations.page_attention import PageAttention, page_attention
    from ejkernel.modules.operations.ragged_decode_attention import (
        RaggedDecodeAttention,
        ragged_decode_attention,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        RaggedPageAttention,
        ragged_page_attention,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        RaggedPageAttention as RaggedPageAttentionv2,
    )
    from ejkernel.modules.operations.ragged_page_attention import (
        ragged_page_attention as ragged_page_attention_v2,
    )
    from ejkernel.modules.operations.ragged_page_attention_v3 import (
        RaggedPageAttentionv3,
        ragged_page_attention_v3,
    )
    from ejkernel.modules.operations.recurrent_attention import (
        RecurrentAttention,
        recurrent_attention,
    )
    from ejkernel.modules.operations.ring_attention import (
        RingAttention,
        ring_attention,
        zigzag_shard,
        zigzag_unshard,
    )
    from ejkernel.modules.operations.scaled_dot_product_attention import (
        ScaledDotProductAttention,
        scaled_dot_product_attention,
    )
    from ejkernel.ops import (
        AutotuneError,
        ConfigError,
        EjkernelWarning,
        InvalidArgument,
        KernelNotFound,
        KernelNotSupported,
        NoConfigError,
    )
