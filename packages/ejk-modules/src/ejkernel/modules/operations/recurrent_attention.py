"""Linear attention with gates, in its general form."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import RecurrentAttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I


def recurrent_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    g: F[Array, "batch seq heads key_dim"] | F[Array, "batch seq heads"] | None = None,
    g_gamma: F[Array, " heads"] | None = None,
    gk: F[Array, "batch seq heads key_dim"] | None = None,
    gv: F[Array, "batch seq heads v_dim"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | Platform | None = None,
    cfg: RecurrentAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention with any gates: a state decays, adds ``k v^T``, and is read by the query.

    Per batch row and query head, with the state H ``[key_dim, v_dim]`` starting at
    ``initial_state`` or 0::

        H *= exp(g_t)[:, None] * exp(g_gamma) * exp(gk_t)[:, None] * exp(gv_t)[None, :]
        H += outer(k_t, v_t)
        o_t = (softmax_scale * q_t) @ H

    Args:
        query: ``[batch, seq, heads, key_dim]``.
        key: ``[batch, seq, kv_heads, key_dim]``; kv heads are repeated to the query heads.
        value: ``[batch, seq, kv_heads, v_dim]``.
        g: log decay per key channel ``[batch, seq, heads, key_dim]`` or per head ``[batch, seq,
            heads]``; normally <= 0. Of this and the other gates None is a decay of 1.
        g_gamma: constant log decay per head, ``[heads]``.
        gk: log decay per key channel, ``[batch, seq, heads, key_dim]``.
        gv: log decay per value channel, ``[batch, seq, heads, v_dim]``.
        initial_state: ``[batch, heads, key_dim, v_dim]``, or ``[sequences, ...]`` with
            cu_seqlens; None = 0.
        cu_seqlens: cumulative lengths ``[sequences + 1]``, first entry 0; needs batch 1. The
            state restarts per sequence; padding rows give 0.
        softmax_scale: default ``key_dim ** -0.5``; there is no softmax.
        reverse: run from the last token to the first, per sequence.
        return_state: also return the state after the last step.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``[batch, seq, heads, v_dim]`` in the query's dtype; with ``return_state`` also
        ``[batch or sequences, heads, key_dim, v_dim]`` in float32 (float64 for float64 inputs).

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value, every gate and initial_state, also through the state.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; Yang et al. 2023, "Gated
    Linear Attention" (arXiv 2312.06635), section 3.
    """
    return get_default_executor()(RecurrentAttention.shared(), **flatten(locals()))


class RecurrentAttention(Operation[RecurrentAttentionConfig]):
    spec = calls.RecurrentAttention
    function = staticmethod(recurrent_attention)
