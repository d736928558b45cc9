"""The cuDNN call under the signatures of the operations it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla.cudnn.core import attend
from ejkernel.kernels.xla.cudnn.support import mask_of, pattern_of, reason_against
from ejkernel.ops import KernelNotSupported
from ejkernel.types import MaskInfo
from ejkernel.types import attention as arg


def _call(algorithm: str, arguments: Mapping[str, Any]) -> jax.Array:
    q, k, v = arg.query_key_value(*(arguments[n] for n in ("query", "key", "value")))
    arguments = {**arguments, "query": q, "key": k, "value": v}
    reason = reason_against(arguments)
    if reason is not None:
        name = reason.partition(":")[0]
        raise KernelNotSupported(
            algorithm=algorithm, platform="cuda", argument=name, reason=reason, nearest="xla"
        )
    pattern = pattern_of(mask_of(arguments), q.shape[1], k.shape[1])
    assert not isinstance(pattern, str)
    return attend(pattern, arg.scale_of(arguments.get("softmax_scale"), q.shape[3]), q, k, v)


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: jax.Array | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``ejkernel.kernels.xla.flash_attention`` on cuDNN, where ``support.supports`` allows it.

    float16 or bfloat16, head_dim a multiple of 8, no mask or causal from the top left, with a left
    window if wanted. Raises KernelNotSupported, naming the argument, for everything else.
    """
    return _call("flash_attention", dict(locals()))


def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    cum_seqlens_q: jax.Array | None = None,
    cum_seqlens_k: jax.Array | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: jax.Array | None = None,
    init_bias: Callable[[], jax.Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    cfg: Any = None,
) -> jax.Array:
    """As ``flash_attention`` above, with fewer options."""
    return _call("scaled_dot_product_attention", dict(locals()))
