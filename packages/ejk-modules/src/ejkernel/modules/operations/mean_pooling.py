"""Means over sequences, packed sequences or chunks of them."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import MeanPoolingConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, Flags, I


def mean_pooling(
    x: F[Array, "batch seq *channels"] | F[Array, " tokens *channels"],
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    chunk_size: int | None = None,
    attention_mask: Flags[Array, "batch seq"] | Flags[Array, " tokens"] | None = None,
    platform: str | Platform | None = None,
    cfg: MeanPoolingConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array:
    """Mean over tokens, per row, per packed sequence, or per chunk of either.

    ======================= ============= ==================================================
    cu_seqlens              chunk_size    input -> output
    ======================= ============= ==================================================
    None                    None          ``[batch, seq, ...]`` -> ``[batch, ...]``
    None                    c             ``[batch, seq, ...]`` -> ``[batch, ceil(seq/c), ...]``
    ``[sequences + 1]``     None          ``[tokens, ...]`` -> ``[sequences, ...]``
    ``[sequences + 1]``     c             ``[tokens, ...]`` -> ``[sequences, ceil(tokens/c), ...]``
    ======================= ============= ==================================================

    Args:
        x: ``[batch, seq, ...]``, or ``[tokens, ...]`` with cu_seqlens; an axis or more follow
            the tokens.
        cu_seqlens: cumulative lengths of packed sequences, first entry 0.
        chunk_size: tokens per chunk, >= 1; the last chunk averages its real tokens; chunks
            restart per sequence and unused output rows are 0.
        attention_mask: ``[batch, seq]`` or ``[tokens]``, bool or integer; tokens where it is 0
            count neither in the sum nor in the length.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`; batch, token
            and channel axes may be sharded.

    Returns:
        Means in the dtype of ``x``, summed in float32 or better. An empty group gives 0.

    Raises:
        InvalidArgument: wrong dtype, rank or axis size.
        ValueError: ``chunk_size < 1``, bad ``cu_seqlens`` as a numpy array.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in x; empty groups have gradient 0.

    Source: the arithmetic mean; packed form as in variable-length batching of flash attention.
    """
    return get_default_executor()(MeanPooling.shared(), **flatten(locals()))


class MeanPooling(Operation[MeanPoolingConfig]):
    spec = calls.MeanPooling
    function = staticmethod(mean_pooling)
