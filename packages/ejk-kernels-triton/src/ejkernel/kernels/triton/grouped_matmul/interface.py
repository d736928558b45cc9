"""The public function: checks, ``custom_vjp``, mapped axes as more groups."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from ejkernel.kernels.triton.bridge import Launch, call
from ejkernel.kernels.triton.compat import vary, varying_axes
from ejkernel.kernels.triton.grouped_matmul.tiles import (
    MAX_LANES,
    Problem,
    Tiles,
    choose,
    choose_weights,
    configured,
    problem_of,
    refusal,
)
from ejkernel.kernels.triton.targets import Target, current_target
from ejkernel.types.attention import float_array, invalid
from ejkernel.types.structure import Unsupported


@dataclass(frozen=True)
class RowsPlan:
    """lhs, rhs, sizes, (offset), (existing) -> ``[batch * rows, columns]``."""

    problem: Problem
    tiles: Tiles
    offsets: int
    existing: bool

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        return (jax.ShapeDtypeStruct((p.batch * p.rows, p.columns), jnp.dtype(p.out)),)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.grouped_matmul import forward

        return forward.launch(self.problem, self.tiles, target, self.offsets, self.existing)

    def fold(self, size: Any, arrays: Any, batched: Any) -> Any:
        raise NotImplementedError("mapped axes become more groups before the kernels are planned")


@dataclass(frozen=True)
class WeightsPlan(RowsPlan):
    """lhs, dout, sizes, (offset) -> the gradients of the matrices of every call."""

    def outputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        p = self.problem
        shape = (p.columns, p.inner) if p.transposed else (p.inner, p.columns)
        return (jax.ShapeDtypeStruct((p.batch * p.held, *shape), jnp.dtype(p.dtype)),)

    def launch(self, target: Target) -> Launch:
        from ejkernel.kernels.triton.grouped_matmul import weights

        return weights.launch(self.problem, self.tiles, target, self.offsets)


@dataclass(frozen=True)
class Product:
    """One of the two products with its launch; called with arrays, it knows mapped axes.

    ``weights``: lhs, dout, sizes, offset; else lhs, rhs, sizes, offset, existing.
    """

    problem: Problem
    tiles: Tiles
    weights: bool = False

    def __call__(self, *arrays: Any) -> jax.Array:
        return _mapped(self)(*arrays)

    def run(self, *arrays: Any) -> jax.Array:
        offset = arrays[3]
        existing = len(arrays) > 4 and arrays[4] is not None
        kind = WeightsPlan if self.weights else RowsPlan
        plan = kind(
            self.problem, self.tiles, 0 if offset is None else offset.shape[0], existing
        )  # fmt: skip
        return call(plan, *(x for x in arrays if x is not None))[0]


@functools.cache
def _mapped(product: Product):
    """``Product.run`` with a batching rule: one launch over the groups of all calls."""
    run = custom_vmap(product.run)

    @run.def_vmap
    def rule(size, batched, *arrays):
        p = product.problem
        on = [any(jax.tree.leaves(b)) for b in batched]
        if size * p.batch * p.each > MAX_LANES:
            return _in_turn(product, arrays, on), True
        a, b, sizes, offset, *rest = arrays
        if p.batch == 1:
            sizes = _with_rest(sizes, p.rows)
        shared = p.shared and not (on[1] or product.weights)
        wide = [a, b, sizes, offset, *rest]
        for i, x in enumerate(wide):
            alone = (i == 1 and shared) or (i == 3 and not on[3] and x is not None and len(x) == 1)
            if x is None or alone:
                continue
            inner = {1: p.held, 2: p.each}.get(i, 1 if i == 3 else p.rows)
            if i == 1 and product.weights:
                inner = p.rows
            wide[i] = _merged(x, size, on[i], p.batch, inner)
        folded = replace(p, batch=size * p.batch, shared=shared)
        out = replace(product, problem=folded)(*wide)
        return out.reshape(size, out.shape[0] // size, *out.shape[1:]), True

    return run


def _merged(x: jax.Array, size: int, on: bool, batch: int, inner: int) -> jax.Array:
    """An operand for ``size`` times as many calls, ``inner`` leading entries each."""
    shape = x.shape[2:] if on else x.shape[1:]
    held = x.shape[1 if on else 0] // inner if inner else batch
    x = x.reshape(size if on else 1, held, inner, *shape)
    return jnp.broadcast_to(x, (size, batch, inner, *shape)).reshape(-1, *shape)


def _with_rest(sizes: jax.Array, rows: int) -> jax.Array:
    """Sizes ``[..., groups]`` clipped to the rows, with the rows they leave behind them."""
    sizes = jnp.clip(sizes, 0, rows)
    # clipped one by one, no sum can wrap around
    ends = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), sizes, axis=-1)
    edge = jnp.zeros_like(ends[..., :1])
    return jnp.diff(jnp.concatenate([edge, ends, edge + rows], -1), axis=-1)


def _in_turn(product: Product, arrays: Any, on: list[bool]) -> jax.Array:
    """One call after the other: more groups than a program can hold."""
    moving = [x for x, o in zip(arrays, on, strict=True) if o]

    def one(slices: list[jax.Array]) -> jax.Array:
        rest = iter(slices)
        return product(*(next(rest) if o else x for x, o in zip(arrays, on, strict=True)))

    return jax.lax.map(one, moving)


@dataclass(frozen=True)
class Static:
    """Everything about a call that is known while tracing."""

    problem: Problem
    cfg: Any

    def tiles(self, p: Problem) -> Tiles:
        return configured(choose(p, current_target()), dict(self.cfg))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: Static, lhs, rhs, sizes, offset, existing):
    p = static.problem
    return Product(p, static.tiles(p))(lhs, rhs, sizes, offset, existing)


def _product_fwd(static: Static, lhs, rhs, sizes, offset, existing):
    out = _product(static, lhs, rhs, sizes, offset, existing)
    like = None if existing is None else jnp.zeros((0,), existing.dtype)
    return out, (lhs, rhs, sizes, offset, like)


def _product_bwd(static: Static, residuals, dout):
    lhs, rhs, sizes, offset, like = residuals
    p, kinds = static.problem, (lhs.dtype, rhs.dtype)
    dexisting = None if like is None else dout.astype(like.dtype)
    if p.dtype == "float16" and p.out != "float16":
        # its range would cut gradients that the result had room for
        p = replace(p, dtype="float32", precision="tf32")
    lhs, rhs, dout = (x.astype(p.dtype) for x in (lhs, rhs, dout))
    flipped = p.flipped()
    dlhs = Product(flipped, static.tiles(flipped))(dout, rhs, sizes, offset, None)
    tiles = choose_weights(p, current_target())
    drhs = Product(p, tiles, weights=True)(lhs, dout, sizes, offset)
    return dlhs.astype(kinds[0]), drhs.astype(kinds[1]), None, None, dexisting


_product.defvjp(_product_fwd, _product_bwd)


def grouped_matmul(
    lhs,
    rhs,
    group_sizes,
    group_offset=None,
    existing_out=None,
    *,
    preferred_element_type=None,
    transpose_rhs=False,
    precision=None,
    cfg=None,
):
    """Consecutive runs of rows, each times its own matrix, on a GPU::

        out[r] = lhs[r] @ rhs[group(r) - group_offset] + existing_out[r]

    Args:
        lhs: float16, bfloat16 or float32 ``[m, k]``. Run i of its rows has length
            ``group_sizes[i]``.
        rhs: ``[g, k, n]``, or ``[g, n, k]`` with ``transpose_rhs``.
        group_sizes: integer ``[g_total]``, at most 4095, zeros allowed; may be traced. A sum above
            m is clipped; rows past the sum give 0. Negative sizes count as 0.
        group_offset: int, integer ``[]`` or ``[1]``: rhs holds the groups from this one on, and
            rows of other groups give 0. Without it g_total must be g.
        existing_out: float ``[m, n]``, added to the product before it is rounded.
        preferred_element_type: dtype of the output; default result_type(lhs, rhs). Accumulation
            is in float32.
        precision: default, high or highest, of float32 products.
        cfg: ``block_m``, ``block_n``, ``block_k``, ``num_warps``, ``num_stages`` of the product
            and of the gradient of lhs; that of rhs has its own.

    Returns:
        out ``[m, n]``. Two runs give the same bits.

    Differentiable once, in reverse mode, in lhs, rhs and existing_out. ``vmap`` is one launch over
    the groups of all calls, up to 4096 groups; then the calls run one after the other.

    Raises:
        InvalidArgument: an array of wrong dtype, rank or size. ValueError: an illegal value.
        Unsupported: what ``supports`` gives a reason for.
    """
    lhs = float_array(lhs, "lhs", "m k")
    rhs = float_array(rhs, "rhs", "groups n k" if transpose_rhs else "groups k n")
    (m, k), g, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    if rhs.shape[2 if transpose_rhs else 1] != k:
        form = f"float[groups, n, {k}]" if transpose_rhs else f"float[groups, {k}, n]"
        raise invalid("rhs", form, rhs)
    sizes = jnp.asarray(group_sizes)
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise invalid("group_sizes", "integer[groups]", group_sizes)
    if sizes.shape[0] < g or (group_offset is None and sizes.shape[0] != g):
        raise invalid("group_sizes", f"integer[{g}], one size per matrix of rhs", sizes)
    if existing_out is not None:
        existing_out = float_array(existing_out, "existing_out", "m n")
        if existing_out.shape != (m, n):
            raise invalid("existing_out", f"float[{m}, {n}]", existing_out)
    facts = {
        "lhs": lhs,
        "rhs": rhs,
        "group_sizes": sizes,
        "existing_out": existing_out,
        "preferred_element_type": preferred_element_type,
        "transpose_rhs": transpose_rhs,
        "precision": precision,
    }
    reason = refusal(facts)
    if reason is not None:
        raise Unsupported(reason)
    p = problem_of(facts)
    if 0 in (m, k, n, g):
        out = jnp.zeros((m, n), p.out)
        return out if existing_out is None else (out + existing_out).astype(p.out)
    offset = None if group_offset is None else _offset(group_offset)
    arrays = (lhs.astype(p.dtype), rhs.astype(p.dtype), sizes.astype(np.int32), offset)
    arrays = (*arrays, existing_out)
    # inside shard_map all operands vary alike, so that JAX sums the gradients of replicated ones
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
    if axes:
        arrays = vary(arrays, axes)
    return _product(Static(p, _config(cfg)), *arrays)


def _config(cfg: Any) -> tuple[tuple[str, int], ...]:
    from ejkernel.types.attention import field

    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
    return tuple((n, int(field(cfg, n))) for n in names if field(cfg, n) is not None)


def _offset(group_offset: Any) -> jax.Array:
    offset = jnp.asarray(group_offset)
    if offset.shape not in ((), (1,)) or not jnp.issubdtype(offset.dtype, jnp.integer):
        raise invalid("group_offset", "a Python int, integer[] or integer[1]", group_offset)
    return offset.reshape(1).astype(jnp.int32)
