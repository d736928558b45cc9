"""What the launches of a ragged call have in common: the sizes of its tiles and partial results."""

from __future__ import annotations

from dataclasses import dataclass

from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.kernels.triton.page_attention.launch import CacheLaunch
from ejkernel.kernels.triton.ragged_page_attention.groups import Layout
from ejkernel.kernels.triton.ragged_page_attention.tiles import Tiles, decode_shares, fair_parts
from ejkernel.kernels.triton.targets import Target
from ejkernel.types.serving.problem import RaggedProblem

MAX_LANES = 1024  # sequences that a program looks at at once


@dataclass(frozen=True)
class RaggedLaunch(CacheLaunch):
    """Common to the kernels of a ragged call.

    Attributes:
        target: the chip whose size decides the number of partial results.
    """

    problem: RaggedProblem
    tiles: Tiles
    target: Target

    @property
    def fair(self) -> int:
        """Most partial results of tiles whose keys are split."""
        return fair_parts(self.problem, self.tiles, self.target)

    @property
    def decode_shares(self) -> int:
        """Equal parts of the keys of decoded sequences."""
        return decode_shares(self.problem, self.tiles, self.target)

    @property
    def lanes(self) -> int:
        """Sequences that a program looks at at once."""
        return min(MAX_LANES, power_of_two(self.problem.sequences))

    @property
    def chunks(self) -> int:
        """Tiles for the query heads of a kv head."""
        return -(-self.tiles.group // self.tiles.members)

    def layout(self) -> Layout:
        """Returns the rows of a tile."""
        p, t = self.problem.paged, self.tiles
        return Layout(p.heads, p.kv_heads, self.chunks, t.rows, t.tile, t.members)
