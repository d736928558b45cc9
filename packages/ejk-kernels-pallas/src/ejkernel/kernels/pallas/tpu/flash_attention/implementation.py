"""Flash attention on TPU as one kernel object: supported calls, tiles, the kernels of a pass.

Residuals are q, k, v, o, the lse of every row and the arguments of the caller; the [q, k] matrix is
recomputed tile by tile. The kernels read head-major arrays padded to whole tiles: one transpose
and pad that XLA fuses into the producer of the array where it can. With ``joins_heads`` they read
rows as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.kernel import PallasKernel
from ejkernel.kernels.pallas.tpu.common.chip import Chip, current_chip
from ejkernel.kernels.pallas.tpu.common.masks import (
    block_lists,
    tile_rules,
    visited_blocks,
    visited_of_lists,
)
from ejkernel.kernels.pallas.tpu.flash_attention import ring, tiles
from ejkernel.kernels.pallas.tpu.flash_attention.dkv import key_gradients
from ejkernel.kernels.pallas.tpu.flash_attention.dq import query_gradient
from ejkernel.kernels.pallas.tpu.flash_attention.forward import forward
from ejkernel.kernels.pallas.tpu.flash_attention.fused import all_gradients
from ejkernel.kernels.pallas.tpu.flash_attention.layout import Layout, padded
from ejkernel.kernels.pallas.tpu.flash_attention.send_keys import attend_and_send
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import FlashTiles
from ejkernel.kernels.pallas.tpu.flash_attention.unshifted import (
    forward_unshifted,
    unshifted_layout,
)
from ejkernel.kernels.pallas.tpu.grouped_matmul.implementation import grouped_matmul
from ejkernel.ops.differentiate import Arrays, Work
from ejkernel.ops.varying import vary_like
from ejkernel.types import calls
from ejkernel.types.arrays import NO_LEVEL, precision_level
from ejkernel.types.attention.context.kernel import (
    ContextParallel,
    ContextProblem,
    ContextTiles,
)
from ejkernel.types.attention.context.strategy import STRATEGIES
from ejkernel.types.attention.latent import EINSUMS, RowProducts
from ejkernel.types.attention.mixins import FromLatent, SoftmaxKernel
from ejkernel.types.attention.problem import Problem
from ejkernel.types.attention.row_products import products_in_order
from ejkernel.types.attention.rows import Rows
from ejkernel.types.calls import arguments
from ejkernel.types.calls.shared_sequence import ShardedCall
from ejkernel.types.masks.hidden import clear_unless, seen_keys

DTYPES = ("bfloat16", "float32")
MAX_DIM = 256


class FlashAttention(SoftmaxKernel, PallasKernel):
    """Exact attention in memory linear in the lengths, on a TPU.

    q, k and v are bfloat16 or float32, promoted to one dtype, with head dims up to 256; a dense
    mask, a bias and dropout are not supported. ``precision`` of float32 matmuls: None is one
    bfloat16 pass, "high" and "highest" float32. Two runs give the same bits. ``cfg``:
    ``fwd_params`` (q_blocksize, kv_blocksize) and ``bwd_params`` (the same for the key gradients;
    blocksize_m, blocksize_n for the query gradient, where it has a kernel of its own), sizes below
    128 mean 128; ``joins_heads``: whether heads stay next to each other in a row, as a projection
    leaves them; ``fuses_gradients=False``: the query gradient has its own kernel.
    """

    call = calls.FlashAttention
    reads = arguments.FLASH | arguments.PACKED | {"precision"}
    # no bias: a [q, k] bias would be read once a head, which costs more than the matmuls
    chip = staticmethod(current_chip)
    choose = staticmethod(tiles.choose)
    saved_axes = "batch heads q_len"

    def problem(self, a: Mapping[str, Any]) -> Problem:
        p = self.call.problem(a)
        p = replace(p, precision=precision_level(a.get("precision"), p.dtype) or "")
        # raises for masks that tiles have no rules for
        self.call.read_mask(a, lambda mask: tile_rules(mask, p.q_len, p.kv_len))
        return p

    def variant_reason(self, problem: Problem) -> str | None:
        # other operations with these kernels do more around them
        return None if self.call is calls.FlashAttention else super().variant_reason(problem)

    def sequence_problem(self, problem: Problem) -> Problem:
        return replace(problem, batch=1)

    def unsupported_reason(self, problem: Problem, target: Chip) -> str | None:
        if problem.dtype not in DTYPES:
            return f"query: {problem.dtype} is not supported, only {' and '.join(DTYPES)}"
        for argument, dim in (("query", problem.dim), ("value", problem.value_dim)):
            if not 0 < dim <= MAX_DIM:
                return f"{argument}: head dim {dim} is not between 1 and {MAX_DIM}"
        if not problem.precision:
            return NO_LEVEL
        return None

    def row_unit(self, problem: Problem) -> float:
        return unit(problem)

    def neighbours(
        self, problem: Problem, target: Chip, chosen: FlashTiles
    ) -> Iterable[FlashTiles]:
        for part in chosen.kernels:
            for tile in tiles.neighbours(getattr(chosen, part)):
                yield replace(chosen, **{part: tile})

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        p = work.problem
        layout, table, pairs = _prepare(work, "fwd", arrays)
        operands, sink = _operands(layout, _clear_hidden(p, arrays)), arrays.get("sink")
        unshifted = None if sink is not None else unshifted_layout(layout)
        if unshifted is not None:
            o, lse, base = forward_unshifted(unshifted, table, operands)
        else:
            o, lse, base = forward(layout, table, operands, sink, pairs)
        return _forward_results(p, o, lse, base)

    def visitors(self, work: Work, arrays: Arrays) -> tuple[jax.Array, ...]:
        """Returns keys and values as ``partial_result_of_visitors`` takes them."""
        layout, _, _ = _prepare(work, "fwd", arrays)
        return _operands(layout, _clear_hidden(work.problem, arrays))[1:]

    def partial_result_of_visitors(
        self, work: Work, arrays: Arrays, visitors: tuple[jax.Array, ...], axis_name: str | None
    ) -> tuple[tuple[jax.Array, Rows], tuple[jax.Array, ...]]:
        """Returns ``partial_result`` over visiting keys, and the keys that visit next.

        ``axis_name``: along which the kernel sends the keys to the next device; None: it does not.
        """
        p = work.problem
        layout, *mask_operands = _prepare(work, "fwd", arrays)
        # positions differ along the ring alone
        table, pairs = vary_like(mask_operands, arrays["q"])
        operands = (_operands(layout, arrays)[0], *visitors)
        if axis_name is None:
            results = forward(layout, table, operands, None, pairs)
        else:
            *results, k, v = attend_and_send(layout, table, operands, pairs, axis_name)
            visitors = (k, v)
        (o, lse), base = _forward_results(p, *results)
        return (o, self.rows_of(p, lse, base)), visitors

    def finds_delta(self, work: Work) -> bool:
        return work.tiles.dq.joins_heads and not work.batch_invariant

    def gradients(self, work: Work, arrays: Arrays) -> Arrays:
        """Returns gradients by name; see ``SoftmaxKernel.gradients``.

        ``arrays`` may have a ``gate`` ``[b, h, q]`` by which the output was multiplied: do is then
        the gradient of the gated output, delta is do . o, and rows need not be cleared.
        """
        p, t = work.problem, work.tiles
        arrays = _clear_hidden(p, arrays)
        if "delta" not in arrays:
            arrays |= {"delta": _delta_of_joined(arrays["o"], arrays["do"]) - arrays["dlse"]}

        if t.fused is not None:
            dq, dk, dv = all_gradients(*_gradient_operands(work, "fused", arrays))
        else:
            dq = query_gradient(*_gradient_operands(work, "dq", arrays))
            dk, dv = key_gradients(*_gradient_operands(work, "dkv", arrays))
        return {
            "q": _from_layout(dq, p.q_len, p.heads, p.dim),
            "k": _from_layout(dk, p.kv_len, p.kv_heads, p.dim),
            "v": _from_layout(dv, p.kv_len, p.kv_heads, p.value_dim),
        }


def _forward_results(
    p: Problem, o: jax.Array, lse: jax.Array, base: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Returns outputs and saved rows of the forward kernel as users see them."""
    lse, base = (x[:, :, 0, : p.q_len] for x in (lse, base))
    return (_from_layout(o, p.q_len, p.heads, p.value_dim), lse), base


