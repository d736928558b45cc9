"""Step one of every call: settle what is optional, check what types cannot say.

``values`` looks at concrete numbers (Python and numpy) before anything is traced; the other
modules work inside the trace and leave canonical arguments behind: a float scale, a window tuple,
one MaskInfo, sinks ``[heads, sinks]``, an int32 seed. All take the arguments by name in a dict and
change it in place.
"""

from ejkernel.types.calls.settle.heads import combined_heads, grouped_heads
from ejkernel.types.calls.settle.linear import layer, states
from ejkernel.types.calls.settle.masking import (
    block_mask,
    masks,
    one_packing,
    packed,
    packed_pair,
    plus_one,
)
from ejkernel.types.calls.settle.other import (
    cache_form,
    groups,
    latent,
    latent_dim,
    pooling,
    sparse_options,
)
from ejkernel.types.calls.settle.ring import (
    axis_is_bound,
    check_ring_lengths,
    ring_layout,
    ring_masks,
)
from ejkernel.types.calls.settle.softmax import (
    count,
    dropout,
    dropout_from_key,
    head_scales,
    local_seeds,
    scalar_index,
    sinks,
    softmax_options,
)
from ejkernel.types.calls.settle.values import (
    build_bias,
    build_block_mask,
    check_block_counts,
    check_distribution,
    check_group_sizes,
    check_int32,
    check_packed,
    check_sequences,
    check_tables,
    integers_to_arrays,
    known,
    scalars_to_arrays,
    seeds_to_arrays,
)

__all__ = [
    "axis_is_bound",
    "block_mask",
    "build_bias",
    "build_block_mask",
    "cache_form",
    "check_block_counts",
    "check_distribution",
    "check_group_sizes",
    "check_int32",
    "check_packed",
    "check_ring_lengths",
    "check_sequences",
    "check_tables",
    "combined_heads",
    "count",
    "dropout",
    "dropout_from_key",
    "grouped_heads",
    "groups",
    "head_scales",
    "integers_to_arrays",
    "known",
    "latent",
    "latent_dim",
    "layer",
    "local_seeds",
    "masks",
    "one_packing",
    "packed",
    "packed_pair",
    "plus_one",
    "pooling",
    "ring_layout",
    "ring_masks",
    "scalar_index",
    "scalars_to_arrays",
    "seeds_to_arrays",
    "sinks",
    "softmax_options",
    "sparse_options",
    "states",
]
