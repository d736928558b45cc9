"""The public function: arguments to canonical form, then the differentiable core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.dropout import seed_words
from ejkernel.kernels.xla._common.layout import cdiv
from ejkernel.kernels.xla.blocksparse_attention import tiles
from ejkernel.kernels.xla.blocksparse_attention.core import Plan, attend
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types import attention as arg


def _pattern(
    block_mask: Any,
    mask_builder: Callable[[int, int, int], Any] | None,
    q: jax.Array,
    k: jax.Array,
    blocks: tuple[int, int],
) -> jax.Array | None:
    """bool ``[#b, #h, nq, nk]`` or None."""
    for name, size in zip(("q_block_size", "kv_block_size"), blocks, strict=True):
        if size < 1:
            raise ValueError(f"{name}: given {size}, expected an integer >= 1")
    if mask_builder is not None:
        if block_mask is not None:
            raise ValueError("mask_builder: given together with block_mask, expected one of them")
        block_mask = mask_builder(q.shape[1], k.shape[1], q.shape[2])
    if block_mask is None:
        return None
    counts = [cdiv(x.shape[1], size) for x, size in zip((q, k), blocks, strict=True)]
    expected = "bool[{} or 1, {} or 1, {}, {}]".format(q.shape[0], q.shape[2], *counts)
    if not hasattr(block_mask, "shape") or block_mask.ndim not in (2, 4):
        raise arg.invalid("block_mask", f"{expected} or bool[{counts[0]}, {counts[1]}]", block_mask)
    pattern = jnp.asarray(block_mask)
    if pattern.ndim == 2:
        pattern = pattern[None, None]
    sizes = ((1, q.shape[0]), (1, q.shape[2]), counts[:1], counts[1:])
    if pattern.dtype != jnp.bool_ or any(
        n not in legal for n, legal in zip(pattern.shape, sizes, strict=True)
    ):
        raise arg.invalid("block_mask", expected, block_mask)
    return pattern


def blocksparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    softmax_aux: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    block_mask: jax.Array | None = None,
    mask_builder: Callable[[int, int, int], jax.Array] | None = None,
    q_block_size: int = 128,
    kv_block_size: int = 128,
    mask_info: MaskInfo | None = None,
    attention_mask: jax.Array | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    return_lse: bool = False,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """flash_attention with one more constraint: key j is visible from query i only if
    ``block_mask[.., i // q_block_size, j // kv_block_size]``.

    Tiles without a visible pair are skipped, forward and backward, by each batch row and
    key/value head on its own.

    Args:
        query, key, value: float ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``.
        softmax_aux: sink logits ``[h, n]`` or ``[n]``.
        bias: float ``[#b, #h, #q, k]``.
        block_mask: bool ``[#b, #h, nq, nk]`` or ``[nq, nk]`` with nq = ceil(q / q_block_size) and
            nk = ceil(k / kv_block_size); may be traced; None allows all blocks.
        mask_builder: ``mask_builder(q, k, h)`` returns such an array instead.
        q_block_size, kv_block_size: lengths of the blocks, any at least 1.
        chunk_size: ``i + causal_offset`` and j must lie in the same chunk of this length.
        mask_info, attention_mask, causal, causal_offset, sliding_window, logits_soft_cap,
        softmax_scale, dropout_prob, dropout_seed, return_lse: as in flash_attention.
        cfg: its ``fwd_params`` and ``bwd_params`` may give ``q_blocksize`` and ``kv_blocksize``,
            the tiles; by default they are fitted to the blocks.

    Returns:
        o ``[b, q, h, dv]`` in the query's dtype, or (o, lse) with lse ``[b, q, h]``.

    Differentiable in reverse mode in query, key, value, softmax_aux and bias, through o and lse.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value, or
        both ``block_mask`` and ``mask_builder``.

    Source: Dao et al. 2022, FlashAttention (arXiv 2205.14135), section 3.3.
    """
    q, k, v = arg.query_key_value(query, key, value)
    sizes = (q_block_size, kv_block_size)
    pattern = _pattern(block_mask, mask_builder, q, k, sizes)
    axes = ((q_block_size, q.shape[1]), (kv_block_size, k.shape[1]))
    block_q, block_kv = tiles.tile_sizes(cfg, "fwd_params", *axes)
    fwd = Spec(
        scale=arg.scale_of(softmax_scale, q.shape[3]),
        block_q=block_q,
        block_kv=block_kv,
        soft_cap=arg.soft_cap_of(logits_soft_cap),
        dropout_prob=arg.probability(dropout_prob),
    )
    block_q, block_kv = tiles.tile_sizes(cfg, "bwd_params", *axes)
    bwd = replace(fwd, block_q=block_q, block_kv=block_kv)
    mask = combine_masks(
        mask_info,
        attention_mask=attention_mask,
        causal=causal,
        causal_offset=causal_offset,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        q_len=q.shape[1],
        kv_len=k.shape[1],
        batch=q.shape[0],
        heads=q.shape[2],
    )
    seed = seed_words(dropout_seed) if fwd.dropout_prob > 0.0 else None
    bias, sinks = arg.bias_array(bias, q, k), arg.sink_array(softmax_aux, q.shape[2])
    plan = Plan(fwd, bwd, q_block_size, kv_block_size)
    o, lse = attend(plan, q, k, v, bias, sinks, mask, pattern, seed)
    return (o, lse) if return_lse else o
