"""The shipped launches of grouped matmuls compile for five chips, without spilling registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton.compiled import compile_stages
from ejkernel.kernels.triton.grouped_matmul import tiles
from ejkernel.kernels.triton.grouped_matmul.backward_rhs import GroupedDrhs
from ejkernel.kernels.triton.grouped_matmul.forward import GroupedForward
from ejkernel.kernels.triton.grouped_matmul.forward_8bit import GroupedForward8Bit
from ejkernel.kernels.triton.resources import launch_source, measure
from ejkernel.kernels.triton.targets import cuda_target, rocm_target

pytest.importorskip("triton")

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_89": cuda_target(89, 128),
    "sm_90": cuda_target(90),
    "sm_100": cuda_target(100, 148),
    "gfx942": rocm_target("gfx942"),
}
# rows, inner, columns, groups, dtype, precision
SHAPES = {
    "large": (16384, 4096, 14336, 8, "bfloat16", "tf32"),
    "many": (65536, 7168, 2048, 256, "bfloat16", "tf32"),
    "small": (8192, 2048, 768, 128, "bfloat16", "tf32"),
    "crowd": (65536, 1024, 512, 2048, "bfloat16", "tf32"),
    "odd": (5000, 1001, 515, 9, "float16", "tf32"),
    "float32": (8192, 1024, 1024, 8, "float32", "tf32"),
    "float32 high": (8192, 1024, 1024, 8, "float32", "tf32x3"),
    "float32 highest": (8192, 1024, 1024, 8, "float32", "ieee"),
}
PASSES = ("fwd", "dlhs", "drhs")
# what runs with every change; the rest is slow
SAMPLE = [
    ("small", "dlhs", "sm_90"),
    ("many", "drhs", "sm_90"),
    ("large", "fwd", "sm_80"),
    ("large", "drhs", "gfx942"),
]
ALL = [(s, p, c) for s in SHAPES for p in PASSES for c in TARGETS]


# an operand of the matrix instruction in registers: transposed, rows, gradient of lhs
STORED = {
    "few": (False, 1024, False),
    "even": (False, 8192, False),
    "few transposed": (True, 1024, False),
    "even dlhs": (False, 8192, True),
    "many rows": (False, 65536, False),
    "many rows dlhs": (False, 65536, True),
}
# tiles of other chips spill there
HOPPER_ONLY = ("many rows", "many rows dlhs")
STORED_ALL = [(s, c) for s in STORED for c in TARGETS if c == "sm_90" or s not in HOPPER_ONLY]
STORED_SAMPLE = [("few transposed", "sm_90"), ("even", "sm_80"), ("many rows dlhs", "sm_90")]


def launched(shape, which, target):
    rows, inner, columns, groups, dtype, precision = SHAPES[shape]
    p = tiles.Problem(rows, inner, columns, groups, groups, False, dtype, dtype, precision)
    lhs, rhs, out = (rows, inner), (groups, inner, columns), (rows, columns)
    operands = {"fwd": (lhs, rhs), "dlhs": (out, rhs), "drhs": (lhs, out)}[which]
    avals = [jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for s in operands]
    avals.append(jax.ShapeDtypeStruct((groups,), jnp.int32))
    names = ("lhs", "dout" if which == "drhs" else "rhs", "group_sizes")
    operands = dict(zip(names, avals, strict=True))
    if which == "drhs":
        launch = GroupedDrhs(p, tiles.choose_weights(p, target))
    else:
        p = p if which == "fwd" else p.flipped()
        launch = GroupedForward(p, tiles.choose(p, target))
    return launch.with_operands(operands), avals


def launched_8bit(which, kind, target):
    transposed, rows, gradient = STORED[which]
    _, inner, columns, groups, dtype, precision = SHAPES["small"]
    p = tiles.Problem(
        rows, inner, columns, groups, groups, transposed, dtype, dtype, precision, stored=kind
    )
    matrices = (groups, columns, inner) if transposed else (groups, inner, columns)
    p = p.flipped() if gradient else p
    shapes = ((rows, p.inner), dtype), (matrices, kind), ((groups,), "int32")
    shapes = *shapes, ((groups, p.columns), "float32")
    avals = [jax.ShapeDtypeStruct(shape, jnp.dtype(d)) for shape, d in shapes]
    names = ("lhs", "rhs", "group_sizes", "scale")
    launch = GroupedForward8Bit(p, tiles.choose(p, target))
    return launch.with_operands(dict(zip(names, avals, strict=True))), avals


def check(shape, which, chip):
    target = TARGETS[chip]
    if shape in STORED:
        launch, avals = launched_8bit(shape, which, target)
    else:
        launch, avals = launched(shape, which, target)
    used = measure(launch_source(launch, avals, target), target)
    print(f"{shape} {which} {chip}: {launch.tiles}: {used}")
    assert used.spills == 0
    assert not used.serialized
    assert used.products > 0 or "highest" in shape or chip == "sm_100"
    # the programs meant to run together fit
    assert (used.shared + 1024) * launch.tiles.per_core <= target.shared_limit + 1024
    if target.platform == "cuda":
        assert used.registers * 32 * used.num_warps * launch.tiles.per_core <= 65536
        assert used.shared <= tiles.shared_bytes(launch.problem, launch.tiles) + 512


@pytest.mark.parametrize(("shape", "which", "chip"), SAMPLE)
def test_sampled_calls_compile(shape, which, chip):
    check(shape, which, chip)


@pytest.mark.parametrize(("shape", "chip"), STORED_SAMPLE)
def test_sample_of_eight_bit_matrices(shape, chip):
    check(shape, "int8", chip)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("shape", "chip"), STORED_ALL)
def test_all_eight_bit_matrices(shape, kind, chip):
    check(shape, kind, chip)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "which", "chip"), [c for c in ALL if c not in SAMPLE])
def test_all_calls_compile(shape, which, chip):
    check(shape, which, chip)


@pytest.mark.parametrize("which", ["fwd", "drhs"])
def test_the_copies_of_later_steps_fly_while_one_is_multiplied(which):
    """One loop over the steps of all tiles, filled before it starts and never drained."""
    target = TARGETS["sm_90"]
    launch, avals = launched("large", which, target)
    text = compile_stages(launch_source(launch, avals, target), target, "ttgir")[0]["ttgir"]
    copies = text.count("async_tma_copy_global_to_local")
    assert copies == 2 * launch.tiles.num_stages
    assert "pendings = 1" in text
