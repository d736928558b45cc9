"""Results that lie in the memory of an operand."""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from ejkernel.kernels.triton import ragged_page_attention_v3
from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.launch import In, Launch, Out
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejktest.drawn import normal as numbers
from ejktest.launcher import custom_calls, lowered

HOPPER = cuda_target(90)


@triton.jit
def bump_even(given, out, n, BLOCK: tl.constexpr):
    i = 2 * tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(given + i, mask=i < n) + 1.0, mask=i < n)


@dataclass(frozen=True)
class InPlace:
    """x + 1 at even places, in the memory of x; an operand before it is not read."""

    n: int

    def outputs(self):
        return (jax.ShapeDtypeStruct((self.n,), jnp.float32),)

    def launch(self, target):
        arguments = {"given": In(1), "out": Out(0), "n": self.n}
        return Launch(bump_even, arguments, {"BLOCK": 16}, (1,), aliases={1: 0})


def test_a_result_in_the_memory_of_an_operand(launcher):
    x = numbers(21)
    text = lowered(lambda unread, x: call(InPlace(21), unread, x)[0], numbers(3), x)
    assert custom_calls(text)[0][1] == ["%arg1"]
    alias = "output_operand_alias<output_tuple_indices = [], operand_index = 0,"
    assert alias in text
    with compile_for(HOPPER):
        step = jax.jit(lambda x: call(InPlace(21), x, x)[0], donate_argnums=0)
        donated = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "tf.aliasing_output = 0" in donated and alias in donated
    with interpret_mode():
        out = call(InPlace(21), x, x)[0]
    np.testing.assert_array_equal(out, np.asarray(x) + (np.arange(21) % 2 == 0))


def test_a_donated_cache_is_written_in_place(launcher):
    """The argument's memory is the result's, and no launch but the write has either to change."""
    if not launcher.modern:
        pytest.skip("one launcher is enough")
    t, n, h, d = 9, 3, 2, 16
    shape = dict(queries=(t, h, d), keys=(t, 1, d), values=(t, 1, d), kv_cache=(7, 4, 2, d))
    arrays = {name: numbers(*s) for name, s in shape.items()}
    lens, tables = jnp.zeros(n, jnp.int32), jnp.zeros((n, 5), jnp.int32)
    rest = (lens, tables, jnp.zeros(n + 1, jnp.int32), jnp.zeros(3, jnp.int32))
    step = jax.jit(ragged_page_attention_v3, donate_argnums=3)
    with compile_for(HOPPER):
        traced = step.trace(*arrays.values(), *rest)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @" + launcher.name in line]
    # schedule, write, decode, prefill, merge
    assert len(calls) == 5
    kept = [re.search(r"operand_index = (\d+)", line) for line in calls]
    assert [match is not None for match in kept] == [False, True, False, False, True]
    operands = re.search(r"custom_call @\w+\(([^)]*)\)", calls[1])[1].split(", ")
    donated = re.search(r"(%arg\d+): tensor<7x4x2x16xf32> {[^}]*tf.aliasing_output = 1", text)[1]
    assert operands[int(kept[1][1])] == donated
    assert "stablehlo.copy" not in text
