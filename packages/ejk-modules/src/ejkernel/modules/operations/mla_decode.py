"""Multi-head latent attention for decoding, in latent space."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import MLADecodeConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, B, Cache, F, I


def mla_decode(
    query: F[Array, "batch heads cache_dim"] | F[Array, "batch q_len heads cache_dim"],
    latent_cache: Cache[Array, "pages page_size cache_dim"],
    context_lens: I[Array, " batch"],
    block_tables: I[Array, "batch max_blocks"],
    *,
    latent_dim: int = 512,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    k_scale: float | F[Array, ""] | None = None,
    num_splits: int | None = None,
    tree_mask: B[Array, "batch q_len q_len"] | None = None,
    positions: I[Array, "batch q_len"] | None = None,
    return_lse: bool = False,
    platform: str | Platform | None = None,
    cfg: MLADecodeConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the last tokens over a paged cache of latent rows, all heads sharing it.

    The key is the whole cache row, the value its first ``latent_dim`` entries::

        o = sum_j softmax_j(softmax_scale * k_scale * dot(q, c[j])) * k_scale * c[j][:latent_dim]

    Query row m of q_len sits at position ``context_lens[r] - q_len + m`` and sees j up to that.

    Args:
        query: ``[batch, heads, cache_dim]`` or ``[batch, q_len, heads, cache_dim]``, already
            multiplied by the key projection.
        latent_cache: ``[pages, page_size, cache_dim]``; float, int8 or an 8-bit float.
        context_lens: ``[batch]`` tokens in the cache, the new ones included; 0 gives 0.
        block_tables: ``[batch, max_blocks]``; unused entries may hold anything.
        latent_dim: ``1 <= latent_dim <= cache_dim``; the rest of a row is the rotary part.
        softmax_scale: default ``cache_dim ** -0.5``.
        logits_soft_cap, sliding_window, softmax_aux, num_splits: as in :func:`page_attention`.
        k_scale: factor of stored values, a scalar; None = 1, with a warning for an int8 cache.
        tree_mask: ``[batch, q_len, q_len]``, where the last tokens are nodes of a tree: row m sees
            every token before them, itself, and of them those j with ``tree_mask[r, m, j]``. None:
            those before it.
        positions: ``[batch, q_len]`` by which a window is measured in place of the order in the
            sequence, at least the number of tokens before the last ones.
        return_lse: also return the natural-log sum of exponentials.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        The query's rank and dtype, last axis ``latent_dim``; with ``return_lse`` also the same
        without the last axis in float32 (float64 for float64 inputs).

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range; in numpy arrays also a length that is negative or past the
            table, and a table entry in use outside the cache. Lengths in jax arrays are clipped.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, softmax_aux, k_scale and a floating-point cache.

    Source: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), section 2.1.2.
    """
    return get_default_executor()(MLADecode.shared(), **flatten(locals()))


class MLADecode(Operation[MLADecodeConfig]):
    spec = calls.MLADecode
    function = staticmethod(mla_decode)
    trained = False
