"""Kernels that are objects, reached through the operations: a call is canonicalized once."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.modules import flash_attention
from ejkernel.modules.workloads import call_of
from ejkernel.modules.workloads.find import operation_names, shapes_of
from ejkernel.ops import interpret_mode
from ejkernel.types import calls
from ejktest.device import described
from ejktest.grids import cover


@pytest.fixture
def qkv():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((2, 24, 2, 16), dtype=np.float32) for _ in range(3))


def test_dropout_on_shards_counts_global_rows_and_heads(qkv):
    """One shard's seed carries its place, which no public argument can."""
    pytest.importorskip("triton")
    options = dict(dropout_prob=0.5, dropout_seed=3, causal=True)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("dp", "tp"))
    specs = (PartitionSpec("dp", None, "tp", None),) * 3
    with interpret_mode():
        out = flash_attention(*qkv, **options, platform="triton", mesh=mesh, in_specs=specs)
    np.testing.assert_allclose(out, flash_attention(*qkv, **options, platform="xla"), atol=1e-5)


def test_an_operation_canonicalizes_a_call_once_for_its_kernel(qkv, monkeypatch):
    pytest.importorskip("triton")
    bound = []
    before = calls.FlashAttention.canonicalize

    def canonicalize(a):
        bound.append(type(a["query"]))
        before(a)

    monkeypatch.setattr(calls.FlashAttention, "canonicalize", staticmethod(canonicalize))
    with interpret_mode():
        flash_attention(*(x[:, :23] for x in qkv), platform="triton")
    assert len(bound) == 1  # abstractly, to choose a config; the trace does the same again


CHIPS = {"NVIDIA H200": 132, "NVIDIA A100-SXM4-80GB": 108}


@pytest.mark.parametrize(
    ("operation", "kind"),
    cover(
        itertools.product(operation_names(), CHIPS),
        *((name, "NVIDIA H200") for name in operation_names()),
        *((name, "NVIDIA A100-SXM4-80GB") for name in ("flash_attention", "page_attention")),
    ),
)
def test_every_workload_has_a_config_on_a_gpu(operation, kind, monkeypatch):
    """What a kernel chooses by itself is a legal config of its operation."""
    pytest.importorskip("triton")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    with described(kind, "gpu", CHIPS[kind]):
        for shape in shapes_of(operation, device="gpu"):
            found = call_of(shape, operation).explanation()
            assert found.implementation, shape.name


@pytest.mark.parametrize(
    ("operation", "workload", "platform"),
    [
        ("gated_delta_rule", "delta-b2-8k", "triton"),
        ("gated_delta_rule", "delta-decode-b64", "triton"),
        ("gated_delta_rule", "delta-channels-b2-8k", "triton"),
        ("causal_conv1d", "conv-b2-8k", "triton"),
    ],
)
def test_the_delta_rule_takes_triton_unless_its_gates_are_per_channel(
    operation, workload, platform, monkeypatch
):
    pytest.importorskip("triton")
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "heuristics")
    (shape,) = (x for x in shapes_of(operation, device="gpu") if x.name == workload)
    with described("NVIDIA H200", "gpu", 132):
        answer = call_of(shape, operation).explanation()
    assert answer.platform == platform, answer
    reasons = [reason for _, reason in answer.skipped if reason.startswith("g: ")]
    assert bool(reasons) == (platform == "xla")
