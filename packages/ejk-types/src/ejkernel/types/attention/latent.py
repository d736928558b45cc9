"""Keys and values of latent attention, expanded from one row per token, and the way back.

    k_nope = c w_kc,  v = c w_vc,  k = [k_nope, b_k],  q = [query, b_q]          (those given)
    dc = dk_nope w_kc^T + dv w_vc^T,  dw_kc = c^T dk_nope,  dw_vc = c^T dv

``mixins.FromLatent`` makes a kernel of flash attention one of latent attention. It keeps the latent
rows for the gradient: the backward pass expands them again, which costs a matmul of
``2 * k * r * hk * (dn + dv)`` operations, and no expanded array lives from one pass to the other.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.types.arrays import result_dtype
from ejkernel.types.masks.hidden import clear_unless, seen_keys

Arrays = dict[str, Any]
LATENT = ("query", "key_value", "w_kc", "w_vc", "b_q", "b_k")


def contract_wide(form: str, a: jax.Array, b: jax.Array, precision: Any = None) -> jax.Array:
    """Returns an einsum in the common dtype of its operands, accumulated in float32 or float64."""
    dtype = result_dtype(a, b)
    return jnp.einsum(
        form, a.astype(dtype), b.astype(dtype),
        preferred_element_type=result_dtype(dtype, jnp.float32), precision=precision,
    )  # fmt: skip


def _sum_heads(x: jax.Array) -> jax.Array:
    return jnp.sum(x, 2, dtype=result_dtype(x.dtype, jnp.float32))


class RowProducts(NamedTuple):
    """Matmuls and sums of rows, in float32 at least; einsums, unless said otherwise.

    Attributes:
        expand: ``[b, k, hk, n]`` of ``[b, k, r]`` and a weight ``[r, hk, n]``.
        contract: ``[b, k, r]`` of ``[b, k, hk, n]`` and that weight.
        sum_heads: ``[b, k, n]`` of ``[b, k, h, n]``.
    """

    expand: Callable[..., jax.Array] = partial(contract_wide, "bkr,rhn->bkhn")
    contract: Callable[..., jax.Array] = partial(contract_wide, "bkhn,rhn->bkr")
    sum_heads: Callable[[jax.Array], jax.Array] = _sum_heads


EINSUMS = RowProducts()


def _repeat_rotary(rotary: jax.Array, heads: int, like: jax.Array) -> jax.Array:
    """Returns a rotary part ``[b, s, dr]`` for every head, ``[b, s, heads, dr]``."""
    b, s, dr = rotary.shape
    return jnp.broadcast_to(rotary[:, :, None], (b, s, heads, dr)).astype(like.dtype)


def drop_masked_rows(arrays: Mapping[str, Any], mask: Any) -> Arrays:
    """Returns the arrays with zeros in rows that no query sees.

    Such rows may hold NaN, which a matmul would carry to the gradients of the weights.
    """
    seen = seen_keys(mask.terms, arrays["query"].shape[1], arrays["key_value"].shape[1])
    rows = [name for name in ("key_value", "b_k") if arrays.get(name) is not None]
    values = clear_unless(seen, *(arrays[name] for name in rows))
    return {**arrays, **dict(zip(rows, values, strict=True))}


def expand_rows(
    arrays: Mapping[str, Any], precision: Any = None, rows: RowProducts = EINSUMS
) -> tuple[jax.Array, ...]:
    """Returns q ``[b, q, h, dn + dr]``, k ``[b, k, hk, dn + dr]``, v ``[b, k, hk, dv]``."""
    q, latent, w_kc, w_vc = (arrays[name] for name in LATENT[:4])
    b_q, b_k = arrays.get("b_q"), arrays.get("b_k")
    k, v = (
        rows.expand(latent, weight, precision).astype(result_dtype(latent, weight))
        for weight in (w_kc, w_vc)
    )
    if b_k is not None:
        k = jnp.concatenate([k, _repeat_rotary(b_k, w_kc.shape[1], k)], -1)
    if b_q is not None:
        q = jnp.concatenate([q, _repeat_rotary(b_q, q.shape[2], q)], -1)
    return q, k, v


def latent_gradients(
    arrays: Mapping[str, Any],
    dq: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
    rows: RowProducts = EINSUMS,
) -> dict[str, jax.Array]:
    """Returns the gradients of the arrays that ``expand_rows`` read, in float32 at least."""
    latent, w_kc, w_vc = (arrays[name] for name in LATENT[1:4])
    nope = w_kc.shape[2]
    dk_nope = dk[..., :nope]
    by_name = {
        "query": dq,
        "key_value": rows.contract(dk_nope, w_kc) + rows.contract(dv, w_vc),
        "w_kc": contract_wide("bkr,bkhn->rhn", latent, dk_nope),
        "w_vc": contract_wide("bkr,bkhn->rhn", latent, dv),
    }
    if "b_k" in arrays:
        by_name["b_k"] = rows.sum_heads(dk[..., nope:])
    if "b_q" in arrays:
        by_name["query"], by_name["b_q"] = dq[..., :nope], rows.sum_heads(dq[..., nope:])
    return by_name