def kernel_lists(work: Work, arrays: Arrays, kernel: str) -> Any:
    """Returns the blocks that a kernel (of ``FlashTiles``) visits under a pattern."""
    p, t = work.problem, getattr(work.tiles, kernel)
    rules, _ = tile_rules(arrays["mask"], p.q_len, p.kv_len)
    sizes = (t.block_q, t.block_kv)
    return block_lists(
        arrays["mask"], arrays["pattern"], p.pattern_blocks, rules, sizes,
        transposed=kernel in tiles.KEYS_OUTER,
        masks_last_outer=_masks_padded_keys(p, t, kernel),
    )  # fmt: skip


def _masks_padded_keys(p: Problem, t: tiles.Tiles, kernel: str) -> bool:
    """Returns whether a kernel with keys outside has to hide those past the length.

    The fused kernel adds them to the gradient of the queries. A padded key is 0, but where the lse
    of a row is below -88 its weight exp(0 - lse) is infinite, and infinity times 0 is NaN.
    """
    return kernel == "fused" and p.kv_len % t.block_kv != 0


def _prepare(
    work: Work, kernel: str, arrays: Arrays
) -> tuple[Layout, Any, list[tuple[jax.Array, jax.Array]]]:
    """Returns layout, table of visited blocks and padded value pairs of a kernel.

    A pair is ``[#b, 1, q]`` and ``[#b, 1, k]``: what masks compare, padded to whole blocks.
    """
    p, t, mask = work.problem, getattr(work.tiles, kernel), arrays["mask"]
    rules, pairs = tile_rules(mask, p.q_len, p.kv_len)
    masks_padded_keys = _masks_padded_keys(p, t, kernel)
    if "pattern" in arrays:
        lists = arrays.get("lists")
        visited = visited_of_lists(lists[kernel] if lists else kernel_lists(work, arrays, kernel))
    else:
        visited = visited_blocks(
            mask, rules, t.block_q, t.block_kv,
            transposed=kernel in tiles.KEYS_OUTER, masks_last_outer=masks_padded_keys,
        )  # fmt: skip
    layout = Layout(
        p, t, rules, work.target, *visited.static_flags, masks_padded_keys=masks_padded_keys
    )
    padded_pairs = [
        (padded(q[:, None], layout.q_padded), padded(kv[:, None], layout.kv_padded))
        for q, kv in pairs.values()
    ]
    return layout, visited.table, padded_pairs


