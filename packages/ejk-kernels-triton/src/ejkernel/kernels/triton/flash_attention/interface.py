"""The public function: arguments to canonical form, tiles, then the differentiable core."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.triton.flash_attention import tiles
from ejkernel.kernels.triton.flash_attention.arguments import check_supported
from ejkernel.kernels.triton.flash_attention.core import Static, attend
from ejkernel.kernels.triton.flash_attention.support import problem_of
from ejkernel.kernels.triton.targets import current_target
from ejkernel.types import MaskInfo, call, softmax
from ejkernel.types import attention as arg
from ejkernel.types.arrays import result_dtype
from ejkernel.types.problem import Problem


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
    """Exact attention in memory linear in the lengths, on a GPU.

        x = softmax_scale * q k^T + bias;  x = cap * tanh(x / cap)
        lse = log(sum over visible keys of exp(x) + sum over sinks of exp(softmax_aux))
        o = drop(exp(x - lse)) v

    A key is visible if every constraint given allows it. A row that sees no key gives o = 0 and
    lse = -inf, and no gradient passes through it.

    Args:
        query, key, value: float16, bfloat16 or float32 ``[b, q, h, d]``, ``[b, k, hk, d]``,
            ``[b, k, hk, dv]``; h is a multiple of hk; d and dv are multiples of 8 up to 256.
            Differing dtypes are promoted; sums are float32.
        bias: float ``[#b, #h, #q, k]``, added to the logits.
        cum_seqlens_q, cum_seqlens_k: int ``[n + 1]``, packed sequences of one batch row; k
            defaults to q. Causal and window rules then count inside the sequences.
        softmax_aux: sink logits ``[h, n]``, or ``[n]`` for all heads.
        mask_info, attention_mask: further constraints; the array is bool or integer
            ``[#b, #h, #q, #k]``, ``[#b, q, k]`` or a key padding mask ``[#b, k]``.
        softmax_scale: static; default ``d ** -0.5``.
        dropout_prob, dropout_seed: drop probability in [0, 1); int, integer ``[]``, or ``[3]`` =
            (seed, global batch index, global head index) for one shard of a call.
        causal, causal_offset: key j is visible from query i if ``j <= i + causal_offset``.
        sliding_window: ``(left, right)`` or an int for both, around ``i + causal_offset``.
        logits_soft_cap: cap > 0.
        return_lse: also return lse float32 ``[b, q, h]``: natural log, with sinks, no dropout.
        precision: of float32 products: None tf32, "high" three tf32 products, "highest" float32.
        logits_dtype: lower bound of the accumulation dtype; float64 is not supported.
        cfg: ``fwd_params`` (q_blocksize, kv_blocksize, num_warps, num_stages) and ``bwd_params``
            (the same for the key gradients; blocksize_m and blocksize_n, with the same warps and
            stages, for the query gradient).

    Returns:
        o ``[b, q, h, dv]`` in the query's dtype, or (o, lse).

    Differentiable in reverse mode in query, key, value, bias and softmax_aux, through o and lse.
    Two runs give the same bits: nothing is summed by atomics.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value.
        Unsupported: what ``supports`` gives a reason for.

    Source: Dao 2023, FlashAttention-2, sections 3.1 and 3.2.
    """
    arguments = dict(locals())
    q, k, v = arg.query_key_value(query, key, value)
    arguments |= {"query": q, "key": k, "value": v}
    dtype = result_dtype(q, k, v)
    check_supported(q, v, dtype, logits_dtype)
    problem = problem_of(arguments)
    bias = arg.bias_of_rows(arg.bias_array(bias, q, k), q.shape[1])
    sinks = arg.sink_array(softmax_aux, q.shape[2])
    mask = call.mask_of(arguments)
    nothing = softmax.without_work(q, k, v)
    if nothing is not None:
        return nothing if return_lse else nothing[0]
    o, lse = attend(
        choose_tiles(problem, cfg),
        q.astype(dtype),
        k.astype(dtype),
        v.astype(dtype),
        bias,
        arg.sink_logit(sinks),
        mask,
        arg.seed_words(dropout_seed) if problem.dropout > 0.0 else None,
    )
    o = o.astype(query.dtype)
    return (o, lse.swapaxes(1, 2)) if return_lse else o


def choose_tiles(problem: Problem, cfg: Any) -> Static:
    """The tiles of all kernels: heuristics, then what the config says instead."""
    target = current_target()
    fwd_params, bwd_params = arg.field(cfg, "fwd_params"), arg.field(cfg, "bwd_params")
    dq, dkv = tiles.backward_tiles(problem, target)
    return Static(
        problem,
        tiles.override(tiles.forward_tiles(problem, target), fwd_params),
        tiles.override(dq, bwd_params, tiles.DQ_FIELDS),
        tiles.key_passes(problem, tiles.override(dkv, bwd_params), target),
    )
