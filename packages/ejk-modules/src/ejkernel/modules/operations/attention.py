"""Plain attention that also returns its weights: the public function and its Kernel class."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ejkernel.modules._configs import AttentionConfig
from ejkernel.modules._op import Operation, flatten
from ejkernel.ops import Platform
from ejkernel.ops.execution.executor import get_default_executor
from ejkernel.types import MaskInfo, calls
from ejkernel.types.calls.words import Array, AttentionMask, F


def attention(
    query: F[Array, "batch q_len heads head_dim"],
    key: F[Array, "batch kv_len kv_heads head_dim"],
    value: F[Array, "batch kv_len kv_heads v_dim"],
    bias: F[Array, "#batch #heads #q_len kv_len"] | None = None,
    dropout_rng: jax.Array | None = None,
    softmax_aux: F[Array, "heads sinks"] | F[Array, " sinks"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: AttentionMask | None = None,
    init_bias: Callable[[], Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: DTypeLike | None = None,
    softmax_dtype: DTypeLike | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    precision: jax.lax.PrecisionLike = None,
    platform: str | Platform | None = None,
    cfg: AttentionConfig | Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    in_specs: Sequence[PartitionSpec | None] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    **unknown: Never,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention in O(q_len * kv_len) memory, returning the weights too.

    It computes :func:`flash_attention`'s result; ``weights[i,j]`` is the probability as it was
    multiplied with ``v[j]``, after dropout. Use it to look at attention, not to train with it.

    Args:
        query, key, value, bias, softmax_aux: as in :func:`flash_attention`.
        mask_info, attention_mask: as in :func:`flash_attention`.
        causal, causal_offset, sliding_window: as in :func:`flash_attention`.
        softmax_scale, logits_soft_cap, precision, platform, cfg: as in :func:`flash_attention`.
        mesh, in_specs, out_specs: as in :func:`flash_attention`.
        dropout_rng: a PRNG key (typed or raw), required while dropout is active; the seed is
            ``jax.random.bits(dropout_rng, (), "uint32")``.
        init_bias: called without arguments to make the bias when ``bias`` is None.
        deterministic: True switches dropout off.
        dtype: query, key and value are cast to it and both results have it; None: the query's.
        softmax_dtype: a lower bound for the softmax's dtype; never below float32.
        dropout_prob: in [0, 1); active iff ``not deterministic`` and above 0.

    Returns:
        ``(out [batch, q_len, heads, v_dim], weights [batch, heads, q_len, kv_len])``.

    Raises:
        InvalidArgument: wrong dtype, rank, axis size or inconsistent axes.
        ValueError: a value out of range, or active dropout without ``dropout_rng``.
        KernelNotSupported: the forced platform cannot do this call.
        ConfigError: an illegal ``cfg``.

    Differentiable in query, key, value, bias and softmax_aux, to any order and in forward mode on
    platform "xla".

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1.
    """
    return get_default_executor()(Attention.shared(), **flatten(locals()))


class Attention(Operation[AttentionConfig]):
    spec = calls.Attention
    function = staticmethod(attention)
