"""Kernels as pipelines of named stages, some of them another kernel's."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.ops import KernelNotFound
from ejkernel.ops.stages import ComposedKernel, StagedKernel
from ejkernel.types import calls
from ejkernel.types.calls import arguments

BATCHES: list[tuple[str, int]] = []


def rows_of(work: Any) -> int:
    return getattr(work.problem, "rows", getattr(work.problem, "batch", 0))


def double(work, arrays):
    BATCHES.append(("double", rows_of(work)))
    return {"doubled": 2 * arrays["q"]}


def add_one(work, arrays):
    BATCHES.append(("add", rows_of(work)))
    return {"o": arrays["doubled"] + 1}


def add_ten(work, arrays):
    BATCHES.append(("add ten", rows_of(work)))
    return {"o": arrays["doubled"] + 10}


class Staged(StagedKernel):
    call = calls.PageAttention
    reads = arguments.PAGES | {"query", "key_cache", "value_cache", "softmax_scale"}
    stages: ClassVar = {"decode": double, "merge": add_one}


class Ragged(Staged):
    call = calls.RaggedPageAttention
    reads = arguments.RAGGED | {"softmax_scale"}


class Composed(ComposedKernel):
    call = calls.PageAttention
    reads = Staged.reads
    base_platform = "triton"
    stages: ClassVar = {"merge": add_ten}
    base = Staged()


@pytest.fixture(autouse=True)
def no_batches():
    BATCHES.clear()


def paged(shape=(2, 4, 8)):
    cache = np.zeros((3, 16, 2, 8), np.float32)
    q = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return q, cache, cache, np.ones(2, np.int32), np.zeros((2, 1), np.int32)


def test_stages_run_in_order_on_the_arrays_so_far():
    q, *others = paged()
    np.testing.assert_allclose(Staged()(q, *others), 2 * q + 1)
    assert BATCHES == [("double", 2), ("add", 2)]


def test_a_composed_kernel_replaces_a_stage_and_the_base_does_not_know():
    q, *others = paged()
    np.testing.assert_allclose(Composed()(q, *others), 2 * q + 10)
    assert BATCHES == [("double", 2), ("add ten", 2)]
    np.testing.assert_allclose(Staged()(q, *others), 2 * q + 1)


@pytest.mark.parametrize("mapped", [(0,), (0, 1), (0, 4)])
def test_mapped_calls_of_a_cache_are_one_call_of_more_sequences(mapped):
    args = list(paged())
    args[0] = paged((3, 2, 4, 8))[0]
    for i in mapped[1:]:
        args[i] = np.stack([args[i]] * 3)
    axes = tuple(0 if i in mapped else None for i in range(len(args)))
    got = jax.vmap(Composed(), axes)(*args)
    np.testing.assert_allclose(got, 2 * args[0] + 10)
    # traced once for one call, and once for all
    assert BATCHES[-2:] == [("double", 6), ("add ten", 6)]


def test_mapped_calls_of_packed_rows_are_a_loop():
    cache = np.zeros((3, 16, 2, 8), np.float32)
    q = np.random.default_rng(0).standard_normal((3, 5, 4, 8)).astype(np.float32)
    numbers = np.asarray([5], np.int32), np.zeros((1, 1), np.int32), np.asarray([0, 5], np.int32)
    got = jax.vmap(lambda q: Ragged()(q, cache, *numbers, 1))(jnp.asarray(q))
    np.testing.assert_allclose(got, 2 * q + 1)
    assert {rows for _, rows in BATCHES} == {5}


def test_a_composed_kernel_without_its_base_says_what_is_missing(monkeypatch):
    def missing(self):
        raise KernelNotFound("nothing is registered")

    monkeypatch.setattr(Composed, "base", property(missing))
    reason = Composed().unavailable_reason()
    assert reason == "some stages belong to the triton kernels: nothing is registered"


def test_an_argument_that_the_base_does_not_read_is_refused():
    class Reads(Composed):
        reads = Composed.reads | {"logits_soft_cap"}

    q, *others = paged()
    with pytest.raises(Exception, match="logits_soft_cap: not supported"):
        partial(Reads(), logits_soft_cap=2.0)(q, *others)
