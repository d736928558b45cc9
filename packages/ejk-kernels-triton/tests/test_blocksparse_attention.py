"""Block-sparse attention's walks, run by Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.attention_cases import Call, arrays, check, run

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import blocksparse_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types import MaskInfo


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


IDS = np.array([[0] * 11 + [3] * 18 + [-1] * 4 + [1] * 7, [2] * 40], np.int32)
DENSE = np.random.default_rng(2).random((1, 1, 40, 40)) < 0.6


def some_blocks(kind: str, rows: int, columns: int, *lead: int) -> np.ndarray:
    """A pattern of a kind, bool ``[*lead, rows, columns]``."""
    chosen = np.zeros((*lead, rows, columns), bool)
    if kind == "random":  # with an empty row, and another one for each head
        chosen = np.random.default_rng(3).random(chosen.shape) < 0.5
        chosen[..., 0, :] = False
    elif kind == "all":
        chosen[:] = True
    elif kind == "diagonal":
        chosen |= np.eye(rows, columns, dtype=bool)
    elif kind == "column":
        chosen[..., 1] = True
    elif kind == "row":
        chosen[..., 1, :] = True
    return chosen


def sparse(chosen, blocks, *args, also=None, q_segment_ids=None, **options):
    """The operation; ``also`` is what only the oracle needs."""
    if q_segment_ids is not None:
        options["mask_info"] = MaskInfo(q_segment_ids=q_segment_ids, kv_segment_ids=q_segment_ids)
    q_block, kv_block = blocks
    return blocksparse_attention(
        *args, block_mask=jnp.asarray(chosen), q_block_size=q_block, kv_block_size=kv_block,
        **options,
    )  # fmt: skip


def small(name: str, **fields) -> Call:
    return Call(name, **{"b": 1, "h": 2, "hk": 2, "d": 16, "blocks": (16, 16), **fields})


CAUSAL = {"causal": True}
# tiles are of 16 rows and 16 keys: blocks above, equal to and below them, and across
CASES = [
    (small("above", mask=CAUSAL), (32, 32), "random", (1, 2)),
    (
        small("equal", b=2, h=4, hk=2, mask=CAUSAL, sinks=(4, 2), cap=2.0),
        (16, 16),
        "random",
        (2, 4),
    ),
    (small("below", mask=CAUSAL), (8, 4), "random", ()),
    (small("across", q=50, k=37, dv=24, bias=(1, 1), dropout=0.3), (24, 10), "random", (1, 2)),
    (small("none"), (16, 16), "none", ()),
    (small("all", mask=CAUSAL), (16, 16), "all", ()),
    (small("diagonal"), (16, 16), "diagonal", ()),
    (small("column"), (16, 16), "column", ()),
    (small("row", hk=1), (16, 16), "row", (1, 1)),
    (
        small("masks", b=2, bias=(2, 2), mask={"attention_mask": DENSE, "q_segment_ids": IDS}),
        (8, 32),
        "random",
        (1, 2),
    ),
    (
        small("window", b=2, mask={"sliding_window": (9, 3), "chunk_size": 20}),
        (16, 32),
        "random",
        (),
    ),
    (small("bfloat16", dtypes=("bfloat16",) * 3, hk=1, mask=CAUSAL), (16, 32), "random", (1, 2)),
]


@pytest.mark.parametrize(("call", "blocks", "kind", "lead"), CASES, ids=[str(c[0]) for c in CASES])
def test_against_oracle(call: Call, blocks: tuple[int, int], kind: str, lead) -> None:
    counts = [-(-n // b) for n, b in zip((call.q, call.k), blocks, strict=True)]
    chosen = some_blocks(kind, *counts, *lead)
    dense = np.kron(chosen, np.ones(blocks, bool))[..., : call.q, : call.k]
    dense = dense[None, None] if dense.ndim == 2 else dense
    x, full = arrays(call), Call(**{**call.__dict__, "mask": {**call.mask, "also": dense}})
    check(full, x, *run(partial(sparse, chosen, blocks), full, x))
