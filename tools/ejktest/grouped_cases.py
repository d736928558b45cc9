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


def operands(sizes_name: str, kind: str, transposed: bool) -> tuple[jax.Array, ...]:
    """lhs, rhs and the cotangent; rows behind the groups hold NaN and infinity."""
    used = sum(SIZES[sizes_name][0])
    inner, columns, dtype, _ = KINDS[kind]
    rng = np.random.default_rng(0)
    lhs, dout = (rng.standard_normal((ROWS, n)) for n in (inner, columns))
    lhs[used:], dout[used:] = np.nan, np.inf
    rhs = rng.standard_normal(
        (MATRICES, columns, inner) if transposed else (MATRICES, inner, columns)
    )
    return tuple(jnp.asarray(x, dtype) for x in (lhs, rhs, dout))


def _added(sizes_name: str, kind: str) -> Any:
    shape = (ROWS, KINDS[kind][1])
    return np.random.default_rng(1).standard_normal(shape, np.float32) * SIZES[sizes_name][2]


def pull(fn: Callable[..., Any], sizes_name: str, kind: str, transposed: bool, **options: Any):
    """A jitted function of ``operands``: the product and the gradients of lhs and rhs."""
    sizes, offset, added = SIZES[sizes_name]

    @jax.jit
    def run(lhs, rhs, dout, sizes, add):
        def product(lhs, rhs):
            existing = add if added else None
            return fn(lhs, rhs, sizes, offset, existing, transpose_rhs=transposed, **options)

        out, back = jax.vjp(product, lhs, rhs)
        return out, *back(dout)

    group_sizes, add = np.asarray(sizes, np.int32), _added(sizes_name, kind)
    return run, (*operands(sizes_name, kind, transposed), group_sizes, add)


def errors(
    fn: Callable[..., Any], sizes_name: str, kind: str, transposed: bool, **options: Any
) -> dict[str, float]:
    """Relative errors of the product and its gradients; inf where one is not finite."""
    run, arrays = pull(fn, sizes_name, kind, transposed, **options)
    sizes, offset, _ = SIZES[sizes_name]
    lhs, rhs, dout, _, add = arrays
    want = oracle.grouped_matmul(
        lhs, rhs, sizes, offset, add, transpose_rhs=transposed, dout=dout
    )  # fmt: skip
    found = {}
    for name, got in zip(("out", "dlhs", "drhs"), run(*arrays), strict=True):
        exact = getattr(want, name)
        miss = np.linalg.norm(np.asarray(got).astype(np.float64) - exact)
        miss /= np.linalg.norm(exact) or 1.0
        found[name] = float(miss) if np.isfinite(miss) else np.inf
    return found


def _lower(sizes_name: str, kind: str, transposed: bool, target: Any) -> None:
    from ejkernel.kernels.triton.grouped_matmul import grouped_matmul
    from ejktest.ahead import lower

    run, arrays = pull(grouped_matmul, sizes_name, kind, transposed)
    lower(run, target, *arrays)


def compile_ahead(target: Any) -> None:
    """The Triton kernels of every case, by processes side by side, into the disk cache."""
    from ejktest.ahead import in_parallel

    in_parallel((_lower, *case, target) for case in CASES)


CASES = [
    (sizes, kind, transposed) for kind in KINDS for sizes in SIZES for transposed in (False, True)
]
