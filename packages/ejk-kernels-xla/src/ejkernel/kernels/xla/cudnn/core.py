"""cuDNN's forward pass, and a backward pass whose results repeat bit by bit.

cuDNN's own backward pass adds up dq with atomics unless XLA is started with
``XLA_FLAGS=--xla_gpu_exclude_nondeterministic_ops=true`` (or ``--xla_gpu_deterministic_ops=true``).
With such a flag it is used (H200, bf16, [2, 8192, 16, 128], causal: 5.4 ms for both passes);
without, the blockwise XLA backward runs, slower but repeatable. Its row normalisers are computed
again, because ``jax.nn`` hands cuDNN's out rounded to the output dtype.
"""

from __future__ import annotations

import os
import re
from functools import partial

import jax

from ejkernel.kernels.xla._common import blockwise
from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla.cudnn.support import Pattern
from ejkernel.kernels.xla.flash_attention.tiles import GPU_BLOCK
from ejkernel.types import MaskInfo, prepare_mask
from ejkernel.types.attention.rows import finalize_rows
from ejkernel.types.attention.softmax import name_output

_FLAG = re.compile(
    r"--xla_gpu_(exclude_nondeterministic|deterministic)_ops(=(true|1|t|yes|y))?(\s|$)", re.I
)


def _cudnn(pattern: Pattern, scale: float, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    o = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=pattern.causal,
        local_window_size=None if pattern.left is None else (pattern.left, 0),
        implementation="cudnn",
    )
    return name_output(o)


def is_backward_deterministic(q_len: int, kv_len: int) -> bool:
    """Returns whether cuDNN's backward pass takes these lengths and XLA_FLAGS make it repeat."""
    even = q_len % 2 == 0 and kv_len % 2 == 0
    return even and _FLAG.search(os.environ.get("XLA_FLAGS", "")) is not None


def attend(pattern: Pattern, scale: float, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """o ``[b, q, h, d]`` for a call that ``support.reason_against`` admits."""
    if is_backward_deterministic(q.shape[1], k.shape[1]):
        return _cudnn(pattern, scale, q, k, v)
    return _with_blockwise_backward(pattern, scale, q, k, v)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_blockwise_backward(pattern: Pattern, scale: float, q, k, v):
    return _cudnn(pattern, scale, q, k, v)


def _forward(pattern: Pattern, scale: float, q, k, v):
    o = _cudnn(pattern, scale, q, k, v)
    return o, (q, k, v, o)


def _backward(pattern: Pattern, scale: float, residuals, do):
    q, k, v, o = residuals
    spec = Spec(scale=scale, block_q=GPU_BLOCK, block_kv=GPU_BLOCK)
    layout = spec.layout(q, k)
    window = None if pattern.left is None else (pattern.left, 0)
    mask = prepare_mask(
        MaskInfo(causal=pattern.causal, sliding_window=window),
        q_len=layout.q_len,
        kv_len=layout.kv_len,
        block_q=layout.block_q,
        block_kv=layout.block_kv,
    )
    none, rows = blockwise.forward(spec, q, k, v[..., :0], mask=mask)
    _, _, row_scales = finalize_rows(none, rows, None, spec.unit(None))
    delta = blockwise.row_delta(o, do, None, rows.m.dtype)
    grads = blockwise.backward(spec, q, k, v, mask=mask, row_scales=row_scales, delta=delta, do=do)
    return tuple(g.astype(x.dtype) for g, x in zip(grads[:3], (q, k, v), strict=True))


_with_blockwise_backward.defvjp(_forward, _backward)
