"""Block-sparse attention's loops, run by Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejktest.attention import Call, arrays, check, run

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import blocksparse_attention, flash_attention
from ejkernel.kernels.triton.flash_attention.lists import element_mask_for_lists, list_operands
from ejkernel.kernels.triton.flash_attention.static_lists import build_static_list
from ejkernel.kernels.triton.flash_attention.tiles import Tiles
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types.attention.problem import Problem
from ejkernel.types.masks.pattern import inside_blocks
from ejkernel.types.masks.structure import split_mask
from ejktest.drawn import array
from ejktest.grids import without


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(cuda_target(80)):
        yield


IDS = np.array([[0] * 11 + [3] * 18 + [-1] * 4 + [1] * 7, [2] * 40], np.int32)
DENSE = np.random.default_rng(2).random((1, 1, 40, 40)) < 0.6


KINDS = ("none", "all", "diagonal", "column", "row")


def random_blocks(rows: int, columns: int, *lead: int) -> np.ndarray:
    """With an empty row, bool ``[*lead, rows, columns]``."""
    chosen = np.random.default_rng(3).random((*lead, rows, columns)) < 0.5
    chosen[..., 0, :] = False
    return chosen


def blocks_of(kind: str, rows: int, columns: int) -> np.ndarray:
    if kind == "diagonal":
        return np.eye(rows, columns, dtype=bool)
    chosen = np.full((rows, columns), kind == "all")
    if kind == "column":
        chosen[:, 1] = True
    if kind == "row":
        chosen[1] = True
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
    (small("above", mask=CAUSAL), (32, 32), (1, 2)),
    (small("equal", h=4, mask=CAUSAL, sinks=(4, 2), cap=2.0), (16, 16), (1, 4)),
    (small("below", mask=CAUSAL), (8, 4), ()),
    (small("across", q=50, k=37, dv=24, bias=(1, 1), dropout=0.3), (24, 10), (1, 2)),
    (small("kinds", h=len(KINDS), hk=len(KINDS)), (16, 16), (1, len(KINDS))),
    (
        small("masks", b=2, bias=(2, 2), mask={"attention_mask": DENSE, "q_segment_ids": IDS}),
        (8, 32),
        (1, 2),
    ),
    (small("window", b=2, mask={"sliding_window": (9, 3), "chunk_size": 20}), (16, 32), ()),
    (small("bfloat16", dtypes=("bfloat16",) * 3, hk=1, mask=CAUSAL), (16, 32), (1, 2)),
]


@pytest.mark.parametrize(
    ("call", "blocks", "lead"),
    without(CASES, *(c for c in CASES if str(c[0]) in ("below", "window"))),
    ids=[str(c[0]) for c in CASES],
)
def test_against_oracle(call: Call, blocks: tuple[int, int], lead: tuple[int, ...]) -> None:
    counts = [-(-n // b) for n, b in zip((call.q, call.k), blocks, strict=True)]
    chosen = random_blocks(*counts, *lead)
    if call.name == "kinds":
        chosen = np.stack([blocks_of(kind, *counts) for kind in KINDS])[None]
    dense = np.kron(chosen, np.ones(blocks, bool))[..., : call.q, : call.k]
    dense = dense[None, None] if dense.ndim == 2 else dense
    x, full = arrays(call), Call(**{**call.__dict__, "mask": {**call.mask, "also": dense}})
    check(full, x, *run(partial(sparse, chosen, blocks), full, x))


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("rule", [{"causal": True}, {"sliding_window": (30, 9)}])
@pytest.mark.parametrize("lead", [(1, 1), (2, 4)])
def test_lists_of_a_known_pattern_are_those_of_the_device(lead, rule, by_key) -> None:
    q_len, kv_len, blocks, tile = 90, 75, (16, 16), Tiles(16, 8)
    chosen = random_blocks(6, 5, *lead)
    chosen[..., 1] = chosen[..., 3, :] = True  # long programs
    mask = combine_masks(q_len=q_len, kv_len=kv_len, **rule)
    p = Problem(
        2, q_len, kv_len, 4, 2, 16, 16, "float32", 1.0,
        pattern_blocks=blocks, rules=split_mask(mask)[0],
    )  # fmt: skip
    static = build_static_list(p, mask, chosen, tile, by_key=by_key)
    assert static is not None
    found = list_operands(p, mask, chosen, tile, by_key=by_key)
    assert {n: (x.shape, x.dtype) for n, x in found.items()} == {
        n: (x.shape, x.dtype) for n, x in static.items()
    }
    np.testing.assert_array_equal(found["order"], static["order"])
    counts = static["listed"][..., 1]
    written = np.arange(static["listed"].shape[-1]) < counts[..., None] + 2
    np.testing.assert_array_equal(np.where(written, found["listed"], 0), static["listed"])


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("tile", [(16, 16), (32, 8)])
def test_lists_name_the_tiles_that_anybody_sees(tile: tuple[int, int], by_key: bool) -> None:
    """Lists begin with the tiles that need no element mask; hidden tiles are not in them."""
    n, blocks = 96, (16, 16)
    chosen = random_blocks(6, 6, 1, 2)
    mask = combine_masks(causal=True, q_len=n, kv_len=n)
    p = Problem(
        1, n, n, 2, 2, 16, 16, "float32", 1.0, pattern_blocks=blocks, rules=split_mask(mask)[0]
    )
    found = list_operands(p, mask, jnp.asarray(chosen), Tiles(*tile), by_key=by_key)
    masked, covers = element_mask_for_lists(p, jnp.asarray(chosen), None, Tiles(*tile))
    assert ("mask" in masked) == (tile != (16, 16))
    assert covers == ((*blocks, tile[1]) if masked else (1, 1, 0))
    any_seen = every = True
    for seen in (np.kron(chosen, np.ones(blocks, bool)), np.tri(n, dtype=bool)[None, None]):
        cut = (n // tile[0], tile[0], n // tile[1], tile[1])
        tiles = seen.reshape(*seen.shape[:2], *cut).swapaxes(3, 4)
        any_seen, every = any_seen & tiles.any((-2, -1)), every & tiles.all((-2, -1))
    if by_key:
        any_seen, every = any_seen.swapaxes(-1, -2), every.swapaxes(-1, -2)
    for head, block in np.ndindex(any_seen.shape[1:3]):
        full, count, *row = np.asarray(found["listed"][0, head, block])
        np.testing.assert_array_equal(row[:full], np.flatnonzero(every[0, head, block]))
        partly_seen = np.flatnonzero(any_seen[0, head, block] & ~every[0, head, block])
        np.testing.assert_array_equal(row[full:count], partly_seen)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "blocks, tile", [((16, 16), (64, 32)), ((48, 20), (32, 64)), ((16, 128), (64, 64))]
)
def test_bits_of_words_are_the_blocks_of_a_tile(blocks, tile, known: bool) -> None:
    n = 200
    chosen = random_blocks(*(-(-n // size) for size in blocks), 1, 2)
    p = Problem(1, n, n, 2, 2, 16, 16, "float32", 1.0, pattern_blocks=blocks)
    given = chosen if known else jnp.asarray(chosen)
    masked, covers = element_mask_for_lists(p, given, None, Tiles(*tile))
    assert covers == (*blocks, tile[1]) and isinstance(masked["mask"], np.ndarray) == known
    i, j = np.arange(n), np.arange(n)
    first = j // tile[1] * tile[1]
    words = np.asarray(masked["mask"])[:, :, i // blocks[0]][..., j // tile[1]]
    seen = words >> (j // blocks[1] - first // blocks[1]) & 1
    np.testing.assert_array_equal(seen, chosen[:, :, i // blocks[0]][..., j // blocks[1]])


def test_tiles_of_more_blocks_than_bits_are_read_by_elements() -> None:
    p = Problem(1, 96, 96, 2, 2, 16, 16, "float32", 1.0, pattern_blocks=(2, 2))
    masked, covers = element_mask_for_lists(p, random_blocks(48, 48, 1, 2), None, Tiles(64, 64))
    assert covers == (2, 2, 0) and masked["mask"].dtype == np.int8


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_long_rows_come_first(heads: int, by_key: bool) -> None:
    """Apart from them heads follow each other, with the longest blocks of a causal mask first."""
    n, h, hk = 12, 4, 2
    chosen = np.broadcast_to(blocks_of("diagonal", n, n), (1, heads, n, n)).copy()
    chosen[..., 0, 3, :] = chosen[..., -1, :, 2] = True
    mask = combine_masks(causal=True, q_len=16 * n, kv_len=16 * n)
    p = Problem(
        1, 16 * n, 16 * n, h, hk, 16, 16, "float32", 1.0,
        pattern_blocks=(16, 16), rules=split_mask(mask)[0],
    )  # fmt: skip
    found = list_operands(p, mask, jnp.asarray(chosen), Tiles(16, 16), by_key=by_key)
    work = np.broadcast_to(found["listed"][0, ..., 1], (heads if heads > 1 else h, n))
    if by_key:
        work = work.reshape(hk, -1, n).sum(1) if heads > 1 else work[:hk]
    blocks = np.arange(n) if by_key else np.arange(n)[::-1]
    natural = (np.arange(len(work))[:, None] * n + blocks).ravel()
    long = work.ravel()[natural] > 2 * (work.sum() // work.size) + 1
    assert 0 < long.sum() < 8
    expected = np.concatenate([natural[long], natural[~long]])
    np.testing.assert_array_equal(found["order"][0], expected)


def example(*lead: int):
    rng = np.random.default_rng(0)
    q, k, v = (array(rng.standard_normal((*lead, 1, 32, h, 16)), jnp.float32) for h in (2, 1, 1))
    return q, k, v, array(rng.random((*lead, 1, 2, 4, 2)) < 0.6)


TILES = dict.fromkeys(("q_blocksize", "kv_blocksize", "blocksize_m", "blocksize_n"), 16)


def gradients(q, k, v, chosen, **options):
    def loss(q, k, v):
        o = blocksparse_attention(
            q, k, v, block_mask=chosen, q_block_size=8, kv_block_size=16,
            cfg={"fwd_params": TILES, "bwd_params": TILES}, **options,
        )  # fmt: skip
        return jnp.sin(o).sum(), o

    return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)


def test_vmap_over_calls_and_patterns() -> None:
    q, k, v, chosen = example(2)
    mapped = jax.jit(jax.vmap(gradients, (0, None, 0, 0)))(q, k[0], v, chosen)
    single = jax.jit(gradients)
    rows = [single(q[i], k[0], v[i], chosen[i]) for i in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), mapped, stacked)


def test_what_nobody_sees_may_hold_nan() -> None:
    """Rows whose blocks are hidden inside a tile that others need, and tiles without a block."""
    q, k, v, _ = example()
    chosen = jnp.asarray([[1, 0], [0, 0], [1, 0], [1, 0]], bool)
    empty = [x.at[:, 16:].set(0.0) for x in (k, v)]
    pull = jax.jit(gradients)
    want = pull(q.at[:, 8:16].set(0.0), *empty, chosen)
    hidden = [x.at[:, 16:].set(jnp.nan) for x in (k, v)]
    got = pull(q.at[:, 8:16].set(jnp.nan), *hidden, chosen)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not got[1][:, 8:16].any()


@pytest.mark.parametrize("target", [cuda_target(80), cuda_target(90)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_lie_inside_the_blocks_of_a_pattern(dim: int, target) -> None:
    """From 64 on; forward and both backward passes."""
    for block in (64, 128, 256):
        blocks = (block, block)
        p = Problem(1, 4096, 4096, 8, 8, dim, dim, "bfloat16", 1.0, pattern_blocks=blocks)
        chosen = blocksparse_attention.choose(p, target)
        for tile in (chosen.fwd, chosen.dq, chosen.dkv):
            assert inside_blocks(blocks, 4096, 4096, tile.block_q, tile.block_kv), (block, tile)


def test_a_dense_mask_is_walked_by_its_blocks() -> None:
    """Flash attention on Hopper: tiles without a pair are not visited, full ones are not masked."""
    call = Call(
        "dense",
        b=1,
        h=2,
        hk=1,
        d=16,
        blocks=(16, 16),
        mask={"attention_mask": np.ones((1, 1, 40, 40), bool)},
    )
    call.mask["attention_mask"][:, :, :20, 16:] = 0
    x = arrays(call)
    with compile_for(cuda_target(90)):
        check(call, x, *run(flash_attention, call, x))
        program = str(jax.make_jaxpr(partial(run, flash_attention, call))(x))
    assert program.count("ListsLaunch") == 3
