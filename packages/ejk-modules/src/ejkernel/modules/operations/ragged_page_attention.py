"""Mixed prefill and decode over a paged cache that already holds the new tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import RaggedPageAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, B, Cache, F, I
from ejkernel.types.serving.plan import AttentionPlan


def ragged_page_attention(
    queries: F[Array, "tokens heads head_dim"],
    kv_pages: Cache[Array, "pages page_size combined_kv_heads head_dim"],
    context_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"],
    query_start_loc: I[Array, " sequences_plus_1"],
    num_seqs: int | I[Array, ""] | I[Array, "1"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    platform: str | Platform | None = None,
    cfg: RaggedPageAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal attention of packed query rows over each sequence's own pages.

    Sequence r < num_seqs owns query rows ``query_start_loc[r]`` to ``query_start_loc[r + 1]``.
    Its m-th row sits at position ``i = context_lens[r] - rows + m`` and sees ``j <= i`` within
    the window; key j lies at ``kv_pages[block_tables[r, j // page_size], j % page_size]``::

        o = sum_j softmax_j(softmax_scale * k_scale * dot(q, k[j])) * v_scale * v[j]

    Args:
        queries: ``[tokens, heads, head_dim]``.
        kv_pages: ``[pages, page_size, 2 * kv_heads, head_dim]``; float, int8 or an 8-bit float.
            Combined head 2m holds keys of kv head m, 2m + 1 its values.
        context_lens: ``[sequences]`` tokens per sequence, the new ones included.
        block_tables: ``[sequences, max_blocks]``; unused entries may hold anything.
        query_start_loc: ``[sequences + 1]``, first entry 0, non-decreasing up to num_seqs.
        num_seqs: valid sequences; rows past theirs give 0.
        softmax_aux: attention sinks, ``[heads, sinks]`` or ``[sinks]``.
        softmax_scale: default ``head_dim ** -0.5``.
        logits_soft_cap, sliding_window, k_scale, v_scale: as in :func:`page_attention`.
        tree_mask: ``[tokens, max_new]``, where the new tokens of a sequence are nodes of a tree: a
            row sees every token before the new ones, itself, and of the new ones those j with
            ``tree_mask[row, j]``. None: those before it.
        positions: ``[tokens]`` by which a window is measured in place of the order in the sequence,
            at least the number of tokens before the new ones. Siblings of a tree have one position.
        return_lse: also return the natural-log sum of exponentials.
        plan: what :func:`plan_ragged_attention` made of this step's starts and lengths, the same
            for all layers; it stands for context_lens, query_start_loc and num_seqs,
            of which only the shapes are read then. The result is the same.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``[tokens, heads, head_dim]`` in the queries' dtype; with ``return_lse`` also ``[tokens,
        heads]`` in float32 (float64 for float64 inputs), -inf for a row that sees no key.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range; in numpy arrays also starts that decrease, lengths past
            the table and entries in use outside the cache. Lengths in jax arrays are clipped.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in queries, softmax_aux, the scales and floating-point pages.

    Source: Kwon et al. 2023 (arXiv 2309.06180); the packed layout of Ragged Paged Attention,
    arXiv 2604.15464.
    """
    return get_default_executor()(RaggedPageAttention.shared(), **flatten(locals()))


class RaggedPageAttention(Operation[RaggedPageAttentionConfig]):
    spec = calls.RaggedPageAttention
    function = staticmethod(ragged_page_attention)
    trained = False
