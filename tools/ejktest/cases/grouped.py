"""Calls of grouped matmul: awkward groups against the oracle, and models at their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejktest.abstract import BF16, F32, AbstractCall, Arrays, abstract_call
from ejktest.oracles import grouped as oracle
from ejktest.tolerance import check_close

ROWS, MATRICES = 385, 6
# sizes, group offset, whether something is added to the output
SIZES: dict[str, tuple[list[int], int | None, bool]] = {
    "around a tile": ([0, 1, 127, 128, 129, 0], None, False),
    "one group": ([0, 385, 0, 0, 0, 0], None, False),
    "more than there are": ([40, 1, 2, 300, 129, 2**31 - 1], None, True),
    "none": ([0, 0, 0, 0, 0, 0], None, False),
    "some of eight": ([60, 70, 65, 1, 63, 64, 20, 9], 2, True),
}
# inner, columns, dtype, relative error of the norm: TF32 matmuls for float32
KINDS: dict[str, tuple[int, int, str, float]] = {
    "bfloat16": (192, 264, "bfloat16", 6e-3),
    "odd bfloat16": (90, 130, "bfloat16", 6e-3),
    "float16": (128, 64, "float16", 1e-3),
    "float32": (96, 72, "float32", 1e-3),
    "odd float32": (33, 41, "float32", 1e-3),
}
# for kernels that need columns in multiples of 64 and rows in multiples of 8
ALIGNED: dict[str, tuple[int, int, str, float]] = {
    "whole bfloat16": (256, 320, "bfloat16", 6e-3),
    "whole float16": (576, 256, "float16", 1e-3),
}


def _kind(name: str) -> tuple[int, int, str, float]:
    return (KINDS | ALIGNED)[name]


def operands(
    sizes_name: str, kind: str, transposed: bool, rows: int = ROWS
) -> tuple[jax.Array, ...]:
    """Returns lhs, rhs and the cotangent; rows behind the groups hold NaN and infinity."""
    used = sum(SIZES[sizes_name][0])
    inner, columns, dtype, _ = _kind(kind)
    rng = np.random.default_rng(0)
    lhs, dout = (rng.standard_normal((rows, n)) for n in (inner, columns))
    lhs[used:], dout[used:] = np.nan, np.inf
    rhs = rng.standard_normal(
        (MATRICES, columns, inner) if transposed else (MATRICES, inner, columns)
    )
    return tuple(jnp.asarray(x, dtype) for x in (lhs, rhs, dout))


def _added_to(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def _added(sizes_name: str, kind: str, rows: int) -> Any:
    return _added_to((rows, _kind(kind)[1])) * SIZES[sizes_name][2]


def case_of(
    fn: Callable[..., Any],
    sizes_name: str,
    kind: str,
    transposed: bool,
    *,
    rows: int = ROWS,
    **options: Any,
):
    """Returns a jitted function that gives the output and its gradients, and its arrays."""
    sizes, offset, added = SIZES[sizes_name]

    @jax.jit
    def run(lhs, rhs, dout, sizes, add):
        def forward(lhs, rhs):
            existing = add if added else None
            return fn(lhs, rhs, sizes, offset, existing, transpose_rhs=transposed, **options)

        out, back = jax.vjp(forward, lhs, rhs)
        return out, *back(dout)

    group_sizes, add = np.asarray(sizes, np.int32), _added(sizes_name, kind, rows)
    return run, (*operands(sizes_name, kind, transposed, rows), group_sizes, add)


def errors(
    fn: Callable[..., Any], sizes_name: str, kind: str, transposed: bool, **options: Any
) -> dict[str, float]:
    """Returns relative errors of the output and its gradients; inf where one is not finite."""
    run, arrays = case_of(fn, sizes_name, kind, transposed, **options)
    sizes, offset, _ = SIZES[sizes_name]
    lhs, rhs, dout, _, add = arrays
    want = oracle.grouped_matmul(
        lhs, rhs, sizes, offset, add, transpose_rhs=transposed, dout=dout
    )  # fmt: skip
    ratios = {}
    for name, got in zip(("out", "dlhs", "drhs"), run(*arrays), strict=True):
        exact = getattr(want, name)
        miss = np.linalg.norm(np.asarray(got).astype(np.float64) - exact)
        miss /= np.linalg.norm(exact) or 1.0
        ratios[name] = float(miss) if np.isfinite(miss) else np.inf
    return ratios


def runner(case: tuple[str, str, bool], grouped_matmul: Callable[..., Any]):
    """Returns a case of an implementation, as a jitted function of ``draw(case)``."""
    return case_of(grouped_matmul, *case)[0]


def draw(case: tuple[str, str, bool]) -> tuple[Any, ...]:
    return case_of(oracle.grouped_matmul, *case)[1]


# shape of the scales of 8-bit matrices, by the number of groups and of columns
SCALES: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "number": lambda groups, columns: (),
    "group": lambda groups, columns: (groups,),
    "column": lambda groups, columns: (groups, columns),
}


def stored(
    stored_as: str, scale: str, rows: int, matrices: tuple[int, int, int], dtype: str, used: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns lhs, 8-bit rhs ``[groups, inner, columns]`` and scales; unused rows are NaN."""
    groups, inner, columns = matrices
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((rows, inner))
    lhs[used:] = np.nan
    rhs = rng.integers(-128, 128, matrices) if stored_as == "int8" else rng.normal(0, 8, matrices)
    scales = rng.uniform(0.01, 0.1, SCALES[scale](groups, columns))
    # all by numpy: nothing is compiled for inputs
    weights = rhs.astype(jnp.dtype(stored_as))
    return jnp.asarray(lhs, dtype), jnp.asarray(weights), jnp.asarray(scales, jnp.float32)


