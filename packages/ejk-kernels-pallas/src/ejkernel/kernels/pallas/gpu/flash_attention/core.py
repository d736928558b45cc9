"""The differentiable core: the two Hopper kernels joined by one custom_vjp.

Residuals are q, k, v, o, the lse of every row and what the caller gave; the [q, k] matrix is
recomputed tile by tile. A ``vmap`` axis multiplies the batch axis of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.gpu.common.chip import Chip
from ejkernel.kernels.pallas.gpu.flash_attention.backward import backward
from ejkernel.kernels.pallas.gpu.flash_attention.backward_plan import BackwardTiles
from ejkernel.kernels.pallas.gpu.flash_attention.forward import Forward
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ForwardTiles
from ejkernel.ops.varying import vary, vary_alike, varying_axes
from ejkernel.types import MaskInfo, softmax
from ejkernel.types.problem import Problem
from ejkernel.types.structure import Rules, Unsupported, block_ranges, operands, split_mask

HIDDEN = {"q_ids": -1, "kv_ids": -2}  # ids of padding: never equal


@dataclass(frozen=True)
class Static:
    """Everything about a call that is known while tracing."""

    problem: Problem
    chip: Chip
    fwd: ForwardTiles
    bwd: BackwardTiles


def mask_rules(mask: MaskInfo) -> tuple[Rules, dict[str, Any]]:
    """The rules and the segment ids of a mask.

    Raises:
        Unsupported: the mask needs anything but bands by index and segment ids.
    """
    rules, arrays = split_mask(mask)
    if "mask" in arrays:
        raise Unsupported("attention_mask: a dense mask is not supported")
    if "q_positions" in arrays:
        raise Unsupported("mask_info: given positions are not supported")
    if rules.chunk is not None:
        raise Unsupported("mask_info: chunks are not supported")
    return rules, arrays


def _segment_ids(mask: MaskInfo, arrays: dict[str, Any], p: Problem) -> dict[str, jax.Array]:
    """int32 ids ``[#b, len]`` of which only those of pairs that may see each other are equal."""
    ids = operands(mask, arrays, p.q_len, p.kv_len)
    return {name: jnp.where(ids[name] < 0, hidden, ids[name]) for name, hidden in HIDDEN.items()}


def _to_blocks(x: jax.Array, block: int, fill: int) -> jax.Array:
    missing = -x.shape[1] % block
    return jnp.pad(x, [(0, 0), (0, missing)], constant_values=fill)


def _folding(problem: Problem, run: Callable, tensors: dict[str, jax.Array]) -> tuple:
    """``run(problem, tensors)``; under ``vmap`` the mapped axis joins the batch axis.

    Every tensor and result has a leading batch axis; one of size 1 is shared by all rows.
    """
    names = tuple(tensors)

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        with jax.enable_x64(False):  # the kernels count in int32
            return run(problem, dict(zip(names, arrays, strict=True)))

    @call.def_vmap
    def rule(size, mapped, *arrays):
        folded = {}
        for name, x, is_mapped in zip(names, arrays, mapped, strict=True):
            if not is_mapped and x.shape[0] == 1 and problem.batch > 1:
                folded[name] = x
                continue
            x = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            if x.shape[1] != problem.batch:
                x = jnp.broadcast_to(x, (size, problem.batch, *x.shape[2:]))
            folded[name] = x.reshape(size * problem.batch, *x.shape[2:])
        larger = replace(problem, batch=size * problem.batch)
        out = _folding(larger, run, folded)
        split = lambda y: y.reshape(size, problem.batch, *y.shape[1:])  # noqa: E731
        return jax.tree.map(split, out), jax.tree.map(lambda _: True, out)

    return call(*tensors.values())


def _shared(tensors: dict[str, jax.Array]) -> frozenset[str]:
    names = {name for name, x in tensors.items() if x.shape[0] == 1}
    if "ranges" in tensors and tensors["ranges"].shape[1] == 1:
        names.add("ranges_head")
    return frozenset(names)


def _forward(static: Static, q, k, v, sink, mask):
    p, t = static.problem, static.fwd
    rules, arrays = mask_rules(mask)
    tensors = {"q": q, "k": k, "v": v}
    if rules.arrays:
        tensors["ranges"] = block_ranges(
            mask, p.q_len, p.kv_len, t.block_q, t.block_kv, transposed=False
        )
        for name, x in _segment_ids(mask, arrays, p).items():
            block = t.block_q if name == "q_ids" else t.block_kv
            tensors[name] = _to_blocks(x, block, HIDDEN[name])
    if sink is not None:
        tensors["sink"] = sink

    def run(problem, tensors):
        names = tuple(name for name in tensors if name not in ("q", "k", "v"))
        kernel = Forward(problem, rules, t, names, _shared(tensors), static.chip.cores)
        return kernel(*tensors.values())

    return _folding(p, run, tensors)


def _backward(static: Static, q, k, v, do, base, delta, mask):
    p, t = static.problem, static.bwd
    rules, arrays = mask_rules(mask)
    tensors = {"q": q, "k": k, "v": v, "do": do, "base": base, "delta": delta}
    if rules.arrays:
        tensors |= _segment_ids(mask, arrays, p)
        tensors["ranges"] = block_ranges(
            mask, p.q_len, p.kv_len, t.block_q, t.block_kv, transposed=True
        )

    def run(problem, tensors):
        return backward(problem, **tensors, band=rules.band, tiles=t, cores=static.chip.cores)

    return _folding(p, run, tensors)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q, k, v, sink, mask):
    return _attend_fwd(static, q, k, v, sink, mask)[0]


def _attend_fwd(static: Static, q, k, v, sink, mask):
    o, lse, base = vary(_forward(static, q, k, v, sink, mask), varying_axes(q))
    o, lse, base = softmax.named(o, lse, base)
    return (o, lse), (q, k, v, sink, mask, o, lse, base)


def _attend_bwd(static: Static, residuals, cotangents):
    q, k, v, sink, mask, o, lse, base = residuals
    do, dlse = cotangents
    delta = softmax.row_delta(o, do, dlse)
    grads = vary(_backward(static, q, k, v, do, base, delta, mask), varying_axes(q))
    return *grads, softmax.sink_gradient(sink, lse, delta), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sink: jax.Array | None,
    mask: MaskInfo,
) -> tuple[jax.Array, jax.Array]:
    """o ``[b, q, h, dv]`` and the natural lse float32 ``[b, h, q]``, differentiable.

    q, k, v have the dtype of ``static.problem``; sink is float32 ``[1, h]`` (one logit per head).
    """
    arrays: Any = (q, k, v, sink, mask)
    return _attend(static, *vary_alike(arrays))
