"""The shipped launches of native sparse attention compile without spilling registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton.native_sparse_attention import tiles
from ejkernel.kernels.triton.native_sparse_attention.branches import OTHERS
from ejkernel.kernels.triton.native_sparse_attention.dkv_kernel import SelectedDkv, SumPieces
from ejkernel.kernels.triton.native_sparse_attention.dq_kernel import DqFromDs, SelectedDq
from ejkernel.kernels.triton.native_sparse_attention.forward_kernel import SelectedForward
from ejkernel.kernels.triton.native_sparse_attention.problem import Problem
from ejkernel.kernels.triton.native_sparse_attention.select_kernel import ScoreBlocks
from ejkernel.kernels.triton.resources import Resources, launch_source, measure
from ejkernel.kernels.triton.targets import Target, cuda_target, rocm_target
from ejktest.grids import cover

pytest.importorskip("triton")

TARGETS = {
    "sm_80": cuda_target(80, 108),
    "sm_90": cuda_target(90),
    "sm_100": cuda_target(100, 148),
    "gfx942": rocm_target("gfx942"),
}
# length, heads, kv_heads, dim, value_dim, size, blocks, slots, dtype, packed
SHAPES: dict[str, tuple[Any, ...]] = {
    "64:4 d128": (32768, 64, 4, 128, 128, 64, 512, 16, "bfloat16", False),
    "one head d64": (8192, 8, 8, 64, 64, 32, 300, 33, "bfloat16", True),
    "64:1 d192/128": (8192, 64, 1, 192, 128, 128, 64, 8, "bfloat16", False),
    "d256": (8192, 32, 4, 256, 256, 64, 128, 16, "bfloat16", False),
    "d128 float16": (8192, 32, 8, 128, 128, 64, 128, 16, "float16", False),
    "d128 float32": (4096, 32, 4, 128, 128, 64, 64, 16, "float32", True),
}
KINDS = ("forward", "forward added", "total", "dq", "pieces", "sums", "ranks", "scores")


def problem(shape: str) -> Problem:
    length, h, hk, d, dv, size, blocks, slots, dtype, packed = SHAPES[shape]
    return Problem(1, length, h, hk, d, dv, size, blocks, slots, d**-0.5, dtype, packed)


def operands(p: Problem, dkv: tiles.Tiles) -> dict[str, jax.ShapeDtypeStruct]:
    row, key = (p.batch, p.length), (p.batch, p.kv_heads)
    found = {
        "q": ((*row, p.heads, p.dim), p.dtype),
        "k": ((*row, p.kv_heads, p.dim), p.dtype),
        "v": ((*row, p.kv_heads, p.value_dim), p.dtype),
        "do": ((*row, p.heads, p.value_dim), p.dtype),
        "terms": ((p.batch, p.kv_heads, p.blocks + 64, 2, p.dim), "float16"),
        "factors": ((p.batch, p.kv_heads), "float32"),
        "chosen": ((*row, p.kv_heads, p.slots), "int32"),
        "places": ((*key, p.entries), "int32"),
        "bounds": ((*key, p.blocks + 1), "int32"),
        **dict.fromkeys(("o_cmp", "o_swa"), ((*row, p.heads, p.value_dim), p.dtype)),
        **dict.fromkeys(
            ("base", "log_sum", "delta", "g_cmp", "g_slc", "g_swa"), ((*row, p.heads), "float32")
        ),
        **dict.fromkeys(("starts", "firsts", "completes", "owns"), (row, "int32")),
        **dict.fromkeys(("first_tokens", "last_tokens"), ((p.batch, p.blocks), "int32")),
    }
    avals = {n: jax.ShapeDtypeStruct(shape, jnp.dtype(kind)) for n, (shape, kind) in found.items()}
    return avals | SelectedDkv(p, dkv, p.kv_heads, p.kv_heads).outputs()


def used(shape: str, kind: str, target: Target) -> Resources:
    p = problem(shape)
    chosen = tiles.choose(p, target)
    heads = p.kv_heads, p.kv_heads
    launch: Any = {
        "forward": SelectedForward(p, chosen.fwd, True),
        "forward added": SelectedForward(p, chosen.fwd, True),
        "total": SelectedForward(p, chosen.fwd, False),
        "dq": SelectedDq(p, chosen.dq),
        "dq of ds": DqFromDs(p, chosen.dq, *heads),
        "pieces": SelectedDkv(p, chosen.dkv, *heads),
        "sums": SumPieces(p, chosen.dkv, *heads),
        "ranks": ScoreBlocks(p, tiles.choose_select_tiles(p, target), True),
        "scores": ScoreBlocks(p, tiles.choose_select_tiles(p, target), False),
    }[kind]
    given = {name: x for name, x in operands(p, chosen.dkv).items() if name in launch.batching}
    if not p.packed:
        packed = ("starts", "first_tokens", "last_tokens", "firsts", "completes", "owns")
        given = {name: x for name, x in given.items() if name not in packed}
    if kind == "forward":
        given = {name: x for name, x in given.items() if name not in OTHERS}
    launch = launch.with_operands(given)
    found = measure(launch_source(launch, list(given.values()), target), target)
    print(f"{shape} {kind} {target.name}: {launch.tiles}: {found}")
    assert found.shared <= target.shared_limit
    return found


@pytest.mark.parametrize("kind", ["pieces", "ranks"])
def test_matmuls_are_not_serialized(kind):
    found = used("64:4 d128", kind, TARGETS["sm_90"])
    assert found.spills == 0 and found.products > 0 and not found.serialized


@pytest.mark.parametrize(
    ("kind", "programs"),
    cover(
        [("forward", 6), ("forward added", 6), ("total", 6), ("dq of ds", 6)],
        ("forward added", 6),
        ("dq of ds", 6),
    ),
)
def test_programs_of_a_multiprocessor(kind, programs):
    """Each waits for its keys most of the time."""
    found = used("64:4 d128", kind, TARGETS["sm_90"])
    assert found.spills == 0 and found.products > 0 and not found.serialized
    assert programs * (found.shared + 2**10) <= 228 * 2**10
    assert programs * found.num_warps * 32 * found.registers <= 2**16


@pytest.mark.slow
@pytest.mark.parametrize("chip", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles_everywhere(shape, chip):
    kinds = (*KINDS, "dq of ds") if problem(shape).stores_ds else KINDS
    assert {kind: used(shape, kind, TARGETS[chip]).spills for kind in kinds} == dict.fromkeys(
        kinds, 0
    )
