"""The mask of some of the query rows of a call."""

from __future__ import annotations

from functools import reduce
from typing import Any

import jax.numpy as jnp

from ejkernel.types.masks.fields import has_positions, with_private
from ejkernel.types.masks.mask_info import MaskInfo


def slice_queries(mask: MaskInfo, first: Any, q_len: int, kv_len: int) -> MaskInfo:
    """Returns the mask of ``q_len`` rows that begin at row ``first``, which may be traced.

    Arrays of ``mask`` have these rows already. Rules between indices become rules between
    positions, as an offset that is traced cannot be part of a rule.
    """
    positions = {
        "q_positions": (first + jnp.arange(q_len, dtype=jnp.int32))[None],
        "kv_positions": jnp.arange(kv_len, dtype=jnp.int32)[None],
    }

    def of_rows(term: MaskInfo) -> MaskInfo:
        by_index = not term.rule.trivial and not has_positions(term)
        return with_private(term, _and=(), **(positions if by_index else {}))

    return reduce(lambda a, b: a & b, map(of_rows, mask.terms))
