"""Native sparse attention in Pallas' TPU interpreter, against its definition in float64."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, interpreter, on_chip
from ejkernel.kernels.pallas.tpu.native_sparse_attention import problem
from ejkernel.kernels.pallas.tpu.native_sparse_attention.implementation import (
    native_sparse_attention,
)
from ejkernel.ops import ConfigError, interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejktest.cases.sparse import compare
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.drawn import array
from ejktest.grids import cover
from ejktest.oracles import sparse as oracle
from ejktest.tolerance import check_close

PARAMS = pltpu.InterpretParams(detect_races=True)
HK, D, DV, SIZE = 2, 24, 40, 4
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield
    assert_no_races()


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles, steps and spans in a short row."""

    def choose(p, chip):
        # 4 tokens are too few for a block of flash attention's arrays
        return problem.Tiles(16 // p.group, 2, -(-p.blocks // 2), -(-p.blocks // 3))

    monkeypatch.setattr(problem, "choose", choose)


def normal(*shape):
    return array(RNG.standard_normal(shape), jnp.float32)


def inputs(group, gates=3, length=30, hk=1):
    h = hk * group
    arrays = [normal(1, length, h, D), normal(1, length, hk, D), normal(1, length, hk, DV)]
    return arrays + [normal(1, length, h) for _ in range(gates)]


BLOCK_OF_TOKEN = np.arange(24, dtype=np.int32) // SIZE


@functools.partial(jax.jit, static_argnames="blocks")
def selected_branch(q, k, v, blocks):
    """The output and the gradients of q, k and v, for a cotangent of ones."""
    options = {"block_counts": 2}
    if blocks == "given":
        lists = np.stack([0 * BLOCK_OF_TOKEN, BLOCK_OF_TOKEN], -1)
        options = {"block_indices": lists[None, :, None]}
    attend = functools.partial(native_sparse_attention, **options, block_size=SIZE)
    o, pull = jax.vjp(attend, q, k, v)
    return o, *pull(jnp.ones_like(o))


@pytest.mark.parametrize(
    ("blocks", "operand"), [("given", "query"), ("selected", "query"), ("given", "key")]
)
def test_nan_that_a_token_sees_is_in_its_output_and_gradients(small_tiles, blocks, operand):
    q, k, v = inputs(2, gates=0, length=24)
    at = 10 if operand == "query" else 5
    q, k = (q.at[0, at].set(jnp.nan), k) if operand == "query" else (q, k.at[0, at].set(jnp.nan))
    o, *_, dv = selected_branch(q, k, v, blocks)
    has_nan, dv_has_nan = (np.isnan(x[0]).any((1, 2)) for x in (o, dv))
    saw = slice(10, 11) if operand == "query" else slice(5, 8)
    assert has_nan[saw].all() and has_nan.sum() == len(has_nan[saw])
    seen = slice(0, 4) if operand == "query" else slice(0, 8)
    assert dv_has_nan[seen].all() and (blocks == "selected" or not dv_has_nan[12:].any())


@jax.jit
def two_branches(do, *arrays):
    """The gradients of all arrays of a call."""

    def attend(*arrays):
        block_indices = BLOCK_OF_TOKEN[None, :, None, None]
        return native_sparse_attention(*arrays, block_indices, 1, block_size=SIZE)

    return jax.vjp(attend, *arrays)[1](do)


@pytest.mark.parametrize("operand", ["query", "do"])
def test_nan_of_a_token_that_sees_no_mean_stays_in_its_block(monkeypatch, operand):
    """The first tokens share rows and tiles with tokens that see means; gates may be negative."""
    monkeypatch.setattr(problem, "choose", lambda p, chip: problem.Tiles(64, 8, 6, 6))
    at, (q, *others) = 1, inputs(2, gates=2, length=24)
    do = normal(1, 24, 2, DV)
    q, do = (x.at[0, at].set(jnp.nan) if n == operand else x for n, x in (("query", q), ("do", do)))
    _, dk, dv, *of_gates = (np.isnan(x[0]) for x in two_branches(do, q, *others))
    assert dk[: at + 1].all() and dv[: at + 1].all() and not (dk[SIZE:].any() or dv[SIZE:].any())
    assert of_gates[1][at].all() and not any(np.delete(x, at, 0).any() for x in of_gates)


def test_selection_and_all_branches(monkeypatch):
    """Groups whose rows are no power of two; steps of parts of two blocks."""
    monkeypatch.setattr(problem, "choose", lambda p, chip: problem.Tiles(16, 4, 8, 8))
    count, window, scale, length = 3, 5, -0.3, 27
    args = inputs(3, length=length)

    def ours(q, k, v, g_cmp, g_slc, g_swa):
        return native_sparse_attention(
            q, k, v, g_cmp, g_slc, block_counts=count, block_size=SIZE, sliding_window=window,
            g_swa=g_swa, softmax_scale=scale,
        )  # fmt: skip

    def theirs(q, k, v, *gates):
        return oracle.sequence(
            q[0], k[0], v[0], [g[0] for g in gates], size=SIZE, count=lambda t, m: count,
            scale=scale, window=window, length=length,
        )[None]  # fmt: skip

    with interpreter(PARAMS, "TPU v5 lite"):  # gradients of flash attention are one kernel
        compare(ours, theirs, args)


def test_given_blocks_with_counts_duplicates_and_strangers(small_tiles):
    """Keys in spans; blocks whose size is no power of two have rows without a token."""
    length, slots, size = 28, 4, 5
    args = inputs(2, gates=0, length=length, hk=HK)
    indices = RNG.integers(-2, length // size + 3, (1, length, HK, slots)).astype(np.int32)
    indices[0, :, :, 2] = indices[0, :, :, 0]
    counts = RNG.integers(1, slots + 1, (1, length, HK)).astype(np.int32)

    def ours(q, k, v):
        return native_sparse_attention(
            q, k, v, block_indices=indices, block_counts=counts, block_size=size
        )

    def theirs(q, k, v):
        return oracle.sequence(
            q[0], k[0], v[0], (None, None, None), size=size, scale=D**-0.5, length=length,
            count=lambda t, m: int(counts[0, t, m]), indices=indices[0].tolist(),
        )[None]  # fmt: skip

    compare(ours, theirs, args)


def test_packed_sequences(small_tiles):
    """Counts below the bound take the best blocks; nothing of padding is read. Groups so large
    that arrays are made for the kernels."""
    ends = np.array([0, 11, 11, 26], np.int32)
    args = inputs(4, gates=1)
    counts = RNG.integers(1, 4, (1, 30, 1)).astype(np.int32)
    outside = jnp.arange(30) >= ends[-1]

    def ours(*args):
        args = [jnp.where(outside.reshape(1, -1, *[1] * (x.ndim - 2)), jnp.nan, x) for x in args]
        return native_sparse_attention(
            *args, None, None, counts, jnp.asarray(ends), block_size=SIZE, max_block_count=3
        )

    def theirs(q, k, v, g_cmp):
        rows = [
            oracle.sequence(
                *(x[0, a:b] for x in (q, k, v)), (g_cmp[0, a:b], None, None), size=SIZE,
                scale=D**-0.5, length=b - a, count=lambda t, m, a=a: int(counts[0, a + t, m]),
            )
            for a, b in ((0, 11), (11, 26))
        ]  # fmt: skip
        return jnp.concatenate([*rows, jnp.zeros((4, 4, DV))])[None]

    compare(ours, theirs, args)


@pytest.mark.parametrize("length", cover([24, 27], 27))
def test_rows_as_a_projection_leaves_them(monkeypatch, length):
    """All branches, keys in spans, values of another width; rows that are no whole registers."""
    monkeypatch.setattr(
        problem, "choose", lambda p, chip: problem.Tiles(8, 2, -(-p.blocks // 2), -(-p.blocks // 3))
    )
    heads = {"query": (4, 128), "key": (2, 128), "value": (2, 256)}
    args = [normal(1, length, *shape) for shape in heads.values()]
    args += [normal(1, length, 4) for _ in range(3)]
    options = {"block_counts": 3, "block_size": SIZE, "sliding_window": 5}

    def ours(q, k, v, g_cmp, g_slc, g_swa):
        return native_sparse_attention(
            q, k, v, g_cmp, g_slc, g_swa=g_swa, cfg={"joins_heads": True}, **options
        )

    def theirs(q, k, v, *gates):
        return oracle.sequence(
            q[0], k[0], v[0], [g[0] for g in gates], size=SIZE, count=lambda t, m: 3,
            scale=128**-0.5, window=5, length=length,
        )[None]  # fmt: skip

    rows = f"f32[1,{-(-length // 8) * 8},512]"
    assert rows in str(compare(ours, theirs, args))


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (32, 128)])
def test_heads_that_cannot_be_joined(heads, dim):
    q, k = jnp.ones((1, 8, heads, dim)), jnp.ones((1, 8, 1, dim))
    with pytest.raises(ConfigError, match="multiples of 128, and at most 16 query heads"):
        native_sparse_attention(q, k, k, cfg={"joins_heads": True})


def test_half_precision_and_wide_blocks():
    """Blocks of 160 keys are whole registers with rows of padding; every block is chosen."""
    q, k, v, do = (
        x.astype(jnp.bfloat16)
        for x in [*inputs(1, gates=0, length=170, hk=HK), normal(1, 170, HK, DV)]
    )
    o, back = jax.vjp(
        jax.jit(lambda *x: native_sparse_attention(*x, block_size=160, block_counts=2)), q, k, v
    )
    lists = np.broadcast_to([0, 1], (170, HK, 2))
    want = oracle.over_lists(q[0], k[0], v[0], lists, 160, D**-0.5, do[0])
    for name, a, b in zip(("o", "dq", "dk", "dv"), (o, *back(do)), want, strict=True):
        check_close(a[0], b, dtype="bfloat16", name=name)


@pytest.mark.parametrize(("kind", "flash"), [("TPU v4", 3), ("TPU7x", 2)])
def test_lowers_to_mosaic_kernels(kind, flash):
    """Two kernels of the selected branch, the kernels of flash attention, and the choice of blocks.

    Where the named residuals are saved, ``jax.checkpoint`` runs none of them twice.
    """
    shapes = [jax.ShapeDtypeStruct((1, 2048, h, 128), "bfloat16") for h in (16, 1, 1)]
    gate = jax.ShapeDtypeStruct((1, 2048, 16), "float32")

    named = jax.checkpoint_policies.save_only_these_names("ejkernel_out", "ejkernel_lse")

    @functools.partial(jax.checkpoint, policy=named)
    def loss(q, k, v, g):
        return jnp.sin(native_sparse_attention(jnp.sin(q), k, v, g).astype(jnp.float32)).sum()

    with interpret_mode(False), on_chip(kind):
        made = export.export(jax.jit(jax.grad(loss, (0, 1, 2, 3))), platforms=["tpu"])
        text = made(*shapes, gate).mlir_module()
    for name, count in {"selected_fwd": 1, "selected_bwd": 1, "select_blocks": 1}.items():
        assert text.count(f'kernel_name = "ejkernel_{name}"') == count
    assert text.count("tpu_custom_call") == 3 + flash


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_keys_fit_into_vector_memory(kind):
    chip = get_chip(kind)
    p = problem.Problem(1, 32768, 64, 4, 128, 128, 64, 512, 16, 0.1, "bfloat16", False)
    if kind != "TPU v4":  # 16 MiB
        assert problem.choose(p, chip).span_backward == p.blocks
    for case in (p, replace(p, dtype="float32"), replace(p, dim=192, length=2**19, blocks=2**13)):
        t = problem.choose(case, chip)
        assert t.tokens * case.group == t.chunk * case.rows_of_block // 4 == 128
        for backward in (False, True):
            most = max(chip.vmem // 2, chip.vmem - problem.TILE_BYTES)
            assert t.resident_bytes(case, backward=backward) <= most


def test_refuses_what_it_cannot_do():
    q, k, v = (x.astype(jnp.float16) for x in inputs(1, gates=0))
    with pytest.raises(Unsupported, match="query: float16 is not supported"):
        native_sparse_attention(q, k, v)
    q = jax.ShapeDtypeStruct((1, 2**20, 1, 64), "bfloat16")
    with pytest.raises(Unsupported, match="block_size: the means of 65536 blocks do not fit"):
        jax.eval_shape(lambda q: native_sparse_attention(q, q, q, block_size=16), q)
