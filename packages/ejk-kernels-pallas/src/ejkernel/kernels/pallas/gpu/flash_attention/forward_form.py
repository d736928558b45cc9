"""Form: static properties of one compiled forward kernel, and the arithmetic of its logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ejkernel.kernels.pallas.common.units import unit
from ejkernel.kernels.pallas.gpu.flash_attention.tiles import ForwardTiles
from ejkernel.types.attention.problem import LOG2E, Problem
from ejkernel.types.masks.structure import Rules

MEMBER = "member"  # the axis of programs in a cluster
RANGE = (2.0**-100, 2.0**110)  # of the sums of rows that are exact without a shift


@dataclass(frozen=True)
class Form:
    """One compiled form of the kernel.

    Attributes:
        problem, tiles: what is computed and how.
        operands: names of the operands in addition to q, k and v: ``ranges`` int32 [#b, #h, blocks,
            4], ``lists`` and ``bits`` (see ``lists``), with ``order``, ``q_ids`` and ``kv_ids``
            int32 [#b, padded length], ``sink`` float32 [#b, h], ``order`` as ``known_order`` makes
            it, ``factors`` of scales (see ``forward_softmax.factors``).
        unshifted: exponentials are of logits as they are. Where a sum is outside of ``RANGE``,
            that was not exact, and the tile is computed again, shifted.
    """

    problem: Problem
    tiles: ForwardTiles
    operands: tuple[str, ...]
    unshifted: bool = False

    @property
    def rules(self) -> Rules:
        return self.problem.rules

    @property
    def log2_unit(self) -> float:
        """Positive factor of base-2 logits: of tanh of capped ones, else of dot products."""
        return unit(self.problem) * LOG2E

    @property
    def fused(self) -> bool:
        """Returns whether probabilities are exponentials of one multiply-add (see ``softmax``)."""
        if self.shift is not None or self.problem.dtype == "float16":
            return False
        if self.eight_bit:
            return True
        # wide heads have no registers for its row state: they spill and lose 14%
        return max(self.problem.dim, self.problem.value_dim) <= 128

    @property
    def eight_bit(self) -> bool:
        return self.problem.itemsize == 1

    @property
    def scaled(self) -> bool:
        """Returns whether logits and values of a head have factors that the kernel reads."""
        return self.eight_bit or "factors" in self.operands

    @property
    def p_exponent(self) -> float:
        """Probabilities of 8 bits are multiplied by 2 to this power, to at most 2^8.

        Below 2^-6 a float8_e4m3fn loses precision.
        """
        return 8.0 - self.tiles.slack

    @property
    def lane_sums(self) -> bool:
        """Returns whether each of the four lanes of a row keeps the sum of its own elements."""
        # pairs of programs and their 160 keys: a lane's own sums gain nothing next to its maxima
        keeps = self.tiles.lane_maxima and self.tiles.cluster == 1
        return self.unshifted or (keeps and self.shift is None)

    @property
    def large_logit(self) -> float:
        """Dot product whose base-2 logit is 2^30: rows with such maxima have ``large_unit``."""
        return min(2.0**30 / self.log2_unit, float(np.finfo(np.float32).max))

    @property
    def large_unit(self) -> float:
        """A power of two in place of ``log2_unit`` (see ``softmax_step``); finite logits stay
        finite."""
        return 2.0 ** math.floor(math.log2(unit(self.problem)))

    @property
    def shift(self) -> float | None:
        """Constant shift of capped base-2 logits; None if they are shifted by the rows' maxima.

        They lie in [-c, c]. Up to c = 80 (a cap of 55) exponentials so shifted lie in
        [2^-80, 2^80], and float32 leaves 2^46 on either side for values and for the number of keys.
        float16 lacks that range for p.
        """
        p, c = self.problem, math.ceil(self.log2_unit)
        if p.soft_cap is None or c > 80 or p.dtype != "bfloat16":
            return None
        return float(min(c, 80 - c))

    @property
    def listed(self) -> bool:
        """Returns whether tiles visit lists of blocks."""
        return "lists" in self.operands

    @property
    def read(self) -> bool:
        """Returns whether the blocks of a tile are read from memory."""
        return self.listed or self.rules.arrays

    @property
    def masks(self) -> bool:
        """Returns whether any block may need an element mask."""
        ragged = self.problem.kv_len % self.tiles.block_kv != 0
        return ragged or self.read or not self.rules.band.empty
