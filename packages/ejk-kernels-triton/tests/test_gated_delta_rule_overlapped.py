"""Chunks prepared in the launch that scans them: the bits of two launches, and what is waited for.

Triton's interpreter runs the programs that prepare before those that scan. That a scan which runs
at the same time waits cannot be seen here; that it waits for the counters of all that it loads can.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from ejkernel.kernels.triton import gated_delta_rule
from ejkernel.kernels.triton.bound_launch import BoundLaunch, In, Out
from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.compiled import (
    Code,
    TooManyPrograms,
    check_programs,
    compile_kernel,
)
from ejkernel.kernels.triton.gated_delta_rule.readiness import GROUP, OUTSIDE, wait_for_chunk
from ejkernel.kernels.triton.interpret import run_launch
from ejkernel.kernels.triton.language import tl, triton
from ejkernel.kernels.triton.resources import launch_source, measure
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import interpret_mode
from ejktest.cases import delta
from ejktest.cases.delta import delta_arguments as make
from ejktest.triton_calls import launches_of, traced_launches
from ejktest.with_tiles import with_tiles

HOPPER = cuda_target(90)
SMALL = {"time_tile": 16, "dv_tile": 16}
DIMS = dict(b=1, s=132, h=2, hk=1, dk=16, dv=16)
CU = np.array([0, 3, 3, 115, 116, 124], np.int32)
CASES: dict[str, tuple[dict[str, Any], np.ndarray | None, dict[str, Any]]] = {
    "tail": (DIMS, None, {"normalize_qk": True}),
    "batch rows": (dict(b=2, s=32, h=4, hk=2, dk=16, dv=32), None, {}),
    "reversed": ({**DIMS, "s": 144, "h": 1}, None, {"reverse": True}),
    "packed": ({**DIMS, "states": 5}, CU, {}),
    "packed, reversed": ({**DIMS, "states": 5}, CU, {"reverse": True}),
    "odd head dims": (dict(b=1, s=24, h=2, hk=1, dk=12, dv=20), None, {}),
}


@pytest.fixture(autouse=True)
def interpreted():
    with interpret_mode(), compile_for(HOPPER):
        yield


@pytest.mark.parametrize("name", CASES)
def test_bits_of_two_launches(name):
    dims, cu, options = CASES[name]
    args = make("none" if "odd" in name else "head", **dims)
    options = {"cfg": SMALL, "return_state": True, "cu_seqlens": cu, **options}
    want = gated_delta_rule(**args, **options)
    assert np.isfinite(want[0]).all()
    actual = with_tiles(gated_delta_rule, preparers=3)(**args, **options)
    jax.tree.map(np.testing.assert_array_equal, actual, want)


def test_one_launch_forward_and_the_same_ones_backward():
    args = make("head", b=1, s=40, h=2, hk=1, dk=8, dv=8)

    def names(kernel, backward):
        def total(args):
            return kernel(**args, cfg=SMALL).sum()

        run = jax.grad(total) if backward else total
        program = jax.make_jaxpr(run)(args)
        return [type(launch).__name__ for launch, _ in traced_launches(program.jaxpr)]

    kernel = with_tiles(gated_delta_rule, preparers=3)
    assert names(kernel, False) == ["OverlappedScanLaunch"]
    assert names(gated_delta_rule, False) == ["PrepareLaunch", "ScanLaunch"]
    of_gradients = names(gated_delta_rule, True)
    assert of_gradients[:3] == ["PrepareLaunch", "ScanLaunch", "PrepareLaunch"]
    assert names(kernel, True) == ["OverlappedScanLaunch", *of_gradients[2:]]


def test_mapped():
    args = {n: jnp.stack([x, 0.5 * x]) for n, x in make("head", **{**DIMS, "s": 20}).items()}
    want, actual = (
        jax.vmap(lambda args, kernel=kernel: kernel(**args, cfg=SMALL))(args)
        for kernel in (gated_delta_rule, with_tiles(gated_delta_rule, preparers=3))
    )
    np.testing.assert_array_equal(actual, want)


@pytest.mark.parametrize(
    ("gate", "s", "message"),
    [("channel", 40, "preparers=3: gates per key channel"), ("head", 4, "preparers=3: 4 tokens")],
)
def test_refuses_calls_without_such_a_launch(gate, s, message):
    args = make(gate, b=1, s=s, h=2, hk=2, dk=8, dv=8)
    with pytest.raises(ValueError, match=message):
        with_tiles(gated_delta_rule, preparers=3)(**args)


def test_refuses_more_programs_than_run_at_once():
    code = Code(
        "kernel", "", num_warps=4, shared=115240, scratch=0, scratch_align=1, tensor_maps=()
    )
    check_programs(code, 264, HOPPER)
    with pytest.raises(TooManyPrograms, match="265 programs wait for each other, and 264 fit"):
        check_programs(code, 265, HOPPER)
    with pytest.raises(TooManyPrograms, match=r"133 .* 132 fit"):
        check_programs(replace(code, shared=115720), 133, HOPPER)
    with pytest.raises(TooManyPrograms, match=r"133 .* 132 fit"):
        check_programs(replace(code, num_warps=16), 133, HOPPER)
    with pytest.raises(TooManyPrograms, match="NVIDIA"):
        check_programs(code, 1, rocm_target("gfx942"))


@pytest.mark.slow
def test_two_programs_share_a_multiprocessor():
    """Copies of the first chunk, and of later ones in the loop, wait: a layer of Qwen3-Next."""
    other = with_tiles(gated_delta_rule, preparers=136, columns=32, num_stages=2)
    run = delta.COMPILED["delta"].forward(SimpleNamespace(gated_delta_rule=other))
    program = jax.make_jaxpr(run)(*delta.COMPILED["delta"].shapes())
    launch, avals = launches_of(program, HOPPER)["overlapped scan"]
    source = launch_source(launch, avals, HOPPER)
    code = compile_kernel(source, HOPPER)
    assert launch.bind(HOPPER).programs_wait
    check_programs(code, launch.grid(HOPPER)[0], HOPPER)
    assert code.text.count("ld.acquire.gpu") == 2
    assert code.text.count("red.global.gpu.release") == 1
    assert not measure(source, HOPPER).serialized


@triton.jit
def store_waits(counters, sizes, first, last, waits, PTX: tl.constexpr):
    """Stores what every chunk of a scan gets from its wait."""
    for i in range(0, last - first):
        tl.store(waits + i, wait_for_chunk(counters, 0, 0, i, first, last, sizes, PTX))


class Pieces(NamedTuple):
    """The sizes that waits know."""

    pieces: int
    kv_heads: int
    REVERSED: bool


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("pieces", "first", "last"), [(20, 0, 20), (24, 5, 19), (16, 7, 8)])
def test_every_group_is_waited_for_before_its_chunks(pieces, first, last, reverse):
    """Counters that no group has: a wait is seen."""
    group = GROUP.value
    counters, waits = np.full(-(-pieces // group), -1, np.int32), np.zeros(last - first, np.int32)
    arguments = {"counters": In(0), "sizes": Pieces(pieces, 1, reverse), "first": first}
    arguments |= {"last": last, "waits": Out(0)}
    run_launch(BoundLaunch(store_waits, arguments, {"PTX": False}, (1,)), [counters], [waits])
    scanned = np.arange(first, last)[:: -1 if reverse else 1] // group
    entered = np.diff(scanned, prepend=-1) != 0
    np.testing.assert_array_equal(waits, np.where(entered, OUTSIDE.value, 0))


def test_other_counts_than_those_of_a_group_are_seen():
    """So the runs above have waited for exactly what is prepared."""
    args = make("none", b=1, s=20, h=1, hk=1, dk=8, dv=8)
    kernel = with_tiles(gated_delta_rule, preparers=2)
    program = jax.make_jaxpr(lambda args: kernel(**args, cfg=SMALL))(args)
    launch, _ = launches_of(program, HOPPER)["overlapped scan"]
    operands = {name: args[name] for name in ("query", "key", "value")}
    operands["initial"] = args["initial_state"]
    for start in (0, 1):
        counters = jnp.full(launch.counters, start, jnp.int32)
        with contextlib.ExitStack() as stack:
            if start:
                stack.enter_context(pytest.raises(Exception, match="out-of-bounds load"))
            jax.block_until_ready(call(launch, **operands, counters_in=counters))
