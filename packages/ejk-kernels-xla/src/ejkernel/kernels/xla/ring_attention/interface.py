"""The public function: arguments to canonical form, then the differentiable core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.kernels.xla._common.blockwise import Spec
from ejkernel.kernels.xla._common.dropout import seed_words
from ejkernel.kernels.xla._common.layout import cdiv
from ejkernel.kernels.xla.flash_attention import tiles
from ejkernel.kernels.xla.ring_attention import masks
from ejkernel.kernels.xla.ring_attention.core import Plan, attend
from ejkernel.kernels.xla.ring_attention.ring import Ring, Schedule
from ejkernel.types import MaskInfo
from ejkernel.types import attention as arg

LAYOUTS = ("contiguous", "zigzag")


def _ring(axis_name: str, layout: str, q_len: int, kv_len: int) -> Ring:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: given {layout!r}, expected one of {', '.join(LAYOUTS)}")
    try:
        size = jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name: {axis_name!r} is not bound here; call inside shard_map over that axis"
        ) from None
    for name, length in (("query", q_len), ("key", kv_len)):
        if layout == "zigzag" and length % 2:
            raise arg.InvalidArgument(
                f"{name}: expected an even length for the two chunks of zigzag, got {length}"
            )
    return Ring(axis_name, size, layout == "zigzag")


def _fitted(block: int, length: int, ring: Ring) -> int:
    """A block that does not straddle the two chunks of a zigzag shard."""
    chunk = max(length // 2, 1) if ring.zigzag and ring.size > 1 else max(length, 1)
    return cdiv(chunk, cdiv(chunk, block))


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    softmax_aux: jax.Array | None = None,
    *,
    axis_name: str,
    mask_info: MaskInfo | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    causal: bool = False,
    causal_offset: int = 0,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    return_lse: bool = False,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    cfg: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """flash_attention over a sequence spread along the bound mesh axis ``axis_name``.

    Call it inside ``shard_map``. Every array is this device's shard; the result is its rows of
    flash_attention on the whole arrays, in memory linear in the local lengths.

    Args:
        query, key, value: float ``[b, q, h, d]``, ``[b, k, hk, d]``, ``[b, k, hk, dv]``.
        bias: float ``[#b, #h, #q, n * k]``: the local queries with the keys of all n devices, in
            the order of the key array.
        softmax_aux: sink logits ``[h, n]`` or ``[n]``, the same on every device; counted once.
        axis_name: the mesh axis, of any size.
        mask_info: ids and positions are those of the local tokens, positions in the whole
            sequence; a dense mask is laid out like ``bias``.
        q_segment_ids, kv_segment_ids: int ``[#b, q]``, ``[#b, k]``; kv defaults to q.
        causal, causal_offset, sliding_window, logits_soft_cap, softmax_scale, dropout_prob,
        dropout_seed, return_lse, precision, logits_dtype, cfg: as in flash_attention, with
            indices in the whole sequence.
        layout: "contiguous": device r holds block r of n. "zigzag": chunks r and 2n - 1 - r of 2n.

    Returns:
        o ``[b, q, h, dv]`` in the query's dtype, or (o, lse) with lse ``[b, q, h]``.

    Differentiable in reverse mode in query, key, value, bias and softmax_aux, through o and lse.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value, or
        ``axis_name`` is not bound.

    Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889).
    """
    q, k, v = arg.query_key_value(query, key, value)
    (_, q_len, h, d), kv_len = q.shape, k.shape[1]
    ring = _ring(axis_name, layout, q_len, kv_len)
    groups = h // max(k.shape[2], 1)

    def spec(name: str) -> dict[str, int]:
        block_q, block_kv = tiles.blocks(cfg, name, groups, d)
        return {
            "block_q": _fitted(block_q, q_len, ring),
            "block_kv": _fitted(block_kv, kv_len, ring),
        }

    fwd = Spec(
        scale=arg.scale_of(softmax_scale, d),
        soft_cap=arg.soft_cap_of(logits_soft_cap),
        dropout_prob=arg.probability(dropout_prob),
        precision=tuple(precision) if isinstance(precision, list) else precision,
        logits_dtype=jnp.dtype(logits_dtype),
        **spec("fwd_params"),
    )
    if q_segment_ids is None and kv_segment_ids is not None:
        raise ValueError("kv_segment_ids: given without q_segment_ids, expected both or neither")
    # a MaskInfo without arrays checks the rule's values
    rule = MaskInfo(causal=causal, causal_offset=causal_offset, sliding_window=sliding_window).rule
    parts = masks.parts_of(mask_info, rule, q_segment_ids, kv_segment_ids)
    masks.check_keys(parts, ring.size * kv_len)
    schedule = Schedule.of(ring, masks.index_rules(parts), q_len, kv_len)
    plan = Plan(ring, schedule, fwd, replace(fwd, **spec("bwd_params")))
    all_keys: Any = jax.ShapeDtypeStruct((k.shape[0], ring.size * kv_len), k.dtype)
    bias, sinks = arg.bias_array(bias, q, all_keys), arg.sink_array(softmax_aux, h)
    seed = seed_words(dropout_seed) if fwd.dropout_prob > 0.0 else None
    o, lse = attend(plan, q, k, v, bias, sinks, parts, seed)
    return (o, lse) if return_lse else o
