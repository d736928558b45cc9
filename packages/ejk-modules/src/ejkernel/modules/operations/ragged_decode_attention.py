"""One decode token per sequence over a contiguous cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import RaggedDecodeAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I


def ragged_decode_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    sequence_start: I[Array, " batch"],
    sequence_end: I[Array, " batch"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    platform: str | Platform | None = None,
    cfg: RaggedDecodeAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one token per row over keys ``sequence_start <= j < sequence_end``.

    The token sits at position ``i = sequence_end - 1``; the window, if any, is around i::

        o = sum_j softmax_j(softmax_scale * dot(q, k[j])) * v[j]

    Args:
        query: ``[batch, 1, heads, head_dim]`` or ``[batch, heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, v_dim]``.
        sequence_start, sequence_end: ``[batch]``, clipped to [0, kv_len]; an empty range gives 0.
        softmax_aux: attention sinks, ``[heads, sinks]`` or ``[sinks]``.
        softmax_scale: default ``head_dim ** -0.5``.
        sliding_window, logits_soft_cap: as in :func:`page_attention`.
        return_lse: also return the natural-log sum of exponentials.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        The query's rank and dtype, last axis ``v_dim``; with ``return_lse`` also the same
        without the last axis in float32 (float64 for float64 inputs), -inf for a row without keys.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value and softmax_aux.

    Source: the decode case of Dao et al. 2022 (arXiv 2205.14135) with per-row bounds.
    """
    return get_default_executor()(RaggedDecodeAttention.shared(), **flatten(locals()))


class RaggedDecodeAttention(Operation[RaggedDecodeAttentionConfig]):
    spec = calls.RaggedDecodeAttention
    function = staticmethod(ragged_decode_attention)
    trained = False
