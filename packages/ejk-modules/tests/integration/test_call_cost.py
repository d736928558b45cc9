"""What tracing one call costs, counted in our Python calls: a count is alike on every machine."""

from __future__ import annotations

import collections
import sys

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops import interpret_mode
from ejktest.device import H200, on


def traced(platform, length):
    q = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.bfloat16)
    jax.make_jaxpr(lambda q: flash_attention(q, q, q, causal=True, platform=platform))(q)


def counted(platform):
    """Our calls by qualified name while a new call is traced, and the deepest stack of ours."""
    calls: collections.Counter[str] = collections.Counter()
    deepest: list[str] = []

    def look(frame, event, arg):
        if event != "call" or "/ejkernel/" not in frame.f_code.co_filename:
            return
        calls[frame.f_code.co_qualname] += 1
        if frame.f_code.co_qualname == "call" and frame.f_code.co_filename.endswith("bridge.py"):
            while frame is not None:
                if "/ejkernel/" in frame.f_code.co_filename:
                    deepest.append(frame.f_code.co_qualname)
                frame = frame.f_back

    traced(platform, 64)  # imports, versions, tables
    sys.setprofile(look)
    try:
        traced(platform, 80)
    finally:
        sys.setprofile(None)
    return calls, deepest


@pytest.fixture(autouse=True)
def heuristics(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def test_a_traced_call_of_triton_flash_settles_each_thing_once():
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpret_mode():
        calls, frames = counted("triton")
    assert calls.total() < 1000, calls.most_common(20)
    assert len(frames) <= 7, frames  # from the public function to the launch
    # one for shapes alone, from which the config follows, and one for the arrays
    assert calls["Operation.bind"] == 2
    # a mask of numbers alone is one object for all calls that have it: made once, then found
    assert calls["combine_masks"] == calls["mask_of_rule"] == 0
    assert calls["KernelRegistry._survey"] == calls["CallKernel.supports"] == 1
    assert calls["payload_distance"] + calls["distance_of_alike"] == 0  # no table of this device


def test_looking_up_a_cards_table_is_cheap():
    pytest.importorskip("triton", reason="Triton is not installed")
    with on(H200):
        calls, _ = counted("triton")
    assert calls["outline"] == 1 and calls.total() < 1000, calls.most_common(20)


def test_a_traced_call_of_xla_flash_asks_each_implementation_once():
    calls, _ = counted("xla")
    assert calls.total() < 1150, calls.most_common(20)
    assert calls["KernelRegistry._survey"] == 1
