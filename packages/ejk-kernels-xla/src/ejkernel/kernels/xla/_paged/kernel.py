"""What kernels of one token a row have in common: their tiles, and which rows see which keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.xla._common.tiles import Steps
from ejkernel.kernels.xla._paged.layouts import Tables
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.types.arrays import at_most

LEAST_SHARE = 16


@dataclass(frozen=True)
class Splits(Steps):
    """Shares of a row's keys, and pages of a step."""

    num_splits: int = 1
    pages_per_block: int | None = None


@dataclass(frozen=True)
class Groups(Steps):
    """Pages of a step, and query rows of a tile."""

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None


class SplitKernel(XlaKernel):
    """A kernel of ``Splits``: XLA walks the blocks of all rows together, so one split is best."""

    partitioned = True  # the compiler would end the loops of all devices together

    def choose(self, problem: Any, target: Any) -> Splits:
        return Splits()


class GroupKernel(XlaKernel):
    """A kernel of ``Groups``, which follow from the shapes."""

    def choose(self, problem: Any, target: Any) -> Groups:
        return Groups()


def split_count(table: Tables, requested: int | None, configured: int) -> int:
    """Returns the number of splits: what the call requests, else what the config says.

    The call may request one token each. A config gets ``LEAST_SHARE`` tokens each, because every
    split of every row has a partial result in memory.
    """
    splits, least = (configured, LEAST_SHARE) if requested is None else (requested, 1)
    return max(at_most(splits, -(-table.capacity // least)), 1)
