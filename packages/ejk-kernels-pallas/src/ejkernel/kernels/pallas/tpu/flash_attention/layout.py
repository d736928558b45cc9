"""Static properties shared by the three kernels: padded sizes, options, names of operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.common.units import sign, unit
from ejkernel.kernels.pallas.tpu.common.chip import Chip
from ejkernel.kernels.pallas.tpu.common.masks import LANES, TileRules
from ejkernel.kernels.pallas.tpu.flash_attention.tiles import Tiles
from ejkernel.types.attention.problem import LOG2E, Problem


@dataclass(frozen=True)
class Layout:
    """One kernel of one call.

    Attributes:
        problem: sizes as given. tiles, rules, chip: how it is cut, masked and where it runs.
        table_rows, steps, some_full, some_partial: of ``Visits``.
    """

    problem: Problem
    tiles: Tiles
    rules: TileRules
    chip: Chip
    table_rows: int
    steps: int
    some_full: bool
    some_partial: bool

    @property
    def dim(self) -> int:
        """Of a head after padding."""
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

    @property
    def log2_unit(self) -> float:
        """What one of ``numbers`` is worth in base 2; positive."""
        return unit(self.problem) * LOG2E

    @property
    def floor(self) -> float:
        """Below every number, above ``hidden``: a row that has seen nothing keeps it, and
        exp2(hidden - floor) is 0 where exp2(-inf + inf) would be NaN."""
        return -max(1e30, min(1e30 / self.log2_unit, 1.5e38))

    @property
    def hidden(self) -> float:
        """The number of a masked key."""
        return 2.0 * self.floor

    @property
    def precision(self) -> Any:
        """Of products of float32; one bfloat16 pass is exact enough for bfloat16 operands."""
        whole = self.problem.dtype == "float32" and self.problem.precision in ("high", "highest")
        return lax.Precision.HIGHEST if whole else lax.Precision.DEFAULT

    @property
    def pair_names(self) -> tuple[str, ...]:
        return self.rules.pairs

    def dot(self, a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        """Product of two tiles over one axis each, float32."""
        numbers = (((axes[0],), (axes[1],)), ((), ()))
        return lax.dot_general(
            a, b, numbers, precision=self.precision, preferred_element_type=jnp.float32
        )

    def numbers(self, products: jax.Array) -> jax.Array:
        """Logits in units of ``log2_unit``: products, or tanh of what is capped.

        What is subtracted from them is, before the difference is scaled: the largest logit then
        counts exactly, however large it is.
        """
        cap = self.problem.soft_cap
        if cap is None:
            return products if sign(self.problem) > 0.0 else -products
        return jnp.tanh(products * (self.problem.scale / cap))

    def compiler_params(self, semantics: Sequence[Any], vmem: int) -> Any:
        limit = min(self.chip.vmem, max(vmem, 16 * 2**20))
        return pltpu.CompilerParams(
            dimension_semantics=tuple(semantics), vmem_limit_bytes=int(limit)
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
