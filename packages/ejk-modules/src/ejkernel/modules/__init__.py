# ruff: noqa: F403, F405 (names are imported for type checkers, and lazily for everyone else)
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
    from ejkernel.modules._executor import *
    from ejkernel.modules.adapters import equinox_attention as equinox_attention
    from ejkernel.modules.adapters import flax_attention as flax_attention
    from ejkernel.modules.operations.attention import *
    from ejkernel.modules.operations.blocksparse_attention import *
    from ejkernel.modules.operations.flash_attention import *
    from ejkernel.modules.operations.gla_attention import *
    from ejkernel.modules.operations.grouped_matmul import *
    from ejkernel.modules.operations.lightning_attention import *
    from ejkernel.modules.operations.mean_pooling import *
    from ejkernel.modules.operations.mla_attention import *
    from ejkernel.modules.operations.mla_decode import *
    from ejkernel.modules.operations.native_sparse_attention import *
    from ejkernel.modules.operations.page_attention import *
    from ejkernel.modules.operations.ragged_decode_attention import *
    from ejkernel.modules.operations.ragged_page_attention import *
    from ejkernel.modules.operations.ragged_page_attention_v3 import *
    from ejkernel.modules.operations.recurrent_attention import *
    from ejkernel.modules.operations.ring_attention import *
    from ejkernel.modules.operations.scaled_dot_product_attention import *
    from ejkernel.ops import AutotuneError as AutotuneError
    from ejkernel.ops import ConfigError as ConfigError
    from ejkernel.ops import EjkernelWarning as EjkernelWarning
    from ejkernel.ops import InvalidArgument as InvalidArgument
    from ejkernel.ops import KernelNotFound as KernelNotFound
    from ejkernel.ops import KernelNotSupported as KernelNotSupported
    from ejkernel.ops import NoConfigError as NoConfigError

    flash_mla = mla_attention
    ragged_page_attention_v2 = ragged_page_attention
    RaggedPageAttentionv2 = RaggedPageAttention
