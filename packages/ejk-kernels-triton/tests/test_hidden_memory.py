"""What nobody sees may be NaN, as far as the Triton kernels promise it, by Triton's interpreter.

Not keys and values past the last sequence in a block that others see: see the operation's page.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ejktest.hidden import check, normal

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import flash_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode

LENGTH, BLOCK = 40, 16
BLOCKS = {n: BLOCK for n in ("q_blocksize", "kv_blocksize", "blocksize_m", "blocksize_n")}
CFG = {"fwd_params": {n: BLOCK for n in ("q_blocksize", "kv_blocksize")}, "bwd_params": BLOCKS}
QKV = {n: normal(i, 1, LENGTH, 1, 16) for i, n in enumerate(("query", "key", "value"))}


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


def blocks_of(rows: np.ndarray) -> np.ndarray:
    """Returns the marked rows whose full block is marked."""
    blocks = np.pad(rows, (0, -len(rows) % BLOCK), constant_values=True).reshape(-1, BLOCK)
    return blocks.all(axis=1).repeat(BLOCK)[: len(rows)]


@pytest.mark.parametrize("dead", ["behind the last sequence", "before the first key"])
def test_rows_that_see_no_key_and_blocks_that_nobody_sees(dead: str) -> None:
    rows = np.arange(LENGTH)
    if dead == "behind the last sequence":
        queries = unseen = rows >= 27
        options = {"cum_seqlens_q": np.array([0, 6, 27], np.int32)}
    else:
        queries, unseen = rows < 21, rows >= LENGTH - 21
        options = {"causal_offset": -21}
    function = partial(flash_attention, causal=True, cfg=CFG, **options)
    check(function, QKV, queries, blocks_of(unseen))


def test_nan_that_a_row_sees_is_in_its_lse() -> None:
    """-inf would say that it saw nothing, and whoever merges it with others would drop it."""
    key = QKV["key"].at[0, 20].set(np.nan)
    o, lse = flash_attention(**{**QKV, "key": key}, causal=True, return_lse=True, cfg=CFG)
    for x in (o, lse):
        rows = np.isnan(x).reshape(LENGTH, -1)
        assert rows[20:].all() and not rows[:20].any()
