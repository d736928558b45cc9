"""The shipped launches of ragged attention compile without spilling registers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import pytest

from ejkernel.kernels.triton import compiled
from ejkernel.kernels.triton.resources import launch_source, measure
from ejkernel.kernels.triton.serving import ragged_tiles as tiles
from ejkernel.kernels.triton.serving.prefill import RaggedPrefill
from ejkernel.kernels.triton.serving.ragged_merge import RaggedMerge
from ejkernel.kernels.triton.serving.schedule import RaggedScheduleLaunch
from ejkernel.kernels.triton.serving.stages import decode_launch
from ejkernel.kernels.triton.serving.write import BLOCK, RaggedWrite
from ejkernel.kernels.triton.targets import cuda_target, rocm_target
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import PagedProblem, RaggedProblem
from ejktest.grids import cover

pytest.importorskip("triton")

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_90": cuda_target(90),
    "gfx942": rocm_target("gfx942"),
}


def problem(cache: str = "bfloat16", **changes: Any) -> RaggedProblem:
    n, h, hk, d, page = 64, 32, 8, 128, 16
    sizes, layout = (n, h, hk, d, d, 4096, page, 1024), KVLayout.interleaved(hk, d)
    paged = PagedProblem(*sizes, "bfloat16", cache, cache, 0.1, layout)
    return RaggedProblem(replace(paged, **changes), 16440, ("bfloat16",) * 2)


def operands(
    problem: RaggedProblem, launch: tiles.RaggedTiles, target
) -> dict[str, jax.ShapeDtypeStruct]:
    p, array = problem.paged, jax.ShapeDtypeStruct
    new = array((problem.rows, p.kv_heads, p.dim), "bfloat16")
    found = {
        "q": array((problem.rows, p.heads, p.dim), p.query_dtype),
        "k": array((p.pages, p.page_size, 2 * p.kv_heads, p.dim), p.key_dtype),
        "tables": array((p.batch, p.max_pages), "int32"),
        "starts": array((p.batch + 1,), "int32"),
        "lens": array((p.batch,), "int32"),
        "valid": array((1,), "int32"),
        "k_scale": array((1, 1), "float32"),
        "v_scale": array((1, 1), "float32"),
        "tree": array((problem.rows, -(-p.tree_columns // 32)), "int32"),
        "positions": array((problem.rows,), "int32"),
        "keys": new,
        "values": new,
    }

    found |= (
        RaggedScheduleLaunch(problem, launch, target)
        .with_operands({name: found[name] for name in ("starts", "lens", "valid")})
        .outputs()
    )
    found |= {"begins": found["d_begins"], "rows": found["d_rows"], "counts": found["d_counts"]}
    prefill = RaggedPrefill(problem, launch, target).outputs()
    decode = decode_launch(problem, launch, target).outputs()
    found |= {"o": prefill["o"], "o_in": prefill["o"], "first_rows": found["d_rows"]}
    found |= {f"p_{name}": prefill[name] for name in ("acc", "m", "l")}
    found["lse_in"] = prefill["lse"]
    return found | {f"d_{name}": x for name, x in decode.items()} | {"cache_in": found["k"]}


KERNELS = {
    "schedule": (RaggedScheduleLaunch, "starts lens valid"),
    "write": (
        RaggedWrite,
        "keys values tables first_rows sequences header k_scale v_scale cache_in",
    ),
    "decode": (decode_launch, "q k lens tables begins rows counts k_scale"),
    "prefill": (RaggedPrefill, "q k tables first_rows sequences header k_scale v_scale"),
    "merge": (
        RaggedMerge,
        "d_acc d_m d_l d_starts d_counts first_rows sequences header p_acc p_m p_l v_scale"
        " o_in cache_in",
    ),
}


def bound_source(kernel: str, problem: RaggedProblem, tiles, target):
    """The specialisation of a kernel."""
    make, names = KERNELS[kernel]
    every = operands(problem, tiles, target)
    if problem.paged.return_lse and kernel == "merge":
        names += " lse_in"
    if problem.paged.tree_columns and kernel in ("decode", "prefill"):
        names += " tree positions" if problem.paged.positioned else " tree"
    given = {name: every[name] for name in names.split()}
    launch = make(problem, tiles, target).with_operands(given)
    return launch_source(launch, list(given.values()), target)


def used(kernel: str, problem: RaggedProblem, target):
    chosen = tiles.choose(problem, target)
    found = measure(bound_source(kernel, problem, chosen, target), target)
    print(f"{kernel} {target.name}: {chosen}: {found}")
    return chosen, found


@pytest.mark.parametrize(
    ("chip", "page", "dim"),
    cover(
        [*((chip, 16, 128) for chip in TARGETS), ("sm_90", 64, 128), ("sm_90", 16, 64)],
        ("sm_80", 16, 128),
        ("gfx942", 16, 128),
        ("sm_90", 64, 128),
    ),
)
def test_tiles_of_prefills(chip, page, dim):
    target = TARGETS[chip]
    p = problem(page_size=page, dim=dim, value_dim=dim, layout=KVLayout.interleaved(8, dim))
    launch, found = used("prefill", p, target)
    assert tiles.can_use_tma(p.paged, launch.block, target) == (page == 64)
    assert found.spills == 0 and found.products > 0 and not found.serialized
    # descriptors come with the barriers that wait for them
    assert found.shared <= 64 + tiles.shared_bytes(p, launch.rows, launch.block, launch.num_stages)


def test_log_sum_exp_takes_no_spills():
    target, p = TARGETS["sm_90"], problem(return_lse=True)
    assert used("prefill", p, target)[1].spills == 0
    assert used("merge", p, target)[1].spills == 0


TREES = {
    "all": {},
    "window": {"window_left": 100},
    "positions": {"window_left": 100, "positioned": True},
}


@pytest.mark.parametrize(
    ("kernel", "name"),
    cover(
        itertools.product(("decode", "prefill"), TREES), ("decode", "positions"), ("prefill", "all")
    ),
)
def test_trees_take_no_spills(kernel, name):
    target, options = TARGETS["sm_90"], TREES[name]
    _, found = used(kernel, problem(tree_columns=64, **options), target)
    assert found.spills == 0
    _, causal = used(kernel, problem(**options), target)
    rate = 65536 // (32 * found.num_warps)  # of registers of a thread, over programs
    assert rate // found.registers >= rate // causal.registers - 1


@pytest.mark.parametrize(
    ("kernel", "cache", "chip"),
    [
        ("schedule", "bfloat16", "sm_90"),
        ("write", "float8_e4m3fn", "sm_80"),
        ("decode", "bfloat16", "sm_90"),
        ("merge", "bfloat16", "sm_90"),
    ],
)
def test_the_others(kernel, cache, chip):
    target = TARGETS[chip]
    launch, found = used(kernel, problem(cache), target)
    assert found.spills == 0
    if kernel == "decode":  # as many programs run together as of paged decoding
        programs_per_core = launch.decode.programs_per_core
        assert found.registers * 32 * found.num_warps * programs_per_core <= 65536
        assert found.shared * programs_per_core <= target.shared_limit


def test_the_grid_depends_on_shapes_and_chip_only():
    p, target = problem(), TARGETS["sm_90"]
    launch = tiles.choose(p, target)
    max_split_units = tiles.max_split_units(p, launch, target)
    # two programs of four warps a multiprocessor, for eight kv heads
    assert (launch.rows, max_split_units) == (64, 2 * 132 // 8)
    tokens = launch.tile
    assert tiles.max_units(p, launch, max_split_units) == 16440 // tokens + 64 + max_split_units
    with_config = launch.apply_config(
        dict(num_queries_per_block=32, num_kv_pages_per_block=2), p, target
    )
    assert (with_config.rows, with_config.block, with_config.decode.block) == (128, 32, 32)
    huge = dict(num_queries_per_block=10**30, num_kv_pages_per_block=2**20, num_splits=10**30)
    bounded = launch.apply_config(huge, p, target)
    assert (bounded.rows, bounded.block, bounded.decode.block) == (256, 256, 256)
    small = replace(p, rows=9)
    assert launch.apply_config(huge, small, target).rows == 64  # 9 tokens of 4 query heads
    of_three = launch.apply_config(dict(num_splits=3), p, target)
    assert decode_launch(p, of_three, target).ranges == 64 * 3
    assert decode_launch(p, launch, target).ranges == 2 * 132 // 8


def test_numbers_for_an_8_bit_cache_are_made_by_instructions_for_them():
    """Two at a time; a quotient is a product and its corrections, but for divisors out of all
    bounds."""
    target, p = TARGETS["sm_90"], problem("float8_e4m3fn")
    source = bound_source("write", p, tiles.choose(p, target), target)
    text = str(compiled.compile_stages(source, target, "ptx")[0]["ptx"])
    numbers = 2 * BLOCK * p.paged.dim // 128  # keys and values of a thread
    assert text.count("cvt.rn.satfinite.e4m3x2.f32") >= numbers // 2
    assert text.count("fma.rn.f32") >= 4 * numbers
