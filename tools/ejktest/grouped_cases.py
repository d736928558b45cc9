"""Grouped products of awkward groups at real tile sizes, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.oracles import grouped as oracle

ROWS, MATRICES = 385, 6
# sizes, group offset, whether something is added to the product
SIZES: dict[str, tuple[list[int], int | None, bool]] = {
    "around a tile": ([0, 1, 127, 128, 129, 0], None, False),
    "one group": ([0, 385, 0, 0, 0, 0], None, False),
    "more than there are": ([40, 1, 2, 300, 129, 2**31 - 1], None, True),
    "none": ([0, 0, 0, 0, 0, 0], None, False),
    "some of eight": ([60, 70, 65, 1, 63, 64, 20, 9], 2, True),
}
# inner, columns, dtype, relative error of the norm: tf32 products for float32
KINDS: dict[str, tuple[int, int, str, float]] = {
    "bfloat16": (192, 264, "bfloat16", 6e-3),
    "odd bfloat16": (90, 130, "bfloat16", 6e-3),
    "float16": (128, 64, "float16", 1e-3),
    "float32": (96, 72, "float32", 1e-3),
    "odd float32": (33, 41, "float32", 1e-3),
}


def errors(
    fn: Callable[..., Any], sizes_name: str, kind: str, transposed: bool, **options: Any
) -> dict[str, float]:
    """Relative errors of the product and its gradients; inf where one is not finite.

    Rows behind the groups hold NaN in lhs and infinity in the cotangent.
    """
    sizes, offset, added = SIZES[sizes_name]
    inner, columns, dtype, _ = KINDS[kind]
    rng = np.random.default_rng(0)
    shape = (columns, inner) if transposed else (inner, columns)
    lhs, dout, existing = (rng.standard_normal((ROWS, n)) for n in (inner, columns, columns))
    lhs[sum(sizes) :], dout[sum(sizes) :] = np.nan, np.inf
    rhs = rng.standard_normal((MATRICES, *shape))
    lhs, rhs, dout = (jnp.asarray(x, dtype) for x in (lhs, rhs, dout))
    add = jnp.asarray(existing, "float32") if added else None
    group_sizes = jnp.asarray(sizes, jnp.int32)

    def run(lhs, rhs):
        return fn(lhs, rhs, group_sizes, offset, add, transpose_rhs=transposed, **options)

    out, back = jax.vjp(run, lhs, rhs)
    dlhs, drhs = back(dout)
    want = oracle.grouped_matmul(
        lhs, rhs, sizes, offset, add, transpose_rhs=transposed, dout=dout
    )  # fmt: skip
    found = {}
    for name, got in (("out", out), ("dlhs", dlhs), ("drhs", drhs)):
        exact = getattr(want, name)
        miss = np.linalg.norm(np.asarray(got).astype(np.float64) - exact)
        miss /= np.linalg.norm(exact) or 1.0
        found[name] = float(miss) if np.isfinite(miss) else np.inf
    return found
