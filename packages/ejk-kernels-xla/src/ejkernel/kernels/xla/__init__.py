"""One readable XLA implementation of every ejkernel operation.

Every operation is a function here, under its own name, with full gradients:
``ejkernel.kernels.xla.flash_attention(q, k, v, causal=True)``. Each is imported on first use.
"""

from ejkernel.kernels.xla._version import __version__
from ejkernel.ops.packages import Entry, KernelPackage

# blocks of queries and keys, forward and backward
_BLOCKS = tuple(
    f"{half}.{size}"
    for half in ("fwd_params", "bwd_params")
    for size in ("q_blocksize", "kv_blocksize")
)
_SPLITS = ("num_splits", "pages_per_block")
_RAGGED = ("num_kv_pages_per_block", "num_queries_per_block")
_STEP = ("fwd_params.blocksize_keys", "fwd_params.kv_blocksize")


def _entry(algorithm: str, *config_fields: str, folder: str = "", function: str = "") -> Entry:
    """An implementation for every device; others go first. It takes any call and times nothing."""
    return Entry(
        algorithm,
        f"{folder or algorithm}.implementation:{function or algorithm}",
        backend="any",
        priority=0,
        function=function,
        hooks=("heuristic", "sample_inputs", "notes"),
        config_fields=config_fields,
    )


def _linear(algorithm: str, function: str) -> Entry:
    return _entry(algorithm, "time_tile", folder="linear_attention", function=function)


PACKAGE = KernelPackage(
    __name__,
    "xla",
    (
        _entry("flash_attention", *_BLOCKS),
        _entry("attention"),
        _entry("scaled_dot_product_attention"),
        _entry("ring_attention", *_BLOCKS, "context_parallel"),
        _entry("blocksparse_attention", *_BLOCKS),
        _entry("page_attention", *_SPLITS),
        _entry("ragged_page_attention", *_RAGGED),
        _entry("ragged_page_attention_v3", *_RAGGED),
        _entry("ragged_decode_attention", *_STEP),
        _entry("mla_attention", *_BLOCKS),
        _entry("mla_decode", *_SPLITS),
        _entry("native_sparse_attention", "q_tile"),
        _linear("gla", "gla_attention"),
        _linear("recurrent", "recurrent_attention"),
        _linear("lightning_attn", "lightning_attention"),
        _entry("gated_delta_rule", "time_tile"),
        _entry("causal_conv1d"),
        _entry("mean_pooling", "token_tile"),
        _entry("grouped_matmul", "block_m"),
    ),
)
__all__ = ["__version__", "register", *PACKAGE.functions]
register = PACKAGE.register
PACKAGE.export()
