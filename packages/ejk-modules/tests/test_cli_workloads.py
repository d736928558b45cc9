"""The named cases are calls that the operations accept, and names are found or answered."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import get_default_executor, supports
from ejkernel.modules._table import operation_class
from ejkernel.modules.bench import limits, peers
from ejkernel.modules.bench.case import Case, case_of, forward_and_backward
from ejkernel.modules.bench.limits import Limits
from ejkernel.modules.bench.runner import run_case
from ejkernel.modules.bench.timing import Timing
from ejkernel.modules.workloads import call_of, find
from ejkernel.modules.workloads.families import AttentionShape, GroupedShape
from ejkernel.modules.workloads.grouped import group_sizes
from ejkernel.modules.workloads.shapes import SHAPES


def test_every_name_is_used_once_per_family():
    names = [(type(s), s.name) for s in SHAPES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("operation", find.operation_names())
def test_every_case_is_a_call_that_its_operation_can_do(operation):
    shapes = find.shapes_of(operation)
    # the sweeps differ in sizes only
    for shape in [s for s in shapes if not s.name.startswith(("sweep", "short"))]:
        call = call_of(shape, operation)
        answer = supports(operation, **call.abstract())
        assert answer, f"{shape.name}: {answer.reason}"
        assert call.flops > 0 and call.moved > 0
    assert any(s.device == "cpu" for s in shapes)


def test_no_case_is_named_after_a_cache_that_its_call_has_not():
    cached = find.shapes_of("page_attention", "*int8*")
    assert cached and all(s.cache_dtype == "int8" for s in cached)
    for shape in find.shapes_of("ragged_decode_attention"):
        given = call_of(shape, "ragged_decode_attention").abstract().values()
        dtypes = {x.dtype.name for x in given if hasattr(x, "dtype")}
        assert shape.cache_dtype in dtypes, shape.name


def test_cases_of_8_bits_have_scales_and_no_gradients():
    shapes = find.shapes_of("flash_attention", "eight-bit-*")
    assert shapes and not any(s.serves("attention") for s in shapes)
    for shape in shapes:
        call = call_of(shape, "flash_attention")
        arrays = call.abstract()
        assert arrays["query"].dtype == "float8_e4m3fn"
        assert arrays["k_scale"].shape == (shape.batch, shape.kv_heads)
        assert not call.gradients and call.dtype == "float8_e4m3fn"


def test_a_matmul_of_8_bits_is_limited_by_twice_the_rate_of_16_bits(monkeypatch):
    timed = []

    def time(programs, **_):
        timed.append(programs)
        return {name: Timing(0.5, 0.0) for name in programs}

    monkeypatch.setattr(limits, "time_together", time)
    rates = limits.measure_limits(("float8_e4m3fn", "float32")).flops
    assert rates["float8_e4m3fn"] == 2 * rates["bfloat16"] == 2 * rates["float32"]
    assert len(timed) == 3  # float32, bfloat16, the copy


@pytest.mark.parametrize("operation", ["flash_attention", "page_attention", "grouped_matmul"])
def test_concrete_arguments_have_the_abstract_shapes(operation):
    (shape, *_) = find.shapes_of(operation, device="cpu")
    call = call_of(shape, operation)
    abstract, concrete = call.abstract(), call.concrete()
    assert tuple(call.make()) == call.names
    for a, c in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert not hasattr(a, "shape") or (a.shape, a.dtype) == (c.shape, c.dtype)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"causal": False}, 64),
        ({}, 36),
        ({"window": 1}, 15),
        ({"window": 10}, 36),
        ({"window": 10, "kv_len": 16}, 36),  # fewer rows than the window has keys
        ({"window": 1, "kv_len": 4}, 8),  # rows behind the last key see one key, then none
        ({"documents": 2}, 20),
        ({"causal": False, "kv_len": 4}, 32),
        ({"kv_len": 4}, 26),
    ],
)
def test_visible_pairs_counts_the_mask(options, pairs):
    assert AttentionShape("s", 1, 8, 1, 1, 64, **options).visible_pairs() == pairs


def test_words_become_a_call():
    call = find.from_words(
        "flash_attention", ["b=2", "s=4k", "h=32", "hk=8", "d=64", "softmax_scale=0.5"]
    )
    assert call.abstract()["query"].shape == (2, 4096, 32, 64)
    assert call.abstract()["key"].shape == (2, 4096, 8, 64)
    assert call.options["softmax_scale"] == 0.5
    based = find.from_words("flash_attention", ["b=1"], find.shapes_of("flash_attention")[0])
    assert based.shape.batch == 1 and based.shape.head_dim == 64


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda: find.operation_name("flash_atention"), "did you mean flash_attention"),
        (lambda: find.operation_name("zzz"), "there are: attention"),
        (lambda: find.shapes_of("flash_attention", "llama3-8b"), "llama3-8b-4k"),
        (lambda: find.shapes_of("flash_attention", "qqq"), "and [0-9]+ more"),
        (lambda: find.from_words("flash_attention", ["hedas=4"]), "did you mean heads"),
        (lambda: find.from_words("page_attention", ["dtype=bf16"]), "bfloat16"),
        (lambda: find.from_words("flash_attention", ["batch=two"]), "expected int"),
        (lambda: find.from_words("flash_attention", ["batch"]), "expected key=value, e.g. batch="),
        (lambda: find.from_words("flash_attention", ["s=8", "q_len=9"]), "'q_len=9': .* by 's=8'"),
        (
            lambda: find.from_words("flash_attention", ["platform=xla", "platform=cuda"]),
            "by 'platform=xla'",
        ),
        (lambda: call_of(find.shapes_of("mla_decode")[0], "attention"), "no call of attention"),
    ],
)
def test_wrong_names_and_values_are_answered(ask, answer):
    with pytest.raises((find.UnknownName, ValueError), match=answer):
        ask()


def test_aliases_and_registry_names_are_known():
    for alias, name in {"flash_mla": "mla_attention", "gla": "gla_attention"}.items():
        assert find.operation_name(alias) == name


def test_peers_agree_with_the_operation():
    for operation, words in {
        "flash_attention": ["s=32", "h=2", "hk=1", "d=16"],
        "gla_attention": ["s=16", "h=2", "d=8"],
        "gated_delta_rule": ["s=16", "h=2", "d=8", "hk=1"],
        "mean_pooling": ["s=16", "d=8", "chunk=4"],
    }.items():
        case = case_of(find.from_words(operation, [*words, "dtype=float32"]))
        inputs = case.inputs()
        ours, *others = (fn(*inputs) for fn in case.contenders.values() if callable(fn))
        assert others
        for peer in others:
            np.testing.assert_allclose(
                np.asarray(peer).reshape(ours.shape), ours, rtol=2e-4, atol=2e-4
            )


def test_flash_attention_3_takes_part_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sizes = ["s=32", "h=2", "hk=1", "d=16"]
    assert "fa3" not in peers.peers_of(find.from_words("flash_attention", sizes))
    installed = types.ModuleType("dew_flash_attn")
    installed.__spec__ = importlib.machinery.ModuleSpec("dew_flash_attn", None)
    calls = []
    installed.flash_mha = lambda q, k, v, **options: calls.append((q.shape, k.shape, options)) or q
    monkeypatch.setitem(sys.modules, "dew_flash_attn", installed)
    for words, options in (
        (["causal=true"], {"is_causal": True}),
        (["causal=false", "window=8"], {"is_causal": False, "window_size": (8, 8)}),
    ):
        call = find.from_words("flash_attention", [*sizes, *words])
        q, k, v = (call.make()[name] for name in ("query", "key", "value"))
        assert peers.peers_of(call)["fa3"](q, k, v) is q
        assert calls[-1] == (q.shape, k.shape, options)
    for words, reason in (
        (["dtype=float32"], "16 bits"),
        (["soft_cap=5.0"], "no such option"),
        (["kv_len=64"], "last key"),
    ):
        assert reason in peers.peers_of(find.from_words("flash_attention", [*sizes, *words]))["fa3"]


def test_a_row_says_what_ran_and_a_failing_contender_is_not_fatal():
    case = case_of(find.from_words("mean_pooling", ["s=16", "d=8", "dtype=float32"]))

    def broken(x):
        raise ValueError("no such thing")

    case.contenders["jax-xla"] = broken
    limits = Limits({"float32": 1e9}, 1e9)
    ours, peer = run_case(case, "fwd", limits, rounds=1, target_s=0.001)
    assert ours.ms > 0 and ours.bound == "memory" and ours.clock == "host"
    assert (ours.implementation, ours.tier) == ("mean_pooling/xla/any", "heuristics")
    assert peer.ms is None and "no such thing" in peer.note


def test_backward_is_the_vjp_at_the_output():
    x = jnp.arange(4.0)
    out, (grad,) = forward_and_backward(lambda x: x * x, (0,))(x)
    assert jnp.array_equal(grad, 2 * x * out)


def test_short_programs_are_timed_by_the_device_where_it_tells(monkeypatch):
    from ejkernel.modules.bench import timing

    timed = timing.Timing(1e-6, 0.0, "device")
    monkeypatch.setattr(timing, "device_timing", lambda fn: timed)
    case = Case("c", lambda: (jnp.ones(4),), {"ours": jnp.sin}, 1.0, 1.0, "float32")
    (row,) = run_case(case, "fwd", Limits({"float32": 1e9}, 1e9), rounds=1, target_s=0.001)
    assert row.clock == "device" and row.ms == pytest.approx(1e-3)


def test_the_device_times_what_has_rested(monkeypatch):
    from ejkernel.modules.bench import timing
    from ejkernel.ops import compat

    program = timing.Program(jax.jit(jnp.sin).lower(jnp.ones(4)).compile(), (jnp.ones(4),))
    seen = []

    def times(compiled, arguments, calls):
        seen.append(calls)
        return [0.25, 0.5, 0.25]

    monkeypatch.setattr(timing.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing.time, "sleep", seen.append)
    monkeypatch.setattr(compat, "kernel_times", times)
    timed = timing.device_timing(program)
    assert seen == [timing.PAUSE_S, timing.KERNEL_CALLS]
    assert (timed.median, timed.clock) == (pytest.approx(2.5e-4), "device")


def test_explaining_a_case_runs_nothing():
    shape = dataclasses.replace(find.shapes_of("flash_attention", "llama3-8b-128k")[0], batch=64)
    call = call_of(shape)
    kernel = operation_class("flash_attention").shared()
    found = get_default_executor().explanation(kernel, **call.abstract())
    assert found.error is None  # its arrays would need terabytes


def test_a_shared_bias_is_read_once_and_zipf_groups_halve():
    alone = AttentionShape("s", 2, 8, 4, 4, 64, bias=True)
    shared = dataclasses.replace(alone, bias_batch=1, bias_heads=1)
    calls = [call_of(shape, "flash_attention") for shape in (alone, shared)]
    assert [c.abstract()["bias"].shape[:2] for c in calls] == [(2, 4), (1, 1)]
    assert calls[0].moved - calls[1].moved == 2 * (2 * 4 - 1) * 8 * 8
    sizes = group_sizes(GroupedShape("g", 1500, 8, 8, 4, zipf=True))
    assert sizes.sum() == 1500 and sorted(sizes) == [180, 240, 360, 720]
