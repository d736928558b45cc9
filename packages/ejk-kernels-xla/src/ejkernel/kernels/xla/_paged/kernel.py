"""Bases of paged kernels: their tile sizes and number of splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels.xla._common.tiles import Steps
from ejkernel.kernels.xla._paged.layouts import Tables
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.types.arrays import at_most

MIN_SPLIT_TOKENS = 16


@dataclass(frozen=True)
class Splits(Steps):
    """Number of splits of a row's keys, and pages per step."""

    num_splits: int = 1
    pages_per_block: int | None = None


@dataclass(frozen=True)
class Groups(Steps):
    """Pages per step, and query rows per tile."""

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None


class SplitKernel(XlaKernel):
    """A kernel of ``Splits``: one XLA loop covers the blocks of all rows, so one split is best."""

    by_rows = True
    partitioned = True  # the compiler would end the loops of all devices together

    def choose(self, problem: Any, target: Any) -> Splits:
        return Splits()


class GroupKernel(XlaKernel):
    """A kernel of ``Groups``, which follow from the shapes.

    Batch-invariant calls have a loop for every tile of rows (``ragged.shape_of_sequences``).
    """

    def variant_reason(self, problem: Any) -> str | None:
        return None

    def choose(self, problem: Any, target: Any) -> Groups:
        return Groups()


def split_count(table: Tables, requested: int | None, configured: int) -> int:
    """Returns the number of splits: what the call requests, else what the config says.

    The call may request one token each. A config gets ``MIN_SPLIT_TOKENS`` tokens each, because
    every split of every row has a partial result in memory.
    """
    splits, least = (configured, MIN_SPLIT_TOKENS) if requested is None else (requested, 1)
    return max(at_most(splits, -(-table.capacity // least)), 1)
