"""Decoding and ragged attention over caches, one row at a time, in float64.

Every oracle first writes down, per query row, the dense keys and values of its sequence and then
applies the softmax formula. It is differentiable by JAX, so its gradients are float64 as well. Call
it under ``jax.enable_x64(True)``; index arrays are numpy. Where all are, only ``_attend`` is
compiled. ``return_lse=True`` gives ``(o, lse)``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def attend_row(
    q, k, v, position, *, scale, start=0, left=None, cap=None, aux=None, k_scale=None, v_scale=None,
    seen=None,
):  # fmt: skip
    """One row: q ``[h, d]``, k ``[t, hk, d]``, v ``[t, hk, dv]`` -> o ``[h, dv]``, lse ``[h]``.

    ``seen``: keys that the row sees, by default those from ``start`` to ``position`` in the window.
    """
    h = q.shape[0]
    if seen is None:
        j = np.arange(k.shape[0])
        seen = (j >= start) & (j <= position)
        if left is not None:
            seen &= j >= position - left
    if position < 0 or not seen.any():
        return np.zeros((h, v.shape[2]), q.dtype), np.full((h,), -np.inf, q.dtype)
    return _attend(q, k, v, seen, scale, cap, aux, k_scale, v_scale)


@jax.jit  # one program for all rows of a call
def _attend(q, k, v, seen, scale, cap, aux, k_scale, v_scale):
    h, hk = q.shape[0], k.shape[1]
    if k_scale is not None:
        k = k * jnp.reshape(k_scale, (1, -1, 1))
    if v_scale is not None:
        v = v * jnp.reshape(v_scale, (1, -1, 1))
    k, v = jnp.repeat(k, h // hk, 1), jnp.repeat(v, h // hk, 1)
    x = scale * jnp.einsum("hd,thd->ht", q, k)
    if cap is not None:
        x = cap * jnp.tanh(x / cap)
    x = jnp.where(seen, x, -jnp.inf)
    everything = x
    if aux is not None:
        everything = jnp.concatenate([x, jnp.broadcast_to(aux, (h, aux.shape[-1]))], 1)
    lse = jax.nn.logsumexp(everything, axis=1)
    return jnp.einsum("ht,thd->hd", jnp.exp(x - lse[:, None]), v), lse


def gather(cache, table):
    """All tokens one sequence has room for, ``[max_pages * ps, ...]``, in table order."""
    is_concrete = isinstance(table, np.ndarray)
    rows = (np if is_concrete else jnp).clip(table, 0, cache.shape[0] - 1)
    return cache[rows].reshape(-1, *cache.shape[2:])


def _stacked(rows, return_lse):
    """Rows of outputs and of lse, as arrays."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(rows))
    # numpy compiles nothing
    o, lse = ((jnp if traced else np).stack(x) for x in zip(*rows, strict=True))
    return (o, lse) if return_lse else o


def tree_row(keys, before, number, mask, positions, window):
    """Keys ``[keys]`` that row ``number`` of the new tokens sees, which follow ``before`` others.

    mask ``[new, columns]``, positions ``[new]`` or None: of one sequence, as a call gives them.
    ``before`` is negative where the first of the new tokens are not in the context.
    """
    new = mask.shape[0]
    marked = np.zeros(new, bool)
    marked[: mask.shape[1]] = mask[number, :new]
    marked[number] = True
    seen, at = np.arange(keys) < before, np.arange(keys)
    cut = max(-before, 0)
    inside = slice(before + cut, before + new)
    seen[inside] = marked[cut:]
    if window is not None:
        position = before + number
        if positions is not None:
            at[inside], position = positions[cut:], positions[number]
        distance = position - at
        seen &= (distance <= window[0]) & (distance >= -window[1])
    return seen


def page_attention(q, k_cache, v_cache, lens, tables, *, return_lse=False, **options):
    """q ``[b, h, d]`` -> ``[b, h, dv]``."""
    rows = []
    for r in range(q.shape[0]):
        n = int(min(lens[r], tables.shape[1] * k_cache.shape[1]))
        k, v = gather(k_cache, tables[r]), gather(v_cache, tables[r])
        rows.append(attend_row(q[r], k, v, n - 1, **options))
    return _stacked(rows, return_lse)


def ragged_decode_attention(q, k, v, start, end, *, return_lse=False, **options):
    """q ``[b, h, d]``, k and v ``[b, S, hk, .]`` -> ``[b, h, dv]``."""
    rows = []
    for r in range(q.shape[0]):
        lo, hi = (int(np.clip(x[r], 0, k.shape[1])) for x in (start, end))
        rows.append(attend_row(q[r], k[r], v[r], hi - 1, start=lo, **options))
    return _stacked(rows, return_lse)


def mla_decode(
    q, cache, lens, tables, latent_dim, k_scale=None, tree_mask=None, positions=None, window=None,
    **options,
):  # fmt: skip
    """q ``[b, m, h, dc]`` -> o ``[b, m, h, latent_dim]`` and lse ``[b, m, h]``.

    ``window``: both sides, for rows of a tree.
    """
    factor = 1.0 if k_scale is None else k_scale
    out, lses = [], []
    for r in range(q.shape[0]):
        n = int(min(lens[r], tables.shape[1] * cache.shape[1]))
        c = gather(cache, tables[r])[:, None] * factor
        for m in range(q.shape[1]):
            position = n - q.shape[1] + m
            if tree_mask is not None:
                at = None if positions is None else positions[r]
                tree = tree_mask[r], at, window
                options["seen"] = tree_row(c.shape[0], n - q.shape[1], m, *tree)
            o, lse = attend_row(q[r, m], c, c[..., :latent_dim], position, **options)
            out.append(o)
            lses.append(lse)
    shape = q.shape[:3]
    return jnp.stack(out).reshape(*shape, -1), jnp.stack(lses).reshape(shape)


def ragged_page_attention(
    q, pages, lens, tables, starts, count, *, return_lse=False, tree_mask=None, positions=None,
    window=None, **options,
):  # fmt: skip
    """q ``[T, h, d]``, pages ``[P, ps, 2 * hk, d]`` -> ``[T, h, d]``.

    ``window``: both sides, for rows of a tree.
    """
    padding = np.zeros(q.shape[1:], q.dtype), np.full(q.shape[1], -np.inf, q.dtype)
    rows = [padding] * q.shape[0]
    for r in range(count):
        n = int(min(lens[r], tables.shape[1] * pages.shape[1]))
        both = gather(pages, tables[r])
        length = int(starts[r + 1] - starts[r])
        for m in range(length):
            row = int(starts[r]) + m
            if tree_mask is not None:
                new = slice(int(starts[r]), int(starts[r]) + length)
                at = None if positions is None else positions[new]
                tree = tree_mask[new], at, window
                options["seen"] = tree_row(both.shape[0], n - length, m, *tree)
            rows[row] = attend_row(q[row], both[:, 0::2], both[:, 1::2], n - length + m, **options)
    return _stacked(rows, return_lse)


def write_pages(pages, keys, values, lens, tables, starts, count):
    """``pages`` with the new keys and values of every sequence in place; no scaling."""
    for r in range(count):
        length = int(starts[r + 1] - starts[r])
        for m in range(length):
            position = int(lens[r]) - length + m
            page, slot = tables[r, position // pages.shape[1]], position % pages.shape[1]
            row = int(starts[r]) + m
            pages = pages.at[page, slot, 0::2].set(keys[row])
            pages = pages.at[page, slot, 1::2].set(values[row])
    return pages