def case_of_8_bits(
    fn: Callable[..., Any],
    stored_as: str,
    scale: str,
    sizes: Any,
    matrices: tuple[int, int, int],
    *,
    rows: int = ROWS,
    transposed: bool = False,
    dtype: str = "bfloat16",
    offset: int | None = None,
    added: bool = False,
    **options: Any,
):
    """Returns a jitted call with 8-bit matrices, its arrays, and the results in float64.

    It returns the output and the gradients of lhs and of existing_out.
    """
    lhs, rhs, scales = stored(stored_as, scale, rows, matrices, dtype, sum(sizes))
    rhs = jnp.asarray(np.asarray(rhs).swapaxes(1, 2)) if transposed else rhs
    add = _added_to((rows, matrices[2])) if added else None
    dout = np.random.default_rng(2).standard_normal((rows, matrices[2]))
    dout[sum(sizes) :] = np.inf

    @jax.jit
    def run(lhs, rhs, sizes, add, scales, dout):
        def forward(lhs, add):
            return fn(
                lhs, rhs, sizes, offset, add, transpose_rhs=transposed, rhs_scale=scales, **options
            )

        out, back = jax.vjp(forward, lhs, add)
        return out, *back(dout.astype(out.dtype))

    arrays = lhs, rhs, np.asarray(sizes, np.int32), add, scales, jnp.asarray(dout, dtype)
    want = oracle.grouped_matmul(
        lhs, rhs, sizes, offset, add, transpose_rhs=transposed, rhs_scale=scales, dout=arrays[-1]
    )
    return run, arrays, want


def check_results_of_8_bits(results: Any, arrays: Any, want: oracle.Result, name: str) -> None:
    """Compares what ``case_of_8_bits`` returns with float64."""
    out, dlhs, dadd = results
    lhs, *_, dout = arrays
    assert out.dtype == dlhs.dtype == lhs.dtype
    check_close(out, want.out, name=name)
    check_close(dlhs, want.dlhs, name=f"{name} dlhs")
    if dadd is not None:
        np.testing.assert_array_equal(dadd, dout.astype(dadd.dtype))


def check_stored(fn: Callable[..., Any], stored_as: str, scale: str, *case: Any, **options: Any):
    """Compares a call with 8-bit matrices, all traced, with float64 of their scaled values."""
    run, arrays, want = case_of_8_bits(fn, stored_as, scale, *case, **options)
    check_results_of_8_bits(run(*arrays), arrays, want, f"{stored_as} {scale}")


