"""The arithmetic that keeps hopeless tiles from the compiler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.triton import flash_attention
from ejkernel.kernels.triton.flash_attention import tiles
from ejkernel.kernels.triton.flash_attention.fits import fits, needs
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejktest import triton_calls
from ejktest.bound import bound

MEASURED = json.loads(Path(__file__).with_name("aot_table.json").read_text())["rows"]
HOPPER = cuda_target(90)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("call", ["d64", "d128", "d256", "bias", "float32 d128"])
def test_bounds_lie_below_what_compiled_code_uses(call, target):
    measured = MEASURED[f"{call} @ {target}"]
    chip = triton_calls.TARGETS[target]
    for kernel, (plan, _) in triton_calls.launches(call, target).items():
        if kernel not in ("forward", "dq", "dkv"):
            continue
        need = needs(kernel, plan.tiles, plan.problem, chip)
        assert need.shared <= measured[kernel]["shared"]
        assert need.registers <= measured[kernel]["registers"]
        assert fits(kernel, plan.tiles, plan.tiles, plan.problem, chip)


def problem(**sizes):
    arrays = {"query": (1, 4096, 8, 128), "key": (1, 4096, 8, 128), "value": (1, 4096, 8, 128)}
    given = {
        name: jax.ShapeDtypeStruct(sizes.get(name, shape), jnp.bfloat16)
        for name, shape in arrays.items()
    }
    return flash_attention.problem(bound(flash_attention.call, **given).arguments)


def test_what_is_ruled_out():
    p = problem()
    _, chosen = tiles.backward_tiles(p, HOPPER)
    assert fits("dkv", chosen, chosen, p, HOPPER)
    spills = replace(chosen, block_kv=4 * chosen.block_kv)  # 256 accumulators a thread
    assert not fits("dkv", spills, chosen, p, HOPPER)
    fwd = tiles.forward_tiles(p, HOPPER)
    assert not fits("forward", replace(fwd, num_stages=8), fwd, p, HOPPER)  # 272 KiB
    few = problem(query=(1, 1024, 8, 128))  # 128 programs of 64 rows, 64 of 128
    assert not fits("forward", replace(fwd, block_q=128, num_warps=8), fwd, few, HOPPER)


def test_candidates_are_few_legal_and_begin_with_the_heuristic():
    array = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    call = bound(flash_attention.call, query=array, key=array, value=array)
    with compile_for(HOPPER):
        found = flash_attention.candidates(call)
        assert found[0] == flash_attention.heuristic(call) and 4 <= len(found) <= 12
    assert all(c not in found[:i] for i, c in enumerate(found))
