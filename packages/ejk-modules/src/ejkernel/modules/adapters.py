"""flash_attention inside the attention layers of Flax and Equinox; neither library is imported.

An option of a layer that flash attention does not have is an error here, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ejkernel.modules.operations.flash_attention import flash_attention


# Linen hands over only what the signature names, so everything that it may ask for is named.
def flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    **options: Any,
) -> jax.Array:
    """:func:`flash_attention` as the ``attention_fn`` of Flax's attention layers.

    For ``flax.linen.MultiHeadDotProductAttention`` and ``flax.nnx.MultiHeadAttention``, decoding
    with their cache included. More of flash_attention's arguments are given with
    ``functools.partial(flax_attention, sliding_window=256)``.

    Args:
        query, key, value: ``[..., length, heads, head_dim]``, any number of batch axes.
        bias, mask: broadcast to ``[..., heads, q_len, kv_len]``; nonzero in the mask = visible.
            A row that sees no key gives 0 (Flax's own function gives a mean of hidden values).
        broadcast_dropout: must be False where dropout is active: every batch row and head draws
            its own.
        dropout_rng, dropout_rate, deterministic: as in Flax; the key gives ``dropout_seed``.
        dtype: inputs are cast to it; None = their common dtype.
        precision: of the matmuls, as in ``jax.lax.dot``.
        module: must be None: there are no weights to sow (``sow_weights=False``).
        force_fp32_for_softmax: the softmax is always computed in float32 or better.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum, promote_dtype:
            must be None.
        is_causal: ``j <= i``.
        **options: more arguments of :func:`flash_attention`.

    Returns:
        ``[..., q_len, heads, v_dim]``.

    Raises:
        ValueError: an option that flash attention does not have.
    """
    _check_unused(
        module,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        promote_dtype=promote_dtype,
    )
    if dropout_rate and not deterministic:
        if broadcast_dropout:
            raise ValueError(
                "broadcast_dropout: given True, but dropout differs between batch rows and heads "
                "here; make the layer with broadcast_dropout=False"
            )
        options.update(dropout_prob=float(dropout_rate), dropout_seed=_seed(dropout_rng))
    wide = jnp.dtype(dtype) if dtype is not None else jnp.result_type(query, key, value)
    batch, heads = query.shape[:-3], query.shape[-2]
    lengths = (query.shape[-3], key.shape[-3])
    if mask is not None:
        options["attention_mask"] = _scores_of(
            "mask", jnp.asarray(mask).astype(bool), batch, heads, lengths
        )
    if bias is not None:
        options["bias"] = _scores_of("bias", jnp.asarray(bias), batch, heads, lengths)
    if is_causal:
        options["causal"] = True
    q, k, v = (x.astype(wide).reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    out = flash_attention(q, k, v, precision=precision, **options)
    return out.reshape(*batch, *out.shape[1:])


def _check_unused(module: Any, **functions: Callable[..., Any] | None) -> None:
    """Raises ValueError for options of Flax's layers that flash attention does not have."""
    for name, function in functions.items():
        if function is not None:
            raise ValueError(f"{name}: given {function!r}, flash attention replaces the products")
    if module is not None:
        raise ValueError(
            "module: flash attention has no weights to sow; call the layer with sow_weights=False"
        )


def equinox_attention(
    layer: Any,
    query: jax.Array,
    key_: jax.Array,
    value: jax.Array,
    mask: ArrayLike | None = None,
    *,
    key: jax.Array | None = None,
    inference: bool | None = None,
    process_heads: Callable[..., Any] | None = None,
    **options: Any,
) -> jax.Array:
    """Computes ``layer(query, key_, value, mask, ...)`` by :func:`flash_attention`.

    Args:
        layer: an ``equinox.nn.MultiheadAttention``.
        query, key_, value: ``[length, features]``; map a batch with ``jax.vmap``.
        mask: ``[q_len, kv_len]`` or ``[heads, q_len, kv_len]``, nonzero = visible. A row that
            sees no key gives 0 before the output projection.
        key: PRNG key, required while dropout is active.
        inference: overrides ``layer.dropout.inference``.
        process_heads: called with the queries, keys and values by head, such as for rotary
            embeddings; returns them changed.
        **options: more arguments of :func:`flash_attention`, such as ``causal=True``.

    Returns:
        ``[q_len, output features]``.

    Raises:
        ValueError: dropout without ``key``, or a mask that does not fit.
    """
    projections = (layer.query_proj, query), (layer.key_proj, key_), (layer.value_proj, value)
    q, k, v = (
        jax.vmap(projection)(x).reshape(x.shape[0], layer.num_heads, -1)
        for projection, x in projections
    )
    if process_heads is not None:
        q, k, v = process_heads(q, k, v)
    if not (layer.dropout.inference if inference is None else inference):
        prob = float(layer.dropout.p)
        if prob:
            options.update(dropout_prob=prob, dropout_seed=_seed(key, "key"))
    if mask is not None:
        lengths = (q.shape[0], k.shape[0])
        visible = _scores_of("mask", jnp.asarray(mask) != 0, (1,), layer.num_heads, lengths)
        options["attention_mask"] = visible
    out = flash_attention(q[None], k[None], v[None], **options)
    return jax.vmap(layer.output_proj)(out.reshape(q.shape[0], -1))


def _seed(rng: jax.Array | None, name: str = "dropout_rng") -> jax.Array:
    if rng is None:
        raise ValueError(f"{name}: given None, dropout needs a PRNG key")
    return jax.random.bits(rng, (), "uint32")


def _scores_of(
    name: str, x: jax.Array, batch: tuple[int, ...], heads: int, lengths: tuple[int, int]
) -> jax.Array:
    """``x`` as ``[1 or batch, 1 or heads, q_len, kv_len]``, its batch axes as one."""
    full = (*batch, heads, *lengths)
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) != len(full) or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(f"{name}: given shape {x.shape}, expected one that broadcasts to {full}")
    rows = shape[: len(batch)]
    if any(n != 1 for n in rows):
        rows = batch
    scores = jnp.broadcast_to(x.reshape(shape), (*rows, shape[-3], *lengths))
    return scores.reshape(math.prod(rows), shape[-3], *lengths)
