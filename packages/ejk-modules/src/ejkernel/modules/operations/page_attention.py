"""One decode token per sequence over a paged cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import PageAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, Cache, F, I


def page_attention(
    query: F[Array, "batch 1 heads head_dim"] | F[Array, "batch heads head_dim"],
    key_cache: Cache[Array, "pages page_size kv_heads head_dim"],
    value_cache: Cache[Array, "pages page_size kv_heads v_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    platform: str | Platform | None = None,
    cfg: PageAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one new token per sequence over keys and values kept in pages.

    Key j of row r lies at ``key_cache[block_tables[r, j // page_size], j % page_size]``; the
    token sits at position ``i = context_lens[r] - 1`` and sees ``j < context_lens[r]`` and the
    window around i::

        o = sum_j softmax_j(softmax_scale * k_scale * dot(q, k[j])) * v_scale * v[j]

    Args:
        query: ``[batch, 1, heads, head_dim]`` or ``[batch, heads, head_dim]``.
        key_cache: ``[pages, page_size, kv_heads, head_dim]``; float, int8 or an 8-bit float.
        value_cache: ``[pages, page_size, kv_heads, v_dim]``.
        context_lens: ``[batch]`` tokens in the cache, the new one included; 0 gives 0.
        block_tables: ``[batch, max_blocks]`` page indices; entries past the context may hold
            anything, and rows may share pages.
        softmax_scale: default ``head_dim ** -0.5``.
        logits_soft_cap: c > 0 replaces a logit x by ``c * tanh(x / c)``; None: none.
        sliding_window: ``w`` or ``(left, right)``, inclusive, around the token's position.
        softmax_aux: attention sinks, ``[heads, sinks]`` or ``[sinks]``.
        k_scale, v_scale: factors of stored keys and values, scalars or one per kv head;
            None = 1, with a warning for an int8 cache.
        num_splits: number of key splits (>= 1) worked on in parallel; changes rounding only and
            beats ``cfg``.
        return_lse: also return the natural-log sum of exponentials.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        The query's rank and dtype, last axis ``v_dim``; with ``return_lse`` also the same
        without the last axis in float32 (float64 for float64 inputs), -inf for a row without keys.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range; in numpy arrays also a length that is negative or past the
            table, and a table entry in use outside the cache. Lengths in jax arrays are clipped.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, softmax_aux, the scales and floating-point caches; int8 and 8-bit
    float caches get no gradient.

    Source: Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), section 4.1.
    """
    return get_default_executor()(PageAttention.shared(), **flatten(locals()))


class PageAttention(Operation[PageAttentionConfig]):
    spec = calls.PageAttention
    function = staticmethod(page_attention)
    trained = False
