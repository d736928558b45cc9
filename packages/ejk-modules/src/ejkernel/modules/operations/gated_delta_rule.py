"""The gated delta rule."""

from collections.abc import Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import GatedDeltaRuleConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import calls
from ejkernel.types.calls.words import Array, F, I


def gated_delta_rule(
    query: F[Array, "batch seq kv_heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq heads v_dim"],
    g: F[Array, "batch seq heads"] | F[Array, "batch seq heads key_dim"] | None = None,
    beta: F[Array, "batch seq heads"] | None = None,
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    softmax_scale: float | None = None,
    normalize_qk: bool = False,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | Platform | None = None,
    cfg: GatedDeltaRuleConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The gated delta rule: a state per head in which a new value replaces what its key reads.

    Per batch row and value head, with the state S ``[key_dim, v_dim]`` starting at
    ``initial_state`` or 0::

        S *= exp(g_t)                                   # a scalar, or one per key channel
        S += beta_t * outer(k_t, v_t - S.T @ k_t)
        o_t = (softmax_scale * q_t) @ S

    With one gate per head this is gated DeltaNet, with one per key channel Kimi Delta Attention,
    without gates DeltaNet.

    Args:
        query, key: ``[batch, seq, kv_heads, key_dim]``; value head i reads query and key head
            ``i // (heads // kv_heads)``.
        value: ``[batch, seq, heads, v_dim]``.
        g: log decay per head ``[batch, seq, heads]`` or per key channel ``[batch, seq, heads,
            key_dim]``; normally <= 0. None: nothing decays.
        beta: strength of the replacement ``[batch, seq, heads]``, from 0 to 2; None: 1.
        initial_state: ``[batch, heads, key_dim, v_dim]``, or ``[sequences, ...]`` with
            cu_seqlens; None = 0.
        cu_seqlens: cumulative lengths ``[sequences + 1]``, first entry 0; needs batch 1. The
            state restarts per sequence; padding rows give 0.
        softmax_scale: default ``key_dim ** -0.5``; there is no softmax.
        normalize_qk: divide every query and key by ``sqrt(sum of squares + 1e-6)`` first.
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

    States stay bounded where ``beta |k|^2`` is between 0 and 2, as with keys of length 1; beyond
    they grow exponentially. Differentiable in query, key, value, g, beta and initial_state, also
    through the state.

    Source: Yang et al. 2024, "Gated Delta Networks" (arXiv 2412.06464), section 3; Kimi Team 2025,
    "Kimi Linear" (arXiv 2510.26692), section 3.
    """
    return get_default_executor()(GatedDeltaRule.shared(), **flatten(locals()))


class GatedDeltaRule(Operation[GatedDeltaRuleConfig]):
    spec = calls.GatedDeltaRule
    function = staticmethod(gated_delta_rule)
    aliases = ("gated_delta_net", "kimi_delta_attention")
