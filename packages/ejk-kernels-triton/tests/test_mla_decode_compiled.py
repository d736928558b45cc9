"""The shipped launches of latent decoding compile for every chip, without spilling registers."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.resources import assembly, launch_source, measure
from ejkernel.kernels.triton.serving import mla_decode_tiles as tiles
from ejkernel.kernels.triton.serving.decode import PagedSplit
from ejkernel.kernels.triton.serving.decode_tiles import count_work_ranges
from ejkernel.kernels.triton.serving.merge import PagedMerge
from ejkernel.kernels.triton.targets import cuda_target, rocm_target
from ejkernel.types.serving.layout import KVLayout
from ejkernel.types.serving.problem import LatentProblem
from ejktest.grids import cover

pytest.importorskip("triton")

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_90": cuda_target(90),
    "gfx942": rocm_target("gfx942"),
}
# heads, page, cache, then other properties
CASES = {
    "128 heads": (128, 64, "bfloat16", {}),
    "16 heads": (16, 64, "bfloat16", {}),
    "page 16": (128, 16, "bfloat16", dict(tokens=2, window_left=1000, soft_cap=30.0)),
    "int8": (128, 64, "int8", {}),
    "int8, 16 heads": (16, 64, "int8", {}),
    "e4m3, 16 heads": (16, 64, "float8_e4m3fn", {}),
    "int8, 16 heads, splits": (16, 64, "int8", dict(num_splits=4)),
    "three parts": (16, 16, "bfloat16", dict(num_splits=3)),
}


def launched(name, target, b=64, columns=128):
    heads, page, cache, options = CASES[name]
    pages, kind = 8192, "bfloat16"
    p = LatentProblem(
        b, heads, 1, 576, 512, pages, page, columns, kind, cache, cache, 0.1, KVLayout.latent(576),
        return_lse=True, **options,
    )  # fmt: skip
    t = tiles.choose(p, target).apply_config(None, p, target)
    given = {
        "q": ((b, p.tokens * heads, 576), kind),
        "k": ((pages, page, 576), cache),
        "lens": ((b,), "int32"),
        "tables": ((b, columns), "int32"),
        "k_scale": ((1, 1), "float32"),
    }
    launch = PagedSplit(p, t, b * t.splits if t.splits else count_work_ranges(p, t, target))
    avals = {n: jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for n, (x, dtype) in given.items()}
    return launch.with_operands(avals), list(avals.values())


@pytest.mark.parametrize(
    ("name", "chip"),
    cover(
        [
            ("128 heads", "sm_90"),
            ("page 16", "sm_90"),
            ("int8, 16 heads", "sm_90"),
            ("e4m3, 16 heads", "sm_90"),
            ("int8, 16 heads, splits", "sm_90"),
            ("three parts", "sm_90"),
            ("int8", "sm_80"),
            ("16 heads", "gfx942"),
        ],
        ("page 16", "sm_90"),
        ("int8, 16 heads", "sm_90"),
        ("e4m3, 16 heads", "sm_90"),
        ("int8", "sm_80"),
        ("16 heads", "gfx942"),
    ),
)
def test_split_kernel(name, chip):
    target = TARGETS[chip]
    launch, avals = launched(name, target)
    used = measure(launch_source(launch, avals, target), target)
    print(f"{name} {chip}: {launch.tiles}: {used}")
    assert used.spills == 0
    assert used.products > 0 and not used.serialized
    # the programs meant to run together fit
    assert used.shared * launch.tiles.programs_per_core <= target.shared_limit
    if target.platform == "cuda":
        assert used.registers * 32 * used.num_warps * launch.tiles.programs_per_core <= 65536
        estimate = tiles.shared_bytes(launch.problem, launch.tiles, target)
        assert 0.8 * estimate <= used.shared <= 1.25 * estimate
    if launch.tiles.opaque:
        # two groups of warps have half the keys of a step each, and half the columns of values
        assert used.products == 576 // 16 + launch.tiles.block // 16


def test_8_bit_numbers_are_converted_once_for_both_products():
    target = TARGETS["sm_90"]
    launch, avals = launched("int8", target)
    text = assembly(launch_source(launch, avals, target), target)[0]
    words = launch.tiles.block * launch.problem.token_bytes // 4 // (32 * launch.tiles.num_warps)
    assert text.count("fma.rn.bf16x2") == 2 * words


def test_few_heads_take_int8_keys_as_they_are():
    target = TARGETS["sm_90"]
    launch, avals = launched("int8, 16 heads", target)
    text = assembly(launch_source(launch, avals, target), target)[0]
    # both int8 parts of 16 heads next to each other, in 18 steps of 32 columns
    assert len(re.findall(r"wgmma\S*\.m64n32k32\.s32\.s8", text)) == 18
    # 512 columns by 64 tokens, even and odd ones apart
    assert len(re.findall(r"wgmma\S*\.m64n16k16\.f32\.f16", text)) == 512 // 64 * 64 // 16
    assert "ldmatrix.sync.aligned.m8n8.x4.shared" not in text  # keys pass through no register


@pytest.mark.parametrize(
    "name",
    cover(
        ["int8, 16 heads", "e4m3, 16 heads", "int8, 16 heads, splits"],
        "int8, 16 heads",
        "e4m3, 16 heads",
    ),
)
def test_a_place_is_freed_when_all_warps_have_read_it(name):
    target = TARGETS["sm_90"]
    launch, avals = launched(name, target)
    text = assembly(launch_source(launch, avals, target), target)[0]
    (freed,) = (m.start() for m in re.finditer(r"mbarrier\.arrive\.shared", text))
    read = max(text.rindex(word, 0, freed) for word in ("ldmatrix", "wgmma.wait_group"))
    assert "bar.sync" in text[read:freed]
    assert "ldmatrix" not in text[freed:]


def test_few_heads_take_int8_keys_as_they_are_without_gluon(monkeypatch):
    monkeypatch.setattr(compat, "has_gluon", lambda: False)
    target = TARGETS["sm_90"]
    launch, avals = launched("int8, 16 heads", target)
    text = assembly(launch_source(launch, avals, target), target)[0]
    # a warp has 16 of 64 keys: two digits times 18 steps of 32 columns times two of eight keys
    assert len(re.findall(r"mma\.sync\S*\.s32\.s8", text)) == 2 * 18 * 2
    assert "sub.rn.f16x2" not in text
    assert not re.search(r"cvt\.r[mnz]i", text)  # of queries: a fourth of the rate, before all keys


def test_warps_find_their_share_alone():
    target = TARGETS["sm_90"]
    launch, avals = launched("16 heads", target)
    text = assembly(launch_source(launch, avals, target), target)[0]
    assert launch.problem.batch > 32  # more sequences than a warp has lanes
    assert "bar.sync" not in text[: text.rindex("redux.sync")]


@pytest.mark.parametrize(
    ("changed", "tiles_changed", "kernel"),
    [
        ({}, {}, "latent_split"),
        (
            {"key_dtype": "float8_e4m3fn", "value_dtype": "float8_e4m3fn", "heads": 9},
            {},
            "latent_split",
        ),
        ({}, {"splits": 4}, "latent_split"),
        ({}, {"splits": 1}, "paged_split"),
        ({}, {"num_warps": 8}, "paged_split"),
        ({"tokens": 2, "heads": 8}, {}, "paged_split"),
        ({"dim": 320, "value_dim": 256}, {}, "paged_split"),
        ({"key_dtype": "float8_e5m2", "value_dtype": "float8_e5m2"}, {}, "paged_split"),
        ({"window_left": 100}, {}, "paged_split"),
        ({"page_size": 16}, {}, "paged_split"),
        ({"batch": 4096}, {}, "latent_split"),
        ({"batch": 4097}, {}, "paged_split"),
    ],
)
def test_few_heads_and_8_bit_rows_have_a_kernel_by_hand(changed, tiles_changed, kernel):
    target = TARGETS["sm_90"]
    launch = launched("int8, 16 heads", target)[0]
    p = replace(launch.problem, **changed)
    t = tiles.canonical(replace(tiles.choose(p, target), **tiles_changed), p, target)
    bound = replace(launch, problem=p, tiles=t).bind(target)
    assert bound.kernel.__name__ == kernel
    assert kernel == "paged_split" or bound.stand_in.kernel.__name__ == "paged_split"


def test_merge_kernel():
    target = TARGETS["sm_90"]
    split, _ = launched("page 16", target)
    operands = {**split.outputs(), "sink": jax.ShapeDtypeStruct((1, 128, 2), jnp.float32)}
    merge = PagedMerge(split.problem, split.tiles, split.ranges).with_operands(operands)
    used = measure(launch_source(merge, list(operands.values()), target), target)
    assert used.spills == 0


def merge_of(name, **changed):
    """The merge of a case and the types of its operands."""
    split, _ = launched(name, TARGETS["sm_90"])
    split = replace(split, problem=replace(split.problem, **changed))
    operands = split.outputs()
    merge = PagedMerge(split.problem, split.tiles, split.ranges).with_operands(operands)
    return merge, list(operands.values())


def test_few_parts_are_merged_by_threads_that_need_no_other():
    target = TARGETS["sm_90"]
    launch, avals = merge_of("int8, 16 heads")
    assert avals[0].dtype == jnp.float16
    text = assembly(launch_source(launch, avals, target), target)[0]
    assert "shfl.sync" not in text and "bar.sync" not in text


def test_lanes_that_add_many_parts_have_the_same_sum():
    """Lanes exchange rounded values: no product is fused into the addition of another lane's."""
    target = TARGETS["sm_90"]
    launch, avals = merge_of("16 heads", batch=2)
    text = assembly(launch_source(launch, avals, target), target)[0]
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+%r\d+, (%r\d+)", text))
    assert exchanged
    products = set(re.findall(r"mul\.(?:rn\.)?f32\s+(%r\d+)", text))
    assert not exchanged & products


