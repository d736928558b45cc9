"""What one ragged call computes, as static properties: hashable, so that it can key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from ejkernel.kernels.triton.page_attention.problem import Problem
from ejkernel.kernels.triton.page_attention.problem import problem_of as paged_problem_of
from ejkernel.kernels.triton.page_attention.tiles import query_rows

MOST_TOKENS = 8  # rows of a sequence in one decoding step: keys are read once for all of them


class Long(Protocol):
    """A kernel for sequences of at least ``least`` new tokens; hashable.

    It gets them where a call has at least ``enough`` tokens of such sequences, which only the
    device knows; ``single``: it may get those of one new token besides. Its result is given to the
    kernels here, which write all other rows. Its tiles are ``block_q`` packed rows of one sequence
    and query head; ``block_kv`` keys are a step of them.
    """

    @property
    def least(self) -> int: ...

    @property
    def enough(self) -> int: ...

    @property
    def single(self) -> bool: ...

    @property
    def block_q(self) -> int: ...

    @property
    def block_kv(self) -> int: ...

    def __call__(
        self, q: jax.Array, cache: jax.Array, tables: jax.Array, lines: jax.Array, own: jax.Array
    ) -> jax.Array:
        """o ``[T, h, d]`` in the rows of the sequences that it has.

        lines int32 ``[tiles + 1, 8]``, in the order in which they are to be worked on: sequence,
        row, first and last row of the sequence, its length; tiles before its sequence and of it;
        query heads that are worked on together. A tile begins at a multiple of 8 rows. Those of a
        sequence stand together, the last rows first. Lines without a tile have 0 tiles, and so has
        the last.

        own int32 ``[n, 3]``: of every sequence its first row; its length if it has one row and is
        to be decoded here, else 0; how many programs are to decode.
        """
        ...


@dataclass(frozen=True)
class Ragged:
    """Sizes, dtypes and options of one call.

    Attributes:
        paged: the facts of its decoded sequences, one batch row each.
        rows: packed query rows.
        written: dtypes of new keys and values, of the operation that writes them.
    """

    paged: Problem
    rows: int
    written: tuple[str, ...] = ()

    @property
    def sequences(self) -> int:
        return self.paged.batch


def problem_of(a: Mapping[str, Any], cache: str, lengths: str, kv_heads: int) -> Ragged:
    """The static properties of a call whose arguments are canonical."""
    q, kv, table, n = a["queries"], a[cache], a["block_tables"], a[lengths].shape[0]
    rows, heads, dim = q.shape
    # packed: [pages, page size, groups, packing, padded dim]
    held, width = int(np.prod(kv.shape[2:-1])), kv.shape[-1]
    paged = paged_problem_of(
        a,
        q,
        kv,
        kv,
        batch=n,
        kv_heads=kv_heads,
        value_dim=dim,
        max_pages=table.shape[1] if table.ndim == 2 else table.shape[0] // max(n, 1),
        form=(held // 2, 2 * width),
    )
    if 0 in (heads, kv_heads):
        return Ragged(paged, rows)
    held_rows, chunks = query_rows(paged)
    fit = held_rows // paged.group if chunks == 1 else 1
    return Ragged(replace(paged, tokens=max(1, min(fit, MOST_TOKENS, rows))), rows)
