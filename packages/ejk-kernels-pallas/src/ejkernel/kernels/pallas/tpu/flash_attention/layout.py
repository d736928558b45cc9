"""Static properties of a launch: padded sizes, options, units of logits, compiler parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.common.units import sign, unit
from ejkernel.kernels.pallas.tpu.common.chip import LANES, Chip
from ejkernel.kernels.pallas.tpu.common.masks import TileRules
from ejkernel.kernels.pallas.tpu.common.matmul import matmul
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import Tiles
from ejkernel.types.attention.problem import LOG2E, Problem


@dataclass(frozen=True)
class Layout:
    """One launch of one kernel of a call.

    Attributes:
        problem: sizes of the call. tiles, rules, chip: its tiles, its mask and its TPU.
        table_rows, steps, has_full, has_partial, table_heads, listed: of ``VisitedBlocks``.
        gated: whether the output was multiplied by a gate for each row, which gradients read. A row
            that sees no key may then hold NaN in q and do.
        masks_padded_keys: whether keys past the length are hidden although they are the outer side.
    """

    problem: Problem
    tiles: Tiles
    rules: TileRules
    chip: Chip
    table_rows: int
    steps: int
    has_full: bool
    has_partial: bool
    table_heads: int = 1
    listed: bool = False
    gated: bool = False
    masks_padded_keys: bool = False

    @property
    def dim(self) -> int:
        """Head dim after padding."""
        return padded_dim(self.problem.dim)

    @property
    def value_dim(self) -> int:
        return padded_dim(self.problem.value_dim)

    @property
    def q_blocks(self) -> int:
        return -(-self.problem.q_len // self.tiles.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.problem.kv_len // self.tiles.block_kv)

    @property
    def q_padded(self) -> int:
        return self.q_blocks * self.tiles.block_q

    @property
    def kv_padded(self) -> int:
        return self.kv_blocks * self.tiles.block_kv

    def shape(self, heads: int, length: int, width: int) -> tuple[int, int, int, int]:
        """Returns the shape of rows of all heads as the kernels read and write them."""
        b = self.problem.batch
        joined = self.tiles.joins_heads
        return (b, 1, length, heads * width) if joined else (b, heads, length, width)

    def block_index(self, b: Any, head: Any, block: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the index of a block of rows of a head in an array of this shape."""
        return (b, 0, block, head) if self.tiles.joins_heads else (b, head, block, 0)

    def head_of(self, ref: Any, b: Any, head: Any, width: int) -> Any:
        """Returns the rows ``[length, width]`` of a head in an array of this shape."""
        if not self.tiles.joins_heads:
            return ref.at[b, head]
        return ref.at[b, 0, :, pl.ds(pl.multiple_of(head * width, LANES), width)]

    @property
    def log2_unit(self) -> float:
        """Returns the base-2 logit of a raw logit of 1; positive."""
        return unit(self.problem) * LOG2E

    @property
    def floor(self) -> float:
        """Below every raw logit, above ``hidden``: a row that has seen no key keeps it, and
        exp2(hidden - floor) is 0 where exp2(-inf + inf) would be NaN.

        A small unit makes raw logits large; twice the floor is still a finite float32.
        """
        return -max(1e30, min(1e30 / self.log2_unit, 1.5e38))

    @property
    def hidden(self) -> float:
        """The raw logit of a masked key; finite."""
        return 2.0 * self.floor

    @property
    def precision(self) -> Any:
        """Precision of float32 matmuls; one bfloat16 pass is exact enough for bfloat16 operands."""
        is_full = self.problem.dtype == "float32" and self.problem.precision in ("high", "highest")
        return lax.Precision.HIGHEST if is_full else lax.Precision.DEFAULT

    @property
    def pair_names(self) -> tuple[str, ...]:
        """Returns the names of the values by token that element masks compare."""
        return self.rules.pairs

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """Returns the matmul of two tiles over one axis each, float32."""
        return matmul(a, b, axes, self.precision)

    def raw_logits(self, scores: jax.Array) -> jax.Array:
        """Returns logits in units of ``log2_unit``: dot products, or tanh of capped ones.

        Maxima and lse are subtracted before the difference is scaled: the largest logit then
        counts exactly, however large it is.
        """
        cap = self.problem.soft_cap
        if cap is None:
            return scores if sign(self.problem) > 0.0 else -scores
        return jnp.tanh(scores * (self.problem.scale / cap))

    def compiler_params(
        self, semantics: Sequence[Any], vmem: int, collective_id: int | None = None
    ) -> Any:
        """Returns the parameters of a kernel that needs ``vmem`` bytes of vector memory.

        ``collective_id``: of the barrier semaphore of a kernel that talks to other devices.
        """
        return pltpu.CompilerParams(
            dimension_semantics=tuple(semantics),
            vmem_limit_bytes=self.chip.vmem_limit(vmem),
            collective_id=collective_id,
            has_side_effects=collective_id is not None,
        )


def padded_dim(dim: int) -> int:
    """Returns 64, or full registers of 128 lanes: memory is laid out so in any case."""
    return 64 if dim <= 64 else math.ceil(dim / LANES) * LANES


def padded(x: jax.Array, *sizes: int) -> jax.Array:
    """``x`` with zeros appended to its last axes up to ``sizes``."""
    lead = x.ndim - len(sizes)
    widths = [(0, 0)] * lead + [
        (0, size - have) for size, have in zip(sizes, x.shape[lead:], strict=True)
    ]
    return jnp.pad(x, widths) if any(w for _, w in widths) else x
