"""Transfers of a compiled program that are under way while a kernel runs."""

import importlib.util

import pytest

from ejktest.transfers import Transfer, transfers
from gpu import sharing

PROGRAM = """HloModule jit_ring, is_scheduled=true

%body (p: (bf16[8])) -> (bf16[8]) {
  %p = bf16[8]{0} parameter(0)
  %permute-start.1 = (bf16[8]{0}, bf16[8]{0}, u32[]) collective-permute-start(%p), channel_id=1
  %permute-start.2 = (bf16[8]{0}, bf16[8]{0}, u32[]) collective-permute-start(%p), channel_id=2
  %branch = bf16[8]{0} conditional(%p, %p), branch_computations={%one, %two}
  %permute-done.2 = bf16[8]{0} collective-permute-done(%permute-start.2)
  ROOT %permute-done.1 = bf16[8]{0} collective-permute-done((bf16[8]{0}) %permute-start.1)
}

ENTRY %main (q: bf16[8]) -> bf16[8] {
  %q = bf16[8]{0} parameter(0)
  %sum = bf16[8]{0} all-reduce(%q), channel_id=3
  %permute-start.3 = (bf16[8]{0}, bf16[8]{0}, u32[]) collective-permute-start(%sum), channel_id=4
  %add = bf16[8]{0} add(%q, %q)
  %permute-done.3 = bf16[8]{0} collective-permute-done(%permute-start.3)
  ROOT %out = bf16[8]{0} custom-call(%permute-done.3), custom_call_target="tpu_custom_call"
}
"""


def test_a_transfer_is_hidden_where_a_kernel_runs_before_it_is_awaited():
    permute = "collective-permute"
    assert list(transfers(PROGRAM)) == [
        Transfer(permute, "%body", 1, 16),
        Transfer(permute, "%body", 1, 16),
        Transfer("all-reduce", "%main", 0, 16),
        Transfer(permute, "%main", 0, 16),
    ]


def test_kernels_of_gpus():
    permutes = PROGRAM.replace("conditional(%p, %p)", "custom-call(%p), custom_call_target={}")
    hidden = {
        target: [transfer.kernels for transfer in transfers(permutes.replace("{}", target))][:2]
        for target in ("mosaic_gpu_v2", "triton_kernel_call", "cub_sort")
    }
    assert hidden == {"mosaic_gpu_v2": [1, 1], "triton_kernel_call": [1, 1], "cub_sort": [0, 0]}


def test_a_kernel_in_a_fusion():
    """XLA puts a kernel of a slice of its operand into a fusion with that slice."""
    called = """%sliced (p: bf16[8]) -> bf16[8] {
  ROOT %call = bf16[8]{0} custom-call(%p), custom_call_target="mosaic_gpu_v2"
}

%body"""
    program = PROGRAM.replace("%body", called, 1)
    for target, kernels in (("%sliced", 1), ("%added", 0)):
        fusion = f"fusion(%p), kind=kCustom, calls={target}"
        sent = list(transfers(program.replace("conditional(%p, %p)", fusion)))
        assert [transfer.kernels for transfer in sent] == [kernels, kernels, 0, 0]


def test_the_wheels_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'jax\[cuda13\]'"):
        sharing.prepare_environment()
