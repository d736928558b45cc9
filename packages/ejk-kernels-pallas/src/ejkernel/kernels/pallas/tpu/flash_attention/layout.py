"""Static facts that the three kernels share: sizes after padding, options, names of operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.masks import LANES, TileRules, Visits
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import Tiles
from ejkernel.types.problem import LOG2E, Problem

# Below every logit and above the logit of a masked key: a row that has seen nothing keeps it, and
# exp2(HIDDEN - FLOOR) is 0 where exp2(-inf + inf) would be NaN.
FLOOR, HIDDEN = -1e30, -2e30


@dataclass(frozen=True)
class Layout:
    """One kernel of one call.

    Attributes:
        problem: sizes as given. tiles, rules, chip: how it is cut, masked and where it runs.
        steps, table_rows, some_full, some_partial: of ``Visits``.
        dim, value_dim: head dims after padding.
    """

    problem: Problem
    tiles: Tiles
    rules: TileRules
    chip: Chip
    steps: int
    table_rows: int
    some_full: bool
    some_partial: bool
    dim: int
    value_dim: int

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

    @property
    def scaled_first(self) -> bool:
        """Whether logits are scaled before the maximum: a positive factor can wait."""
        return self.problem.soft_cap is not None or self.problem.scale <= 0.0

    @property
    def log2_scale(self) -> float:
        return self.problem.scale * LOG2E

    @property
    def precision(self) -> Any:
        """Of products of float32; one bfloat16 pass is exact enough for bfloat16 operands."""
        highest = self.problem.dtype == "float32" and self.problem.precision == "highest"
        return lax.Precision.HIGHEST if highest else lax.Precision.DEFAULT

    @property
    def pair_names(self) -> tuple[str, ...]:
        return self.rules.pairs

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """Product of two tiles over one axis each, float32."""
        numbers = (((axes[0],), (axes[1],)), ((), ()))
        return lax.dot_general(
            a, b, numbers, precision=self.precision, preferred_element_type=jnp.float32
        )

    def logits(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Base-2 logits, and tanh of the capped ones (for its derivative)."""
        cap = self.problem.soft_cap
        if cap is None:
            return products * self.log2_scale, None
        bent = jnp.tanh(products * (self.problem.scale / cap))
        return bent * (cap * LOG2E), bent

    def compiler_params(self, semantics: Sequence[Any], vmem: int) -> Any:
        limit = min(self.chip.vmem, max(vmem, 16 * 2**20))
        return pltpu.CompilerParams(
            dimension_semantics=tuple(semantics), vmem_limit_bytes=int(limit)
        )


def layout_of(problem: Problem, tiles: Tiles, rules: TileRules, chip: Chip, v: Visits) -> Layout:
    return Layout(
        problem,
        tiles,
        rules,
        chip,
        v.steps,
        v.rows,
        v.some_full,
        v.some_partial,
        padded_dim(problem.dim),
        padded_dim(problem.value_dim),
    )


def padded_dim(dim: int) -> int:
    """64, or whole registers of 128 lanes: memory is laid out so in any case."""
    return 64 if dim <= 64 else math.ceil(dim / LANES) * LANES


def padded(x: jax.Array, *sizes: int) -> jax.Array:
    """``x`` with zeros appended to its last axes up to ``sizes``."""
    lead = x.ndim - len(sizes)
    widths = [(0, 0)] * lead + [
        (0, size - have) for size, have in zip(sizes, x.shape[lead:], strict=True)
    ]
    return jnp.pad(x, widths) if any(w for _, w in widths) else x