@pytest.mark.parametrize("columns", cover([16, 128], 128))
def test_the_launch_of_a_single_sequence_waits_and_merges(columns):
    """It counts behind all stores, and loads partial results behind the counter."""
    target = TARGETS["sm_90"]
    split, avals = launched("128 heads", target, 1, columns)
    avals.append(jax.ShapeDtypeStruct((split.count_counters,), jnp.int32))
    tiles = replace(split.tiles, splits=split.ranges)
    merged = replace(split, tiles=tiles).with_operands(
        dict(zip((*split.names, "counters_in"), avals, strict=True))
    )
    source = launch_source(merged, avals, target)
    used = measure(source, target)
    # of 64 rows: addresses of partial results, from before the loop to behind it
    assert used.spills <= 128 and not used.serialized
    assert used.registers * 32 * used.num_warps * tiles.programs_per_core <= 65536
    text = assembly(source, target)[0]
    first, gave_up = (m.start() for m in re.finditer(r"atom\.global\.gpu\.acq_rel\.add", text))
    last_store = text.rindex("st.global", 0, first)
    assert "bar.sync" in text[last_store:first]
    assert re.search(r"acquire\S* ", text[first:gave_up])
    assert "ld.global" not in text[last_store:first] and "ld.global" in text[gave_up:]
