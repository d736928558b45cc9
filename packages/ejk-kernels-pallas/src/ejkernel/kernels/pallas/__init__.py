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
_RAGGED = (
    "num_queries_per_block",
    "num_kv_pages_per_block",
    "num_splits",
    "num_warps",
    "num_stages",
)
PACKAGE = KernelPackage(
    __name__,
    "pallas",
    (
        Entry(
            "flash_attention",
            "gpu.flash_attention.implementation:flash_attention",
            priority=110,  # ahead of the kernels for every GPU, but see its ``priority_for``
            hooks=HOOKS,
            config_fields=_HOPPER,
        ),
        Entry(
            "flash_attention",
            "tpu.flash_attention.implementation:flash_attention",
            backend="tpu",
            config_fields=(
                "fwd_params.q_blocksize",
                "fwd_params.kv_blocksize",
                "bwd_params.q_blocksize",
                "bwd_params.kv_blocksize",
                "bwd_params.blocksize_m",
                "bwd_params.blocksize_n",
            ),
        ),
        Entry(
            "blocksparse_attention",
            "gpu.blocksparse_attention.implementation:blocksparse_attention",
            priority=110,
            hooks=HOOKS,
            config_fields=_HOPPER,
        ),
        Entry(
            "scaled_dot_product_attention",
            "gpu.flash_attention.implementation:scaled_dot_product_attention",
            priority=110,
            hooks=HOOKS,
            config_fields=(),
        ),
        Entry(
            "mla_attention",
            "gpu.flash_attention.implementation:mla_attention",
            priority=110,
            hooks=HOOKS,
            config_fields=_HOPPER,
        ),
        *(
            Entry(
                name,
                f"gpu.ragged_page_attention.implementation:{name}",
                priority=110,  # ahead of the kernels for every GPU, but see ``priority_for``
                hooks=HOOKS,
                config_fields=_RAGGED,
            )
            for name in ("ragged_page_attention", "ragged_page_attention_v3")
        ),
        Entry(
            "mla_decode",
            "gpu.mla_decode.implementation:mla_decode",
            priority=110,  # ahead of the kernels for every GPU, but see its ``priority_for``
            hooks=HOOKS,
            config_fields=(),
        ),
        Entry(
            "grouped_matmul",
            "gpu.grouped_matmul.implementation:grouped_matmul",
            priority=110,  # ahead of the kernels for every GPU, but see its ``priority_for``
            hooks=HOOKS,
            config_fields=("block_m", "block_n", "block_k", "num_warps", "num_stages"),
        ),
    ),
)
__all__ = ["__version__", "register", *PACKAGE.functions]
register = PACKAGE.register
PACKAGE.export()
