"""Linear attention whose decay depends on head and layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules._configs import LightningAttentionConfig
from ejkernel.modules._op import Arguments, Operation, flatten
from ejkernel.modules.operations.gla_attention import GLAttention
from ejkernel.ops import KernelNotFound, KernelNotSupported, Platform, abstractify
from ejkernel.ops.core.invocation import BoundCall
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.ops.implementation import Resolved
from ejkernel.types import calls
from ejkernel.types.calls.linear import LayerOfShard
from ejkernel.types.calls.words import Array, F, I


def lightning_attention(
    query: F[Array, "batch seq heads key_dim"],
    key: F[Array, "batch seq kv_heads key_dim"],
    value: F[Array, "batch seq kv_heads v_dim"],
    initial_state: F[Array, "states heads key_dim v_dim"] | None = None,
    cu_seqlens: I[Array, " sequences_plus_1"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: str | Platform | None = None,
    cfg: LightningAttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Linear attention with a fixed decay per head, which the layer's index sets.

    :func:`gla_attention` with ``g_gamma[m] = -(8 / heads) * w * m`` for head m, where
    ``w = 1 - layer_idx / num_layers``: later layers forget less::

        H = exp(g_gamma) * H + outer(k_t, v_t)
        o_t = (softmax_scale * q_t) @ H

    Args:
        query: ``[batch, seq, heads, key_dim]``.
        key: ``[batch, seq, kv_heads, key_dim]``; query head i reads head
            ``i // (heads // kv_heads)`` of keys and values.
        value: ``[batch, seq, kv_heads, v_dim]``.
        layer_idx: ``0 <= layer_idx < num_layers``.
        num_layers: layers of the model, >= 1.
        initial_state, cu_seqlens, softmax_scale, reverse, return_state: as in
            :func:`recurrent_attention`.
        platform, cfg, mesh, in_specs, out_specs: as in :func:`flash_attention`.

    Returns:
        ``[batch, seq, heads, v_dim]`` in the query's dtype; with ``return_state`` also the final
        state, as in :func:`recurrent_attention`.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: ``layer_idx`` outside [0, num_layers).
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value and initial_state, also through the state.

    Source: Qin et al. 2024, "Lightning Attention-2" (arXiv 2401.04658), section 3.
    """
    return get_default_executor()(LightningAttention.shared(), **flatten(locals()))


class LightningAttention(Operation[LightningAttentionConfig]):
    spec = calls.LightningAttention
    function = staticmethod(lightning_attention)

    @staticmethod
    def to_shard(a: Arguments, shard: Any) -> None:
        if shard.parts("heads") > 1:
            first = shard.offset("heads")
            a["layer_idx"] = LayerOfShard.create(a["layer_idx"], shard.sizes["heads"], first)

    def runner(self, resolved: Resolved, cfg: Any) -> Callable[..., Any]:
        usual = super().runner(resolved, cfg)

        def run(**kwargs: Any) -> Any:
            if isinstance(kwargs["layer_idx"], LayerOfShard):
                return self._of_shard(resolved, kwargs, cfg)
            return usual(**kwargs)

        return run

    def _of_shard(self, resolved: Resolved, kwargs: Arguments, cfg: Any) -> Any:
        # the decays of a part of the heads are no lightning decays, but gla takes any
        arguments = {n: x for n, x in kwargs.items() if n not in ("layer_idx", "num_layers")}
        arguments["g_gamma"] = calls.LightningAttention.log_decays(kwargs)
        gla = GLAttention.shared()
        call = BoundCall(gla, (), abstractify(arguments))
        try:
            implementation = self.registry.resolve(gla.name, resolved.platform, inv=call)
        except (KernelNotSupported, KernelNotFound):
            implementation = self.registry.resolve(gla.name, inv=call)
        return implementation.fn(**arguments, cfg=cfg)