def _gradient_operands(
    work: Work, kernel: str, arrays: Arrays
) -> tuple[Layout, Any, tuple[jax.Array, ...], list[tuple[jax.Array, jax.Array]]]:
    """Returns the arguments of a gradient kernel: layout, table, arrays and value pairs."""
    layout, table, pairs = _prepare(work, kernel, arrays)
    layout = replace(layout, gated="gate" in arrays)
    row_names = ("base", "delta", "gate") if layout.gated else ("base", "delta")
    row_values = (padded(arrays[name][:, :, None], layout.q_padded) for name in row_names)
    do = _to_layout(layout, arrays["do"], layout.q_padded, layout.value_dim)
    return layout, table, (*_operands(layout, arrays), do, *row_values), pairs


def _clear_hidden(p: Problem, arrays: Arrays) -> Arrays:
    """Returns the arrays with zeros for keys that no row sees, which may be NaN.

    XLA fuses this into the transposes of ``_to_layout``.
    """
    seen = seen_keys(arrays["mask"].terms, p.q_len, p.kv_len)
    return arrays | dict(zip("kv", clear_unless(seen, arrays["k"], arrays["v"]), strict=True))


def _operands(layout: Layout, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Returns q, k and v as the kernels read them."""
    return (
        _to_layout(layout, arrays["q"], layout.q_padded, layout.dim),
        _to_layout(layout, arrays["k"], layout.kv_padded, layout.dim),
        _to_layout(layout, arrays["v"], layout.kv_padded, layout.value_dim),
    )


def _to_layout(layout: Layout, x: jax.Array, length: int, dim: int) -> jax.Array:
    """Returns ``[b, s, h, d]`` in ``Layout.shape``, padded with zeros."""
    if layout.tiles.joins_heads:
        b, rows, heads, _ = x.shape
        return padded(x.reshape(b, 1, rows, heads * dim), length, heads * dim)
    return padded(x.swapaxes(1, 2), length, dim)


def _delta_of_joined(o: jax.Array, do: jax.Array) -> jax.Array:
    """Returns do . o ``[b, h, q]``: a sum over part of the lanes, for which XLA would copy both."""
    heads, dim = o.shape[2:]
    o, do = (x.reshape(*x.shape[:2], heads * dim).astype(jnp.float32) for x in (o, do))
    head_of_lane = jnp.repeat(jnp.eye(heads, dtype=jnp.float32), dim, axis=0)
    return jnp.einsum("bqx,xh->bhq", o * do, head_of_lane, precision="highest")


def _from_layout(x: jax.Array, length: int, heads: int, dim: int) -> jax.Array:
    """Returns ``[b, s, h, d]`` without padding from rows in ``Layout.shape``."""
    if x.shape[1] != heads:  # joined; a single head lies the same either way
        return x[:, 0, :length].reshape(x.shape[0], length, heads, dim)
    return x[:, :, :length, :dim].swapaxes(1, 2)


class FlashMLA(FromLatent, FlashAttention):
    """The kernels of flash attention on keys and values expanded from latent rows; see
    ``mla_attention``.

    Dtypes, head dims (with the rotary part; of values), masks and ``cfg`` are as in
    ``flash_attention``; float32 matmuls take one bfloat16 pass. The backward pass expands again: no
    expanded array is saved.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    call = calls.FlashMLA
    reads = arguments.FLASH_MLA

    def variant_reason(self, problem: Problem) -> str | None:
        return None

    def row_products(self, work: Work) -> RowProducts:
        return products_in_order(grouped_matmul) if work.batch_invariant else EINSUMS


flash_attention = FlashAttention()


class RingAttention(ContextParallel, PallasKernel):
    """Flash attention over a sequence that is sharded along a mesh axis, on TPUs.

    Call it inside ``shard_map``. Dtypes, head dims, masks and ``cfg`` are as in
    ``flash_attention``, which computes every piece of the visiting keys. ``cfg`` of
    ``context_parallel="ring_remote_copy"``: the kernel of a forward step sends the keys on itself,
    by remote copies; gradients as with "ring".
    """

    call = calls.RingAttention
    reads = arguments.RING | {"precision"}
    chip = staticmethod(current_chip)
    flash = flash_attention
    strategies = (*STRATEGIES, ring.STRATEGY)

    def apply_config(
        self, chosen: ContextTiles, cfg: Any, problem: ContextProblem, target: Chip
    ) -> ContextTiles:
        applied = super().apply_config(chosen, cfg, problem, target)
        if applied.strategy != ring.STRATEGY:
            return applied
        # a step of this strategy is one kernel over the chunks of a whole shard
        (piece, p), chunks = problem.calls[0], problem.ring.chunks
        q_len, kv_len = p.q_len // piece.q.count * chunks, p.kv_len // piece.kv.count * chunks
        shard = replace(p, q_len=q_len, kv_len=kv_len)
        chosen_tiles = self.flash.choose(shard, target)
        return replace(
            applied, full_shards=self.flash.apply_config(chosen_tiles, cfg, shard, target)
        )

    def forward(self, work: Work, arrays: Arrays) -> tuple[tuple[Any, ...], Any]:
        if work.tiles.strategy == ring.STRATEGY and work.problem.ring.size > 1:
            return ring.forward_sending(work, arrays)
        return super().forward(work, arrays)


mla_attention = FlashMLA()
ring_attention = RingAttention()
for kernel in (flash_attention, mla_attention):
    kernel.context, kernel.sharded_call = ring_attention, ShardedCall
