"""The shipped launches of paged decoding compile for three chips, without spilling registers."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton.resources import assembly, launch_source, measure
from ejkernel.kernels.triton.serving import decode_tiles as tiles
from ejkernel.kernels.triton.serving.decode import PagedSplit
from ejkernel.kernels.triton.serving.merge import PagedMerge
from ejkernel.kernels.triton.targets import cuda_target, rocm_target
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import PagedProblem
from ejktest.grids import cover

pytest.importorskip("triton")

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_90": cuda_target(90),
    "gfx942": rocm_target("gfx942"),
}
# heads, kv heads, dim, page, cache, then window and cap
CASES = {
    "d128": (32, 8, 128, 16, "bfloat16", {}),
    "d80 page 1": (32, 8, 80, 1, "bfloat16", dict(window_left=1000, soft_cap=30.0)),
    "d256 page 64": (16, 8, 256, 64, "bfloat16", {}),
    "int8": (32, 8, 128, 16, "int8", {}),
    "e4m3": (32, 8, 128, 16, "float8_e4m3fn", {}),
    "e5m2 d80": (32, 8, 80, 16, "float8_e5m2", {}),
    "int8 group 64": (64, 1, 128, 64, "int8", {}),
}


def launched(name, target):
    heads, kv_heads, dim, page, cache, options = CASES[name]
    b, pages, columns = 64, 4096, 512
    kind = "bfloat16"
    layout = KVLayout.separate(kv_heads, dim, dim)
    sizes = (b, heads, kv_heads, dim, dim, pages, page, columns)
    p = PagedProblem(*sizes, kind, cache, cache, 0.1, layout, **options)
    t = tiles.choose(p, target)
    ranges = tiles.count_work_ranges(p, t, target)
    given = {
        "q": ((b, heads, dim), kind),
        "k": ((pages, page, kv_heads, dim), cache),
        "v": ((pages, page, kv_heads, dim), cache),
        "lens": ((b,), "int32"),
        "tables": ((b, columns), "int32"),
        "k_scale": ((1, 1), "float32"),
    }
    avals = {n: jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for n, (x, dtype) in given.items()}
    return PagedSplit(p, t, ranges).with_operands(avals), list(avals.values())


@pytest.mark.parametrize(
    ("name", "chip"),
    cover(
        itertools.product(CASES, TARGETS),
        ("d128", "gfx942"),
        ("d80 page 1", "sm_90"),
        ("d256 page 64", "sm_90"),
        ("int8", "sm_90"),
        ("e4m3", "sm_90"),
        ("e5m2 d80", "sm_80"),
        ("int8 group 64", "sm_90"),
    ),
)
def test_split_kernel(name, chip):
    target = TARGETS[chip]
    launch, avals = launched(name, target)
    used = measure(launch_source(launch, avals, target), target)
    print(f"{name} {chip}: {launch.tiles}: {used}")
    assert used.spills == 0
    assert used.products > 0
    # the programs meant to run together fit
    assert used.shared * launch.tiles.programs_per_core <= target.shared_limit
    if target.platform == "cuda":
        assert used.registers * 32 * used.num_warps * launch.tiles.programs_per_core <= 65536
    if chip == "sm_90":
        # what the tiles were chosen by is what the compiler does
        estimate = tiles.shared_bytes(launch.problem, launch.tiles.block, launch.tiles.num_stages)
        assert 0.8 * estimate <= used.shared <= 1.25 * estimate


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_8_bit_numbers_move_and_convert_together(name):
    target = TARGETS["sm_90"]
    launch, avals = launched(name, target)
    text = assembly(launch_source(launch, avals, target), target)[0]
    # whole matrices from shared memory, never bytes; four values to a conversion of one register
    assert "ldmatrix" in text
    assert "ld.shared.b8" not in text and "cvt.rn.f32.s" not in text
    p, t = launch.problem, launch.tiles
    words = t.block * p.token_bytes // 4 // (32 * t.num_warps)
    assert text.count("sub.rn.f16x2" if name == "int8" else "cvt.rn.f16x2.e4m3x2") == 2 * words


@pytest.mark.parametrize("chip", TARGETS)
def test_merge_kernel(chip):
    target = TARGETS[chip]
    split, _ = launched("d128", target)
    p = split.problem
    operands = {**split.outputs(), "sink": jax.ShapeDtypeStruct((1, p.heads, 2), jnp.float32)}
    merge = PagedMerge(p, split.tiles, split.ranges).with_operands(operands)
    used = measure(launch_source(merge, list(operands.values()), target), target)
    print(f"{chip}: {used}")
    assert used.spills == 0
