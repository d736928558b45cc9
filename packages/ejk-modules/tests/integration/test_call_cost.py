"""What tracing one call costs, counted in our Python calls: a count is alike on every machine."""

from __future__ import annotations

import collections
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    FlashAttention,
    create_default_executor,
    flash_attention,
    ragged_page_attention_v3,
)
from ejkernel.ops import interpret_mode
from ejkernel.ops.core.binding import Binding
from ejkernel.types import MaskInfo
from ejktest.device import H200, on


def traced(platform, length, *masks):
    q = jax.ShapeDtypeStruct((1, length, 4, 32), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def call(q, ids):
        every = {"attention_mask": ids, "mask_info": MaskInfo.from_segments(ids)}
        given = {name: every[name] for name in masks}
        return flash_attention(q, q, q, causal=True, platform=platform, **given)

    jax.make_jaxpr(call)(q, ids)


def counted(platform, *masks):
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

    for length in (64, 72):  # imports, versions, tables; the program of lengths like 80
        traced(platform, length, *masks)
    sys.setprofile(look)
    try:
        traced(platform, 80, *masks)
    finally:
        sys.setprofile(None)
    return calls, deepest


@pytest.fixture(autouse=True)
def heuristics(monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")


def test_a_traced_call_of_triton_flash_does_each_thing_once():
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpret_mode():
        calls, frames = counted("triton")
    assert calls.total() < 1000, calls.most_common(20)
    assert len(frames) <= 7, frames  # from the public function to the launch
    # for shapes alone, from which the config follows; what it does with arrays is done again
    assert calls["Operation.bind"] == 1
    # a mask without arrays is one object for all calls that have it: made once, then found
    assert calls["combine_masks"] == calls["mask_of_rule"] == 0
    assert calls["KernelRegistry._survey"] == calls["CallKernel.supports"] == 1
    assert calls["key_distance"] + calls["distance_within_schema"] == 0  # no table of this device


@pytest.mark.parametrize("masks", [("mask_info",), ("mask_info", "attention_mask")])
def test_the_masks_of_a_call_are_joined_once(masks):
    calls, _ = counted("xla", *masks)
    assert calls["combine_masks"] == calls["Operation.bind"] == 1


def test_looking_up_a_cards_table_is_cheap():
    pytest.importorskip("triton", reason="Triton is not installed")
    with on(H200):
        calls, _ = counted("triton")
    assert calls["key_schema"] == 1 and calls.total() < 1045, calls.most_common(20)


def test_a_traced_call_of_xla_flash_asks_each_implementation_once():
    calls, _ = counted("xla")
    assert calls.total() < 1195, calls.most_common(20)
    assert calls["KernelRegistry._survey"] == 1


def test_a_binding_leaves_with_its_call(monkeypatch):
    """A trace later on, of the same program under other settings of JAX, binds for itself."""
    q = np.ones((1, 24, 2, 16), np.float32)
    executor = create_default_executor(autotune=False)
    for x in (jnp.asarray(q), q, q.astype(np.float64)):  # one program, compiled once or twice
        executor(FlashAttention(), x, x, x, platform="xla")
    entries = executor._programs._programs.values()
    programs = [inspect.unwrap(entry.function) for entry in entries]
    assert programs and not any(isinstance(x, Binding) for p in programs for x in vars(p).values())
    binds, bind = [], FlashAttention.bind
    monkeypatch.setattr(FlashAttention, "bind", lambda *call: binds.append(call) or bind(*call))
    for program in programs:
        jax.eval_shape(lambda *arrays, p=program: p(*arrays), x, x, x)
    assert len(binds) == len(programs)


def test_a_repeated_eager_call_of_a_server_does_little_in_python():
    """Every Python function counts, also those of JAX."""
    q, kv, new = np.ones((4, 4, 16)), np.ones((8, 4, 4, 16)), np.ones((4, 2, 16))
    floats = [jnp.asarray(x, jnp.float32) for x in (q, new, new, kv)]
    integers = ([5] * 4, np.arange(8).reshape(4, 2), np.arange(5), [4] * 3)
    arrays = (*floats, *(jnp.asarray(x, jnp.int32) for x in integers))
    calls: collections.Counter[str] = collections.Counter()

    def look(frame, event, arg):
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    for _ in range(3):
        ragged_page_attention_v3(*arrays, k_scale=0.5, v_scale=0.25, platform="xla")
    sys.setprofile(look)
    try:
        ragged_page_attention_v3(*arrays, k_scale=0.5, v_scale=0.25, platform="xla")
    finally:
        sys.setprofile(None)
    assert calls.total() <= 72, calls.most_common(20)