# dtype, scale, inner, columns, transposed, options; 264 columns are read by pointers
STORED: dict[str, tuple[str, str, int, int, bool, dict[str, Any]]] = {
    "int8": ("int8", "column", 256, 528, False, {}),
    "int8 transposed": ("int8", "group", 256, 528, True, {}),
    "e4m3": ("float8_e4m3fn", "column", 384, 256, False, {"dtype": "float16"}),
    "e4m3 transposed": ("float8_e4m3fn", "number", 384, 256, True, {}),
    "e5m2": ("float8_e5m2", "group", 192, 264, False, {}),
    "e5m2 transposed": ("float8_e5m2", "column", 90, 131, True, {}),
    "int8 float32": (
        "int8", "column", 128, 96, False, {"dtype": "float32", "precision": "highest"},
    ),
    "few rows": ("int8", "column", 512, 256, False, {"rows": 40}),
}  # fmt: skip


def stored_case(fn: Callable[..., Any], case: str):
    """Returns ``case_of_8_bits`` of some of eight groups around a tile's sizes, with an addend."""
    stored_as, scale, inner, columns, transposed, options = STORED[case]
    sizes = [3, 0, 9, 1, 7, 5, 0, 2] if "rows" in options else [3, 0, 129, 1, 64, 17, 128, 20]
    matrices = MATRICES, inner, columns
    usual: dict[str, Any] = {"transposed": transposed, "offset": 1, "added": True}
    return case_of_8_bits(fn, stored_as, scale, sizes, matrices, **{**usual, **options})


# dtype, scale, transposed, dtype of lhs; for kernels that need whole tiles of matrices
ALIGNED_STORED: dict[str, tuple[str, str, bool, str]] = {
    "int8": ("int8", "column", False, "bfloat16"),
    "int8 transposed": ("int8", "group", True, "bfloat16"),
    "e4m3": ("float8_e4m3fn", "column", False, "float16"),
    "e4m3 transposed": ("float8_e4m3fn", "number", True, "bfloat16"),
    "e5m2": ("float8_e5m2", "group", False, "bfloat16"),
    "e5m2 transposed": ("float8_e5m2", "column", True, "float16"),
}
# around tiles of 64, 128 and 256 rows
ALIGNED_SIZES = (
    [3, 0, 64, 61, 17, 1, 130, 20],
    [129, 0, 60, 128, 259, 5, 100, 120],
    [700, 0, 256, 255, 9, 513, 300, 30],
)


def check_aligned_stored(fn: Callable[..., Any], case: str) -> None:
    """Checks some of eight groups of several sizes against float64."""
    stored_as, scale, transposed, dtype = ALIGNED_STORED[case]
    for sizes in ALIGNED_SIZES:
        rows = sum(sizes) // 8 * 8 + 16
        options: dict[str, Any] = {"rows": rows, "transposed": transposed, "dtype": dtype}
        check_stored(fn, stored_as, scale, sizes, (MATRICES, 256, 384), offset=1, **options)


# groups, rows, inner, columns: Mixtral 8x7B, DeepSeek V3 and Qwen3 30B-A3B
AT_SIZE: dict[str, tuple[int, int, int, int]] = {
    "mixtral": (8, 16384, 4096, 14336),
    "deepseek": (256, 65536, 7168, 2048),
    "qwen": (128, 8192, 2048, 768),
}


def sizes_at(name: str, zipf: bool) -> np.ndarray:
    """Returns even sizes, or sizes of which the i-th largest is 1 / i of the largest."""
    groups, rows, _, _ = AT_SIZE[name]
    share = np.random.default_rng(0).permutation(1 / np.arange(1, groups + 1) ** zipf)
    sizes = np.floor(rows * share / share.sum()).astype(np.int32)
    sizes[np.argmax(sizes)] += rows - sizes.sum()
    return sizes


