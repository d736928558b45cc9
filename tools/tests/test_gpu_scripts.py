"""What scripts for a GPU name exists, and as much of them as needs none works."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import checkout
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejktest import (
    attention_at_size,
    grouped_cases,
    latent_at_size,
    paged_at_size,
    ragged_cases,
    sparse_cases,
)
from gpu import compare


@pytest.fixture
def memory(monkeypatch):
    """``check_memory``, whose launches give zeros."""
    kinds = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "uint32")
    torch = SimpleNamespace(**dict.fromkeys(kinds), empty=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    names = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS")
    for name in names:
        monkeypatch.setenv(name, "")  # which the script sets
    script = importlib.import_module("gpu.check_memory")
    yield script
    del sys.modules["gpu.check_memory"]


def test_memory_checkers_are_given_cases_that_exist(memory):
    lists = {
        memory.flash: attention_at_size.CASES,
        memory.sparse: attention_at_size.SPARSE,
        memory.paged: paged_at_size.CASES,
        memory.latent: latent_at_size.CASES,
        memory.ragged: ragged_cases.CASES,
        memory.grouped: [case[:2] for case in grouped_cases.CASES],
        memory.stored: grouped_cases.STORED,
        memory.varied: memory.VARIANTS,
        memory.lists: sparse_cases.CASES,
        memory.contiguous: [()],
        memory.branches: sparse_cases.CASES,
        memory.whole: [(False,), (True,)],
    }
    for run, *case in memory.CALLS:
        known = lists[run]
        named = isinstance(known, dict) and known is not memory.VARIANTS
        assert (case[0] if named else tuple(case[:2])) in known, (run, case)


def test_calls_are_chosen_by_kind_or_by_name(memory):
    labels = [memory.label(call) for call in memory.chosen(["contiguous", "latent e4m3"])]
    assert labels == ["latent e4m3", "contiguous"]
    assert memory.chosen([]) == list(memory.CALLS)
    with pytest.raises(SystemExit, match="no such calls: latent e9; kinds are flash, sparse"):
        memory.chosen(["latent e9", "paged"])


def test_calls_launch_outside_of_jit(memory, monkeypatch):
    """Under ``disable_jit`` every launch passes by where the script puts its own."""
    launched = []

    def zeros(*arrays, plan):
        launched.append(plan)
        return [jnp.zeros(o.shape, o.dtype) for o in plan.outputs()]

    monkeypatch.setattr(memory.bridge._primitive, "impl", zeros)
    with compile_for(cuda_target(90, 132)), jax.disable_jit():
        memory.grouped("some of eight", "bfloat16", True)
        assert len(launched) == 3
        memory.varied("mean_pooling", "whole")
    assert len(launched) == 5


def test_a_worker_answers_each_case_it_is_asked(monkeypatch, capsys):
    wanted = [("cpu-g8", "fwd"), ("no-such-case", "fwd")]
    monkeypatch.setattr(compare, "milliseconds", lambda program, given: program(*given).shape[1])
    here, there = multiprocessing.Pipe()
    work = threading.Thread(
        target=compare.worker, args=(there, checkout.ROOT, "grouped_matmul", "xla", wanted)
    )
    work.start()
    assert compare.answer(here) == "ready"
    assert [compare.answer(here, *question) for question in wanted] == [1024, None]
    here.close()
    work.join(30)
    assert not work.is_alive() and "no-such-case fwd: KeyError" in capsys.readouterr().err
