"""Cache update and mixed prefill/decode attention in one call."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import RaggedPageAttentionv3Config
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, B, Cache, F, I
from ejkernel.types.serving.plan import AttentionPlan


def ragged_page_attention_v3(
    queries: F[Array, "tokens heads head_dim"],
    keys: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    values: F[Array, "tokens kv_heads head_dim"] | Cache[Array, "tokens kv_heads head_dim"],
    kv_cache: Cache[Array, "pages page_size combined_kv_heads head_dim"]
    | Cache[Array, "pages page_size packed_kv_heads packing padded_head_dim"],
    kv_lens: I[Array, " sequences"],
    block_tables: I[Array, "sequences max_blocks"] | I[Array, " table_entries"],
    query_start_loc: I[Array, " sequences_plus_1"],
    distribution: I[Array, "3"],
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | F[Array, ""] | None = None,
    k_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    v_scale: float | F[Array, ""] | F[Array, " kv_heads"] | None = None,
    tree_mask: B[Array, "tokens max_new"] | None = None,
    positions: I[Array, " tokens"] | None = None,
    return_lse: bool = False,
    plan: AttentionPlan | None = None,
    platform: str | Platform | None = None,
    cfg: RaggedPageAttentionv3Config | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array]:
    """Write the new keys and values into the cache, then attend as ragged_page_attention.

    Row m of sequence r goes to position ``kv_lens[r] - rows + m`` of that sequence. The input
    cache is not modified; with a donated cache under ``jax.jit`` the update is in place. Padding
    rows write nothing.

    Args:
        queries: ``[tokens, heads, head_dim]``.
        keys, values: ``[tokens, kv_heads, head_dim]``. Stored unchanged if of the
            cache's dtype, else as ``cast(clip(round(key / k_scale)))`` (values: ``v_scale``); int8
            caches round to nearest even.
        kv_cache: ``[pages, page_size, 2 * kv_heads, head_dim]``, or packed ``[pages, page_size,
            ceil(2 * kv_heads / packing), packing, head_dim rounded up to 128]`` with
            ``packing = 32 // bits``; float, int8 or an 8-bit float. Combined heads lie in the order
            K0 V0 K1 V1 ...
        kv_lens: ``[sequences]`` tokens per sequence, the new ones included.
        block_tables: ``[sequences, max_blocks]`` or flat ``[sequences * max_blocks]``.
        query_start_loc: ``[sequences + 1]``, first entry 0.
        distribution: ``(i, j, m)``: sequences [0, i) are one-token decodes, [i, j) prefills,
            [j, m) either; m sequences are valid. i and j are hints.
        softmax_aux: attention sinks, ``[heads, sinks]`` or ``[sinks]``.
        softmax_scale: default ``head_dim ** -0.5``.
        sliding_window, logits_soft_cap: as in :func:`page_attention`.
        q_scale: queries are quantised as ``cast(clip(q / q_scale))`` to the cache's dtype and
            logits multiplied by it; None = not quantised. Their gradient is that of ``clip(q /
            q_scale)``. An 8-bit cache has no gradient, nor have keys and values written to it.
        k_scale, v_scale: one number or one per kv head; multiply logits and output; None = 1, with
            a warning for an int8 cache.
        tree_mask: ``[tokens, max_new]``, where the new tokens of a sequence are nodes of a tree: a
            row sees every token before the new ones, itself, and of the new ones those j with
            ``tree_mask[row, j]``. None: those before it.
        positions: ``[tokens]`` by which a window is measured in place of the order in the sequence,
            at least the number of tokens before the new ones. Siblings of a tree have one position.
        return_lse: also return the natural-log sum of exponentials.
        plan: what :func:`plan_ragged_attention` made of this step's starts and lengths, the same
            for all layers; it stands for kv_lens, query_start_loc and distribution,
            of which only the shapes are read then. The result is the same.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``(out [tokens, heads, head_dim], kv_cache)``, the cache in the form it came in; with
        ``return_lse`` ``(out, lse [tokens, heads], kv_cache)``, lse in float32 (float64 for
        float64 inputs), -inf for a row that sees no key.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range; in numpy arrays also starts that decrease, lengths past
            the table and entries in use outside the cache. Lengths in jax arrays are clipped.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in queries, keys, values, softmax_aux, the scales and floating-point caches.

    Source: Ragged Paged Attention, arXiv 2604.15464.
    """
    return get_default_executor()(RaggedPageAttentionv3.shared(), **flatten(locals()))


class RaggedPageAttentionv3(Operation[RaggedPageAttentionv3Config]):
    spec = calls.RaggedPageAttentionv3
    function = staticmethod(ragged_page_attention_v3)
    trained = False
