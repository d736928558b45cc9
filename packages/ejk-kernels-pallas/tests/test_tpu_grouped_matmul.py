"""TPU grouped matmul in Pallas' TPU interpreter, against a float64 loop over the groups.

Compiling interpreted kernels takes most of the time: each program here runs every list of sizes.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.pallas.tpu.common.chip import get_chip, on_chip
from ejkernel.kernels.pallas.tpu.common.segments import visits
from ejkernel.kernels.pallas.tpu.grouped_matmul import tiles
from ejkernel.kernels.pallas.tpu.grouped_matmul.groups import segment_bounds
from ejkernel.kernels.pallas.tpu.grouped_matmul.implementation import grouped_matmul
from ejkernel.ops import interpret_mode
from ejkernel.types.masks.structure import Unsupported
from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejktest.cases import grouped as cases
from ejktest.device import assert_no_races, interpreted_tpu
from ejktest.drawn import array
from ejktest.oracles import grouped as oracle
from ejktest.tolerance import check_close

PARAMS = pltpu.InterpretParams(detect_races=True)
ROWS, GROUPS = 150, 4
SIZES = {
    "around a block": [63, 64, 23, 0],
    "several in a block": [3, 0, 1, 70],
    "more than there are": [40, 1, 200, 2**31 - 1],
    "none": [0, 0, 0, 0],
}


@pytest.fixture(autouse=True)
def interpreted():
    with interpreted_tpu(PARAMS):
        yield


# inner, columns, dtype, whether rhs is transposed, offset of the held matrices, added, block_k
PROGRAMS = {
    "bfloat16": (200, 136, "bfloat16", False, None, False, 128),
    "transposed float32": (96, 136, "float32", True, 1, True, None),
}


@functools.cache
def program(name: str):
    """A jitted function of all arrays, the result and the gradients of lhs and rhs."""
    *_, transposed, offset, added, block_k = PROGRAMS[name]
    cfg = {"block_m": 64, "block_n": 128, "block_k": block_k}

    @jax.jit
    def compute(lhs, rhs, sizes, existing, dout):
        def result(lhs, rhs, existing):
            base = existing if added else None
            return grouped_matmul(lhs, rhs, sizes, offset, base, transpose_rhs=transposed, cfg=cfg)

        out, back = jax.vjp(result, lhs, rhs, existing)
        return out, *back(dout)

    return compute


def drawn(name: str, sizes: list[int]):
    """lhs, rhs, sizes, existing and the cotangent; rows after the groups hold NaN and infinity."""
    inner, columns, dtype, transposed, offset, *_ = PROGRAMS[name]
    matrices = GROUPS - (2 if offset else 0)
    rng = np.random.default_rng(0)
    lhs, existing, dout = (rng.standard_normal((ROWS, n)) for n in (inner, columns, columns))
    lhs[sum(sizes) :], dout[sum(sizes) :] = np.nan, np.inf
    shape = (columns, inner) if transposed else (inner, columns)
    rhs = rng.standard_normal((matrices, *shape))
    lhs, rhs, existing, dout = (array(x, dtype) for x in (lhs, rhs, existing, dout))
    return lhs, rhs, np.asarray(sizes, np.int32), existing, dout


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_matches_the_oracle(name, sizes):
    *_, transposed, offset, added, _ = PROGRAMS[name]
    lhs, rhs, numbers, existing, dout = drawn(name, SIZES[sizes])
    out, dlhs, drhs, dexisting = program(name)(lhs, rhs, numbers, existing, dout)
    want = oracle.grouped_matmul(
        lhs, rhs, numbers, offset, existing if added else None, transpose_rhs=transposed, dout=dout
    )
    for key, got in (("out", out), ("dlhs", dlhs), ("drhs", drhs)):
        check_close(got, getattr(want, key), name=key)
    np.testing.assert_array_equal(dexisting, dout if added else np.zeros_like(dout))
    assert_no_races()


def test_eight_bit_matrices():
    """Inner and columns are no multiple of a block; some of eight groups, with something added."""
    run, arrays, want = cases.stored_case(grouped_matmul, "e5m2 transposed")
    cases.check_results_of_8_bits(run(*arrays), arrays, want, "e5m2")
    assert_no_races()


def test_vmap_equals_stacking():
    arrays = [drawn("bfloat16", SIZES[name]) for name in ("around a block", "several in a block")]
    run = program("bfloat16")
    mapped = jax.jit(jax.vmap(run))(*(jnp.stack(x) for x in zip(*arrays, strict=True)))
    for n, operands in enumerate(arrays):
        for got, want in zip(mapped, run(*operands), strict=True):
            np.testing.assert_array_equal(got[n], want)


@pytest.mark.parametrize("empty_segments", [False, True])
@pytest.mark.parametrize("rows", [128, 150])
def test_every_pair_of_block_and_segment_is_visited_once_in_order(rows, empty_segments):
    rng = np.random.default_rng(0)
    for sizes in (*rng.integers(0, 60, (20, 4)), [0, 0, rows, 0], [rows, 0, 0, 0]):
        bounds = segment_bounds(jnp.asarray(sizes), jnp.asarray(1), 2, rows)
        found = visits(bounds, rows, 32, empty_segments=empty_segments)
        run, shift, bounds, count = map(np.asarray, found)
        seen = [(int(shift[r]) + v, int(r)) for v, r in enumerate(run[:count])]
        pairs = []
        for r, (start, end) in enumerate(itertools.pairwise(bounds)):
            if end > start:
                pairs += [(block, r) for block in range(start // 32, (end - 1) // 32 + 1)]
            elif empty_segments:
                pairs.append((min(start // 32, (rows - 1) // 32), r))
        assert seen == pairs
        assert count <= len(run) and bounds[-1] == rows


CHIPS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
MODELS = {  # rows, inner, columns, groups
    "few rows": (64, 7168, 4096, 256),
    "one row each": (512, 4096, 1536, 512),
    "mixtral": (8192, 4096, 14336, 8),
    "odd": (1000, 2880, 5760, 32),
    "small": (5, 33, 41, 2),
}


@pytest.mark.parametrize("kind", CHIPS)
@pytest.mark.parametrize("model", MODELS)
def test_tiles_fit(kind, model):
    """Tiles leave a quarter of vector memory, and waste at most an eighth of the columns."""
    chip = get_chip(kind)
    rows, inner, columns, groups = MODELS[model]
    for dtype, stored in (("bfloat16", ""), ("float32", ""), ("bfloat16", "int8")):
        p = GroupedProblem(
            rows, inner, columns, groups, groups, False, dtype, dtype, "default", stored=stored
        )
        chosen = tiles.choose(p, chip)
        for t, q in ((chosen.fwd, p), (chosen.dlhs, p.flipped())):
            assert t.vmem(q) <= chip.vmem * 3 // 4
            blocks = -(-q.columns // t.columns)
            assert blocks * t.columns * 8 <= max(q.columns * 9, 8 * blocks * chip.mxu)
        assert chosen.drhs.gradient_vmem(p) <= chip.vmem * 3 // 4


@pytest.mark.parametrize("kind", ["TPU v4", "TPU7x"])
def test_lowers_to_mosaic_kernels(kind):
    """The result and its gradients become Mosaic kernels, with matrices of 8 bits too."""
    lhs, rhs, sizes = (jax.ShapeDtypeStruct(*x) for x in (
        ((512, 384), "bfloat16"), ((8, 384, 640), "bfloat16"), ((8,), "int32")
    ))  # fmt: skip

    def loss(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum()

    def stored(lhs, rhs, sizes):
        narrow = jax.lax.stop_gradient(rhs).astype(jnp.int8)
        out = grouped_matmul(lhs, narrow, sizes, rhs_scale=jnp.full((8, 640), 0.5))
        return out.astype(jnp.float32).sum()

    with interpret_mode(False), on_chip(kind):
        for run, kernels in (
            (jax.value_and_grad(loss, (0, 1)), 3),
            (stored, 1),
            (jax.value_and_grad(stored), 2),
        ):
            made = export.export(jax.jit(run), platforms=["tpu"])(lhs, rhs, sizes)
            assert made.mlir_module().count("tpu_custom_call") == kernels


@pytest.mark.parametrize("chip", ["TPU v4", "TPU v5 lite", "TPU v6 lite"])
def test_many_groups_need_no_loop(chip):
    """512 groups of a row: one kernel, no loop around it, nothing on the host."""
    call = cases.COMPILED_TPU["grouped one row each"]
    structs = call.structs()
    with on_chip(chip):
        made = export.export(jax.jit(grouped_matmul), platforms=["tpu"])(
            structs["lhs"], structs["rhs"], structs["group_sizes"]
        ).mlir_module()
    assert made.count("tpu_custom_call") == 1
    assert "stablehlo.while" not in made and "callback" not in made


def test_a_config_names_tiles_in_full_registers():
    p = GroupedProblem(100, 300, 200, 4, 4, False, "bfloat16", "bfloat16", "default")
    chip = get_chip("TPU v4")
    chosen = tiles.choose(p, chip)

    def sizes(**cfg: int) -> tuple[int, ...]:
        t = chosen.apply_config(cfg, p, chip).fwd
        return t.rows, t.columns, t.inner

    assert sizes(block_m=10, block_n=100, block_k=200) == (16, 128, 256)
    assert sizes(block_m=4096, block_n=4096, block_k=4096) == (112, 256, 300)


def test_refuses_what_it_cannot_do():
    lhs, rhs, sizes = jnp.ones((8, 16)), jnp.ones((2, 16, 8)), jnp.array([4, 4])
    with pytest.raises(Unsupported, match="lhs: float16 is not supported"):
        grouped_matmul(lhs.astype(jnp.float16), rhs.astype(jnp.float16), sizes)
    with pytest.raises(Unsupported, match="preferred_element_type: float16"):
        grouped_matmul(lhs, rhs, sizes, preferred_element_type="float16")
    with pytest.raises(Unsupported, match="precision: an algorithm"):
        grouped_matmul(lhs, rhs, sizes, precision="F32_F32_F32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [(3, 64, 48), (40, 200, 264), (600, 1000, 1408), (600, 14336, 64)]
)
def test_tiles_are_legal_in_a_config(sizes, dtype):
    """Sizes that no config holds are left out, and follow from the shapes again."""
    p = GroupedProblem(*sizes, 4, 4, False, dtype, dtype, "default")
    chosen = tiles.choose(p, get_chip("TPU v5 lite"))
    for n in chosen.fields.values():
        assert 16 <= n <= 1024 and n.bit_count() == 1
    again = chosen.apply_config(chosen.fields, p, get_chip("TPU v5 lite"))
    assert again == chosen
