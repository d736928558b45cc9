"""Rows that see no key."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo
from ejkernel.types.masks.combine import mask_of
from ejkernel.types.masks.hidden import clear_dead_rows

B, S, H, D = 1, 3, 2, 4
HIDDEN, SEEN, NAN = -np.inf, 0.5, np.nan


@pytest.mark.parametrize("by_head", ["", "biased", "masked"])
def test_rows_without_a_key_are_zero(by_head):
    """Rows that are NaN are kept, and with a bias or a mask by head those of one head alone."""
    q = do = jnp.full((B, S, H, D), jnp.nan)
    lse = jnp.array([[[HIDDEN, NAN, SEEN], [HIDDEN, SEEN, HIDDEN]]])  # head, row
    ids = jnp.array([[-1, 0, 0]], jnp.int32)
    mask_info = MaskInfo.from_segments(ids, ids)
    call = {"query": q, "key": q, "mask_info": mask_info}
    if by_head == "masked":
        call["attention_mask"] = jnp.ones((B, H, S, S), bool)
    cleared = clear_dead_rows(
        mask_of(call), S, lse, q, do, jnp.ones((B, H, S)), biased=by_head == "biased"
    )
    rows = [[0, 1, 1], [0, 1, 1]]  # of a mask for all heads
    if by_head:
        rows = [[0, 1, 1], [0, 1, 0]]
    for x in (cleared[0], cleared[1]):
        kept = jnp.isnan(x).all(-1).swapaxes(1, 2)[0]
        np.testing.assert_array_equal(kept, rows)
        assert (x[~jnp.isnan(x)] == 0).all()
    np.testing.assert_array_equal(cleared[2][0], rows)
