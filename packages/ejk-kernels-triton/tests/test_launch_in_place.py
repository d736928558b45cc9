"""Results that lie in the memory of an operand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from ejkernel.kernels.triton import ragged_page_attention, ragged_page_attention_v3
from ejkernel.kernels.triton.bridge import call
from ejkernel.kernels.triton.launch import BATCHED, Launch
from ejkernel.kernels.triton.serving import ragged_tiles as tiles
from ejkernel.kernels.triton.serving.ragged_merge import RaggedMerge
from ejkernel.kernels.triton.serving.write import RaggedWrite
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import interpret_mode
from ejktest.drawn import normal as numbers
from ejktest.grids import cover
from ejktest.launcher import custom_calls, lowered

HOPPER = cuda_target(90)


@triton.jit
def bump_even(given, out, n, BLOCK: tl.constexpr):
    i = 2 * tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(given + i, mask=i < n) + 1.0, mask=i < n)


@dataclass(frozen=True)
class InPlace(Launch):
    """x + 1 at even places, in the memory of x; an operand before it is not read."""

    kernel = bump_even
    batching: ClassVar = {"unread": BATCHED, "given": BATCHED}

    n: int

    def outputs(self):
        return {"out": jax.ShapeDtypeStruct((self.n,), jnp.float32)}

    def grid(self, target):
        return (1,)

    def options(self, target):
        return {"num_warps": 4, "num_stages": 2}

    def arguments(self, target):
        return {"n": self.n, "BLOCK": 16}

    def in_place(self):
        return {"out": "given"}


def test_a_result_in_the_memory_of_an_operand(launcher):
    x = numbers(21)

    def bumped(unread, x):
        return call(InPlace(21), unread=unread, given=x)["out"]

    text = lowered(bumped, numbers(3), x)
    assert custom_calls(text)[0][1] == ["%arg1"]
    alias = "output_operand_alias<output_tuple_indices = [], operand_index = 0,"
    assert alias in text
    with compile_for(HOPPER):
        step = jax.jit(lambda x: call(InPlace(21), unread=x, given=x)["out"], donate_argnums=0)
        donated = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "tf.aliasing_output = 0" in donated and alias in donated
    with interpret_mode():
        out = call(InPlace(21), unread=x, given=x)["out"]
    np.testing.assert_array_equal(out, np.asarray(x) + (np.arange(21) % 2 == 0))


def test_a_donated_cache_is_written_in_place(launcher):
    """The argument's memory is the result's, from the first launch to the last."""
    if not launcher.modern:
        pytest.skip("one launcher is enough")
    t, n, h, d = 9, 3, 2, 16
    shape = dict(queries=(t, h, d), keys=(t, 1, d), values=(t, 1, d), kv_cache=(7, 4, 2, d))
    arrays = {name: numbers(*s) for name, s in shape.items()}
    lens, tables = jnp.zeros(n, jnp.int32), jnp.zeros((n, 5), jnp.int32)
    tables_and_lengths = (lens, tables, jnp.zeros(n + 1, jnp.int32), jnp.zeros(3, jnp.int32))
    step = jax.jit(ragged_page_attention_v3, donate_argnums=3)
    with compile_for(HOPPER):
        traced = step.trace(*arrays.values(), *tables_and_lengths)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @" + launcher.name in line]
    # schedule, write, decode, prefill, merge
    assert len(calls) == 5
    aliases = [re.search(r"operand_index = (\d+)", line) for line in calls]
    assert [match is not None for match in aliases] == [False, True, False, False, True]
    operands = re.search(r"custom_call @\w+\(([^)]*)\)", calls[1])[1].split(", ")
    donated = re.search(r"(%arg\d+): tensor<7x4x2x16xf32> {[^}]*tf.aliasing_output = 1", text)[1]
    assert f"{operands[int(aliases[1][1])]} = stablehlo.optimization_barrier {donated}" in text
    assert calls[4].count("output_operand_alias<") == 2  # the rows and the cache
    assert "stablehlo.copy" not in text


def ragged_call(rng, counts, lens, *, table, pages, heads=4, dim=16, page=4):
    """Arguments of ragged_page_attention_v3, two packed rows of no sequence among them."""
    n, kv_heads, tokens = len(counts), heads // 2, sum(counts) + 2

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    tables = rng.permutation(pages)[: table * n].reshape(n, table)
    return {
        "queries": normal(tokens, heads, dim),
        "keys": normal(tokens, kv_heads, dim),
        "values": normal(tokens, kv_heads, dim),
        "kv_cache": normal(pages, page, 2 * kv_heads, dim),
        "kv_lens": jnp.asarray(lens, jnp.int32),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "query_start_loc": jnp.asarray(np.cumsum([0, *counts]), jnp.int32),
        "distribution": jnp.asarray([0, 0, n], jnp.int32),
    }


def reading(call):
    """Returns the arguments of the same call on a cache that holds the new tokens already."""
    names = ("queries", "block_tables", "query_start_loc")
    same = {name: call[name] for name in names}
    count = call["distribution"][2]
    return same | {"context_lens": call["kv_lens"], "kv_pages": call["kv_cache"], "num_seqs": count}


@pytest.mark.parametrize("operation", cover(["read", "write", "write packed"], "write"))
def test_results_outside_the_memory_of_their_operands(monkeypatch, operation):
    """XLA may move what a call takes from the caller, and what it returns, out of the memory that
    they were said to share."""
    rng = np.random.default_rng(0)
    # decoded, prefilled in tiles whose keys are cut into parts, empty, prefilled in whole tiles
    monkeypatch.setattr(tiles, "MIN_SPLIT_KEYS", 32)
    call = ragged_call(rng, counts=(1, 14, 0, 12), lens=(17, 90, 9, 12), table=23, pages=92)
    if operation == "write packed":  # eight combined heads for six
        for name in ("keys", "values"):
            call[name] = jnp.concatenate([call[name], call[name][:, :1]], 1)
        call["queries"] = jnp.concatenate([call["queries"], call["queries"][:, :2]], 1)
        call["kv_cache"] = jnp.asarray(rng.integers(-128, 128, (92, 4, 2, 4, 128)), jnp.int8)
        call |= {"k_scale": 0.1, "v_scale": 0.1}
    run, arguments = ragged_page_attention_v3, call
    if operation == "read":
        run, arguments = ragged_page_attention, reading(call)
    arguments["cfg"] = {"num_kv_pages_per_block": 4}
    outer, moved = {RaggedWrite, RaggedMerge}, []
    bind_of = {launch: launch.bind for launch in outer}

    def bound_elsewhere(launch, target):
        bound = bind_of[type(launch)](launch, target)
        moved.append((type(launch), len(bound.aliases)))
        return replace(bound, aliases={})

    with interpret_mode():
        expected = jax.tree.leaves(run(**arguments))
        for launch in outer:
            monkeypatch.setattr(launch, "bind", bound_elsewhere)
        jax.clear_caches()
        found = jax.tree.leaves(run(**arguments))
    assert set(moved) == (
        {(RaggedMerge, 1)} if operation == "read" else {(RaggedWrite, 1), (RaggedMerge, 2)}
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
