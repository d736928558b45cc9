"""Pallas kernels for ejkernel: Mosaic TPU and Mosaic GPU.

Every operation is a function here, under its own name, with full gradients:
``ejkernel.kernels.pallas.flash_attention(q, k, v, causal=True)``. It runs the kernel of the device
JAX targets. Each is imported on first use; importing this package imports no kernel.
"""

from ejkernel.kernels.pallas._version import __version__
from ejkernel.ops.packages import HOOKS, Entry, KernelPackage

_SIZES = ("q_blocksize", "kv_blocksize", "num_stages")
_HOPPER = (
    *(f"fwd_params.{size}" for size in (*_SIZES, "warpgroups")),
    *(f"bwd_params.{size}" for size in _SIZES),
)
_TPU_FLASH = (
    "fwd_params.q_blocksize",
    "fwd_params.kv_blocksize",
    "bwd_params.q_blocksize",
    "bwd_params.kv_blocksize",
    "bwd_params.blocksize_m",
    "bwd_params.blocksize_n",
)
_RAGGED = (
    "num_queries_per_block",
    "num_kv_pages_per_block",
    "num_splits",
    "num_warps",
    "num_stages",
)
_TPU_RAGGED = ("num_queries_per_block", "num_kv_pages_per_block")


def _hopper(name: str, *config_fields: str, module: str = "") -> Entry:
    """A kernel for Hopper: ahead of those for every GPU, but see its own ``priority_for``."""
    target = f"gpu.{module or f'{name}.implementation'}:{name}"
    return Entry(name, target, priority=110, hooks=HOOKS, config_fields=config_fields)


def _tpu(name: str, *config_fields: str, folder: str = "") -> Entry:
    """A kernel for TPUs."""
    target = f"tpu.{folder or name}.implementation:{name}"
    return Entry(name, target, backend="tpu", config_fields=config_fields)


def _linear(algorithm: str, function: str) -> Entry:
    """One of the three operations of linear attention for TPUs."""
    target = f"tpu.linear_attention.implementation:{function}"
    return Entry(algorithm, target, backend="tpu", function=function, config_fields=())


PACKAGE = KernelPackage(
    __name__,
    "pallas",
    (
        _hopper("flash_attention", *_HOPPER, "context_parallel"),
        _tpu("flash_attention", *_TPU_FLASH, "context_parallel", "joins_heads", "fuses_gradients"),
        _hopper("blocksparse_attention", *_HOPPER),
        _hopper("scaled_dot_product_attention", module="flash_attention.implementation"),
        _hopper(
            "mla_attention",
            *_HOPPER,
            "context_parallel",
            module="flash_attention.implementation",
        ),
        _hopper(
            "ring_attention",
            *_HOPPER,
            "context_parallel",
            module="flash_attention.implementation",
        ),
        _hopper("ragged_page_attention", *_RAGGED, module="serving.implementation"),
        _hopper("ragged_page_attention_v3", *_RAGGED, module="serving.implementation"),
        _hopper("mla_decode", module="serving.implementation"),
        _hopper("grouped_matmul", "block_m", "block_n", "block_k", "num_warps", "num_stages"),
        _tpu("mla_attention", *_TPU_FLASH, "context_parallel", folder="flash_attention"),
        _tpu("ring_attention", *_TPU_FLASH, "context_parallel", folder="flash_attention"),
        _tpu("blocksparse_attention", *_TPU_FLASH),
        _tpu("native_sparse_attention", "joins_heads"),
        _tpu("grouped_matmul", "block_m", "block_n", "block_k"),
        _tpu("mean_pooling"),
        _tpu("page_attention", "pages_per_block"),
        _tpu("mla_decode", "pages_per_block"),
        _tpu("ragged_page_attention", *_TPU_RAGGED),
        _tpu("ragged_page_attention_v3", *_TPU_RAGGED, folder="ragged_page_attention"),
        _tpu("ragged_decode_attention", "fwd_params.kv_blocksize"),
        _linear("recurrent", "recurrent_attention"),
        _linear("gla", "gla_attention"),
        _linear("lightning_attn", "lightning_attention"),
        _tpu("gated_delta_rule"),
        _tpu("causal_conv1d"),
    ),
)
__all__ = ["__version__", "register", *PACKAGE.functions]
register = PACKAGE.register
PACKAGE.export()
