"""Block-sparse attention against the float64 oracle with the pattern written out densely."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import blocksparse_attention, flash_attention
from ejkernel.kernels.xla.blocksparse_attention import tiles
from ejkernel.kernels.xla.blocksparse_attention.pattern import Grid, HeadMask
from ejkernel.types import InvalidArgument, MaskInfo, combine_masks
from ejkernel.types.masks.prepare import Tiling
from ejktest.attention import Call, arrays, check, run
from ejktest.drawn import array
from ejktest.grids import cover

IDS = np.array([[0] * 11 + [3] * 18 + [-1] * 4 + [1] * 7, [2] * 40], np.int32)
HEAD_DENSE = np.random.default_rng(2).random((1, 4, 40, 40)) < 0.6


def pattern(call: Call, blocks: tuple[int, int], lead: tuple[int, ...], seed: int = 3):
    """A random pattern with an empty row of blocks, and what it means pair by pair."""
    counts = [-(-n // b) for n, b in zip((call.q, call.k), blocks, strict=True)]
    chosen = np.random.default_rng(seed).random((*lead, *counts)) < 0.5
    chosen[..., 0, :] = False
    dense = np.kron(chosen, np.ones(blocks, bool))[..., : call.q, : call.k]
    return chosen, dense


def sparse(chosen, blocks, *args, also=None, q_segment_ids=None, **options):
    """The operation; ``also`` is what only the oracle needs."""
    if q_segment_ids is not None:
        options["mask_info"] = MaskInfo(q_segment_ids=q_segment_ids, kv_segment_ids=q_segment_ids)
    q_block, kv_block = blocks
    return blocksparse_attention(
        *args, block_mask=jnp.asarray(chosen), q_block_size=q_block, kv_block_size=kv_block,
        **options,
    )  # fmt: skip


CASES = [
    (Call("heads", hk=2, d=8, mask={"causal": True}, sinks=(4, 2), cap=2.0), (16, 8), (2, 4)),
    (
        Call("shared", q=50, k=37, d=8, dv=12, bias=(1, 1), dropout=0.3, mask={"chunk_size": 20}),
        (24, 10),
        (),
    ),
    (
        Call("masks", d=8, bias=(2, 4), mask={"attention_mask": HEAD_DENSE, "q_segment_ids": IDS}),
        (8, 16),
        (1, 4),
    ),
    (Call("rows", h=2, hk=1, d=8, sinks=(2,), mask={"sliding_window": (9, 3)}), (10, 40), (2, 1)),
    (Call("bfloat16", dtypes=("bfloat16",) * 3, hk=1, mask={"causal": True}), (16, 32), (1, 1)),
]


@pytest.mark.parametrize(
    ("call", "blocks", "lead"),
    cover(CASES, *(c for c in CASES if str(c[0]) not in ("shared", "rows"))),
    ids=[str(c[0]) for c in CASES],
)
def test_against_oracle(call: Call, blocks: tuple[int, int], lead: tuple[int, ...]) -> None:
    chosen, dense = pattern(call, blocks, lead)
    x, full = arrays(call), Call(**{**call.__dict__, "mask": {**call.mask, "also": dense}})
    check(full, x, *run(partial(sparse, chosen, blocks), full, x))


def problem(seed: int = 0, heads: int = 4, length: int = 256):
    rng = np.random.default_rng(seed)
    q, k, v = (
        array(rng.standard_normal((2, length, h, 8)), jnp.float32)
        for h in (heads, heads // 2, heads // 2)
    )
    return q, k, v, array(rng.random((2, heads, length // 64, length // 64)) < 0.4)


def value_and_grad(q, k, v, chosen):
    def loss(q, k, v):
        o = blocksparse_attention(q, k, v, block_mask=chosen, q_block_size=64, kv_block_size=64)
        return jnp.sin(o).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def close(a, b) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5), a, b)


@cache
def dense_values_and_gradients():
    """Returns values and gradients of flash attention, the pattern of ``problem`` as a mask."""
    q, k, v, chosen = problem(length=128)
    dense = jnp.repeat(jnp.repeat(chosen, 64, -1), 64, -2)

    def loss(q, k, v):
        return jnp.sin(flash_attention(q, k, v, attention_mask=dense)).sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)


@pytest.mark.parametrize("multiply_adds", [1, 3 * 2 * 64 * 64 * 8])
def test_heads_walked_one_by_one_or_together(monkeypatch, multiply_adds: int) -> None:
    """The number of heads that share a step changes nothing."""
    expected = dense_values_and_gradients()
    monkeypatch.setattr(tiles, "STEP_MULTIPLY_ADDS", multiply_adds)
    close(jax.jit(lambda *args: value_and_grad(*args))(*problem(length=128)), expected)


@pytest.mark.parametrize("multiply_adds", [1, 2**20])
def test_vmap_over_calls_and_patterns(monkeypatch, multiply_adds: int) -> None:
    """Calls that are mapped visit tiles of each other, which must stay hidden."""
    monkeypatch.setattr(tiles, "STEP_MULTIPLY_ADDS", multiply_adds)
    args = [problem(i, heads=2, length=128) for i in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *args)
    single = jax.jit(value_and_grad)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *[single(*a) for a in args])
    close(jax.jit(jax.vmap(value_and_grad))(*stacked), expected)


@pytest.mark.parametrize("by_key", [False, True])
def test_visits_are_the_tiles_with_a_visible_pair(by_key: bool) -> None:
    """By the pattern, causality and segments together; heads of one group share their union."""
    rng = np.random.default_rng(0)
    chosen = rng.random((1, 4, 6, 6)) < 0.3
    ids = np.repeat([0, 1], [48, 48])[None]
    mask = combine_masks(
        MaskInfo(q_segment_ids=ids, kv_segment_ids=ids), causal=True, q_len=96, kv_len=96
    )
    grid = Grid(Tiling(96, 96, 16, 16), 16, 16, 2, 2)
    made = HeadMask.build(grid, mask, jnp.asarray(chosen), by_key=by_key, together=True)
    i = np.arange(6)
    seen = chosen & (i[:, None] >= i) & (i[:, None] // 3 == i // 3)
    seen = seen.reshape(1, 2, 2, 6, 6).any(2)
    np.testing.assert_array_equal(made.seen, seen)
    visits = seen.swapaxes(-1, -2) if by_key else seen
    np.testing.assert_array_equal(made.count, visits.sum(-1))
    for head in range(2):
        for outer in range(6):
            n = int(made.count[0, head, outer])
            inner = np.asarray(made.inner[0, head, outer, :n])
            np.testing.assert_array_equal(inner, np.flatnonzero(visits[0, head, outer]))
    assert (np.diff(np.take_along_axis(made.count, made.order, -1)) <= 0).all()


@pytest.mark.parametrize(
    ("block", "length", "tile"),
    [(128, 4096, 128), (16, 4096, 64), (48, 4096, 48), (512, 4096, 256), (1009, 4096, 128),
     (128, 40, 40), (1, 100, 64), (300, 3000, 150)],
)  # fmt: skip
def test_tiles_fit_the_pattern(block: int, length: int, tile: int) -> None:
    assert tiles.tile_of(block, length) == tile


def test_empty_and_missing_patterns() -> None:
    q, k, v, _ = problem(heads=2, length=128)
    none = jnp.zeros((1, 1, 1, 1), bool)
    o, lse = blocksparse_attention(q, k, v, block_mask=none, return_lse=True)
    assert (o == 0).all() and (lse == -jnp.inf).all()
    close(blocksparse_attention(q, k, v), flash_attention(q, k, v))
    built = blocksparse_attention(q, k, v, mask_builder=lambda *sizes: np.ones((1, 1), bool))
    close(built, flash_attention(q, k, v))
    assert blocksparse_attention(q[:, :0], k, v).shape == (2, 0, 2, 8)
    assert (blocksparse_attention(q, k[:, :0], v[:, :0]) == 0).all()


def test_bad_patterns() -> None:
    q, k, v, _ = problem(heads=2, length=128)
    with pytest.raises(InvalidArgument, match=r"block_mask: expected bool\[.., 1, 1\]"):
        blocksparse_attention(q, k, v, block_mask=jnp.ones((1, 1, 2, 1), bool))
    with pytest.raises(InvalidArgument, match="block_mask"):
        blocksparse_attention(q, k, v, block_mask=jnp.ones((1, 1)))
    with pytest.raises(ValueError, match="mask_builder: given together"):
        blocksparse_attention(q, k, v, block_mask=jnp.ones((1, 1), bool), mask_builder=lambda *a: 0)
    with pytest.raises(ValueError, match="kv_block_size: given 0"):
        blocksparse_attention(q, k, v, kv_block_size=0)
