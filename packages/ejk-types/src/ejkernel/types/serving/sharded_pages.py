"""A cache whose pages are spread over devices: the part of a call that each device computes.

Device r of n has the pages ``[r * P / n, (r + 1) * P / n)``, and block tables hold global ids. The
pages of a sequence that a device has, in their order, are a shorter sequence: without a window a
row sees all keys before its own position, so their places do not matter, only how many of them it
sees. Each row is a sequence of its own here, as rows of one sequence may differ in that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def local_rows(
    tables: Any, sequence: Any, visible: Any, first: Any, sizes: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array]:
    """Returns the local table ``[rows, columns]`` of each row, and the keys that it sees there.

    Args:
        tables: ``[n, columns]`` global page ids.
        sequence: ``[rows]``, the row of ``tables`` of each query row.
        visible: ``[rows]``, the keys that each row sees in all pages: those before it.
        first: global id of this device's first page.
        sizes: pages of this device, pages of all devices, tokens of a page.
    """
    pages, total, page_size = sizes
    columns = tables.shape[1]
    local = jnp.clip(tables, 0, total - 1) - first
    is_local = (local >= 0) & (local < pages)
    # this device's pages first, in their order; a scatter is one launch, a sort is many
    column = jnp.cumsum(is_local, axis=1, dtype=jnp.int32) - 1
    row = jnp.arange(tables.shape[0], dtype=jnp.int32)[:, None]
    column = jnp.where(is_local, column, columns)
    local = jnp.zeros_like(local).at[row, column].set(local, mode="drop")

    visible = jnp.clip(visible, 0, columns * page_size)
    used = jnp.arange(columns, dtype=jnp.int32)[None] * page_size < visible[:, None]
    is_local = is_local[sequence]
    count = jnp.sum(used & is_local, axis=1, dtype=jnp.int32) * page_size
    last = jnp.maximum(visible - 1, 0) // page_size  # only this page may be partly visible
    has_last = jnp.take_along_axis(is_local, last[:, None], axis=1)[:, 0] & (visible > 0)
    hidden = jnp.where(has_last, (last + 1) * page_size - visible, 0)
    return local[sequence], (count - hidden).astype(jnp.int32)