@jax.jit
def _errors_of_group(g, sizes, x, w, dy, out, dx, dw):
    """Returns relative errors of the three results inside group g."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(x.shape[0])
    inside = ((row < ends[g]) & (row >= ends[g] - sizes[g]))[:, None]
    mine, other = jnp.where(inside, x, 0), jnp.where(inside, dy, 0)

    def error(got, a, b):
        want = jnp.dot(a, b, preferred_element_type=jnp.float32)
        norm = jnp.linalg.norm(want)
        return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.where(norm > 0, norm, 1)

    return {
        "out": error(jnp.where(inside, out, 0), mine, w[g]),
        "dlhs": error(jnp.where(inside, dx, 0), other, w[g].T),
        "drhs": error(dw[g], mine.T, other),
    }


def check_at_size(fn: Callable[..., Any], name: str, zipf: bool) -> None:
    """Checks first, last, smallest, middle and largest group; two runs have the same bits."""
    groups, rows, inner, columns = AT_SIZE[name]
    counts = sizes_at(name, zipf)
    sizes = jnp.asarray(counts)

    @jax.jit
    def draw():
        a, b, c = jax.random.split(jax.random.key(1), 3)
        w = jax.random.normal(b, (groups, inner, columns), jnp.bfloat16)
        w *= jnp.asarray(inner**-0.5, w.dtype)
        x, dy = (jax.random.normal(k, (rows, n), w.dtype) for k, n in ((a, inner), (c, columns)))
        return x, w, dy

    @jax.jit
    def run(x, w, dy):
        out, back = jax.vjp(lambda x, w: fn(x, w, sizes), x, w)
        return out, *back(dy)

    operands = draw()
    results = run(*operands)
    assert all(jnp.array_equal(a, b) for a, b in zip(results, run(*operands), strict=True))
    order = np.argsort(counts)
    for g in {0, groups - 1, int(order[0]), int(order[groups // 2]), int(order[-1])}:
        errors = _errors_of_group(g, sizes, *operands, *results)
        print(f"{name} group {g}, {counts[g]} rows: {errors}")
        assert all(e <= KINDS["bfloat16"][-1] for e in errors.values()), (g, errors)


CASES = [
    (sizes, kind, transposed) for kind in KINDS for sizes in SIZES for transposed in (False, True)
]


# ---- ahead of time -------------------------------------------------------------------------------


def _grouped(
    rows: int, inner: int, columns: int, groups: int, dtype: str = BF16, **options: Any
) -> AbstractCall:
    sizes = {"rows": rows, "inner": inner, "columns": columns, "groups": groups}
    transposed: Arrays = {"rhs": ((groups, columns, inner), dtype)}
    arrays = transposed if options.get("transpose_rhs") else None
    return abstract_call(
        "grouped_matmul", sizes, arrays=arrays, dtype=dtype, trained=True, options=options
    )


def _eight_bit(dtype: str) -> AbstractCall:
    sizes = {"rows": 2048, "inner": 4096, "columns": 2048, "groups": 64}
    operands = {"rhs": dtype, "rhs_scale": F32}
    call = abstract_call(
        "grouped_matmul", sizes, "rhs_scale", dtypes=operands, forms={"rhs_scale": 2}
    )
    return replace(call, gradients=("lhs",))


COMPILED = {
    "grouped": _grouped(16384, 4096, 14336, 8, BF16),
    "grouped many": _grouped(65536, 7168, 2048, 256, BF16),
    "grouped float32": _grouped(8192, 1024, 1024, 8, F32),
}
COMPILED_TPU = {
    "grouped 8 x 1k": _grouped(8192, 4096, 14336, 8),
    "grouped one row each": _grouped(512, 4096, 1536, 512),
    "grouped short inner": _grouped(8192, 768, 2048, 32),
    "grouped transposed": _grouped(4096, 7168, 2048, 64, transpose_rhs=True),
    "grouped odd": _grouped(1000, 2880, 5760, 32),
    "grouped float32": _grouped(4096, 2048, 2048, 16, F32, precision="highest"),
    "grouped int8": _eight_bit("int8"),
    "grouped e4m3": _eight_bit("float8_e4m3fn"),
    "grouped e5m2": _eight_bit("float8_e5m2"),
}
