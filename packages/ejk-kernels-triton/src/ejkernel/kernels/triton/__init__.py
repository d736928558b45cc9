"""Triton GPU kernels for ejkernel, through jax-triton.

Every operation is a function here, under its own name, with full gradients:
``ejkernel.kernels.triton.flash_attention(q, k, v, causal=True)``. Each is imported on first use;
importing this package imports neither triton nor jax_triton.
"""

from ejkernel.kernels.triton._version import __version__
from ejkernel.ops.packages import Entry, KernelPackage

_SIZES = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
_FLASH = (
    *(f"fwd_params.{size}" for size in _SIZES),
    *(f"bwd_params.{size}" for size in (*_SIZES, "blocksize_m", "blocksize_n")),
)
_PAGED = ("num_splits", "pages_per_block", "num_warps", "num_stages")
_RAGGED = (
    "num_queries_per_block",
    "num_kv_pages_per_block",
    "num_splits",
    "num_warps",
    "num_stages",
)


def _serving(algorithm: str, config_fields: tuple[str, ...]) -> Entry:
    target = f"serving.implementation:{algorithm}"
    return Entry(algorithm, target, config_fields=config_fields)


def _linear(algorithm: str, function: str) -> Entry:
    return Entry(
        algorithm,
        f"linear_attention.implementation:{function}",
        function=function,
        config_fields=("time_tile", "dv_tile", "num_warps", "num_stages"),
    )


PACKAGE = KernelPackage(
    __name__,
    "triton",
    (
        Entry("flash_attention", config_fields=(*_FLASH, "context_parallel")),
        Entry("blocksparse_attention", config_fields=_FLASH),
        Entry("scaled_dot_product_attention", config_fields=()),
        Entry("mla_attention", config_fields=(*_FLASH, "context_parallel")),
        Entry(
            "ring_attention",
            "flash_attention.implementation:ring_attention",
            config_fields=(*_FLASH, "context_parallel"),
        ),
        _serving("page_attention", (*_PAGED, "num_launches")),
        _serving("ragged_page_attention", _RAGGED),
        _serving("ragged_page_attention_v3", _RAGGED),
        _serving("ragged_decode_attention", tuple(f"fwd_params.{size}" for size in _SIZES[1:])),
        Entry(
            "native_sparse_attention",
            config_fields=("q_tile", "kv_tile", "num_warps", "num_stages"),
        ),
        _serving("mla_decode", (*_PAGED, "num_launches")),
        Entry(
            "grouped_matmul",
            config_fields=("block_m", "block_n", "block_k", "num_warps", "num_stages"),
        ),
        Entry("mean_pooling", config_fields=("token_tile", "channel_tile", "num_warps")),
        Entry(
            "gated_delta_rule", config_fields=("time_tile", "dv_tile", "num_warps", "num_stages")
        ),
        Entry("causal_conv1d", config_fields=("token_tile", "channel_tile", "num_warps")),
        _linear("recurrent", "recurrent_attention"),
        _linear("gla", "gla_attention"),
        _linear("lightning_attn", "lightning_attention"),
    ),
)
__all__ = ["__version__", "register", *PACKAGE.functions]
register = PACKAGE.register
PACKAGE.export()
