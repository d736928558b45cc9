"""Static properties of the kernels of the selected branch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.attention.problem import LOG2E
from ejkernel.types.problems.selected_blocks import SelectedProblem

TINY = 2.0**-120


def padded(n: int) -> int:
    """Returns the power of two that holds ``n`` rows or columns of a matmul."""
    return max(16, power_of_two(n))


@dataclass(frozen=True)
class Problem(SelectedProblem):
    """Static properties of a call of the selected branch, with what the kernels derive of them."""

    @property
    def entries(self) -> int:
        """Entries in the lists of all tokens of one batch row and key head."""
        return self.length * self.slots

    @property
    def slope(self) -> float:
        """Factor of scores in base 2; never 0, so that keys hidden at -inf stay so."""
        return max(abs(self.scale) * LOG2E, TINY)

    @property
    def sign(self) -> float | None:
        """Factor of scores before the slope; None = 1."""
        return None if self.scale > 0.0 else -1.0 if self.scale < 0.0 else 0.0

    @property
    def precision(self) -> str:
        """Precision of float32 matmuls, as Triton names it."""
        return "tf32"

    @property
    def stores_ds(self) -> bool:
        """True where dk's kernel stores ds for dq's: half the reads and a third of the matmuls.

        ``at_once`` bounds the memory, one key head at least.
        """
        return self.itemsize == 2 and self._ds_entries <= min(8, 4 * self.kv_heads) * self.dim

    @property
    def at_once(self) -> int:
        """Key heads of a launch of the backward pass, whose ds fits in four arrays of queries."""
        if not self.stores_ds:
            return self.kv_heads
        return min(self.kv_heads, self.kv_heads * 4 * self.dim // self._ds_entries)

    @property
    def _ds_entries(self) -> int:
        """Entries of ds for a token and query head."""
        return power_of_two(self.slots) * self.size

    def parts(self, keys: int) -> int:
        """Returns the number of tiles of ``keys`` keys in a block."""
        return math.ceil(self.size / keys)
