"""The calls that the cuDNN path accepts, decided by static properties on any machine."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.xla import cudnn, flash_attention, scaled_dot_product_attention
from ejkernel.kernels.xla.cudnn import core, support
from ejkernel.ops import KernelNotSupported, KernelRegistry
from ejkernel.ops.platforms import Backend
from ejkernel.ops.utils.device import TargetDevice
from ejkernel.types import MaskInfo
from ejktest.drawn import array
from ejktest.oracles import attention as oracle
from ejktest.tolerance import check_close


def struct(*shape: int, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def reason(capability: str = "9.0", monkeypatch=None, **change) -> str | None:
    call = {
        "query": struct(2, 64, 8, 64),
        "key": struct(2, 64, 2, 64),
        "value": struct(2, 64, 2, 64),
    }
    return support.reason_against({**call, **change})


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    device = TargetDevice(Backend.GPU, "NVIDIA H100", "9.0")
    monkeypatch.setattr(support, "target_device", lambda: device)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"causal": True, "softmax_scale": 0.3, "precision": "default"},
        {"causal": True, "sliding_window": (16, 3)},
        {"sliding_window": (16, 0)},
        {"mask_info": MaskInfo(causal=True), "sliding_window": 8},
        {"query": struct(2, 80, 8, 64), "causal": True},
    ],
    ids=str,
)
def test_supported_calls_are_accepted(change) -> None:
    assert reason(**change) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", {"query": struct(2, 64, 8, 64, dtype="float32")}),
        (
            "query",
            {
                "query": struct(2, 64, 8, 60),
                "key": struct(2, 64, 2, 60),
                "value": struct(2, 64, 2, 60),
            },
        ),
        ("query", {"query": struct(2, 0, 8, 64)}),
        ("value", {"value": struct(2, 64, 2, 32)}),
        (
            "mask_info",
            {
                "mask_info": MaskInfo(
                    q_segment_ids=np.zeros((2, 64), np.int32),
                    kv_segment_ids=np.zeros((2, 64), np.int32),
                )
            },
        ),
        ("mask_info", {"mask_info": MaskInfo(chunk_size=16)}),
        ("mask_info", {"mask_info": MaskInfo(causal=True, causal_offset=1), "sliding_window": 4}),
        ("causal_offset", {"causal": True, "causal_offset": 3}),
        ("sliding_window", {"sliding_window": 5}),
        ("sliding_window", {"query": struct(2, 65, 8, 64), "causal": True, "sliding_window": 16}),
        ("precision", {"precision": "highest"}),
        ("precision", {"precision": jax.lax.Precision.HIGHEST}),
        ("softmax_scale", {"softmax_scale": -1.0}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refused_with_the_argument(name: str, change) -> None:
    assert reason(**change).startswith(f"{name}: ")


def test_old_devices(monkeypatch) -> None:
    wide = {n: struct(1, 64, 2, 256) for n in ("query", "key", "value")}
    assert reason(**wide) is None
    for capability, change in (("8.0", wide), ("7.5", {})):
        device = TargetDevice(Backend.GPU, "older", capability)
        monkeypatch.setattr(support, "target_device", lambda d=device: d)
        assert reason(**change).startswith("query: ")


def test_same_signatures_and_refusal() -> None:
    for f in (flash_attention, scaled_dot_product_attention):
        assert inspect.signature(getattr(cudnn, f.__name__)) == inspect.signature(f)
    registry = KernelRegistry()
    cudnn.register(registry)
    assert registry.list_algorithms() == sorted(cudnn.ALGORITHMS)
    q = jnp.ones((1, 16, 2, 64), jnp.bfloat16)
    with pytest.raises(KernelNotSupported, match="dropout_prob") as error:
        cudnn.flash_attention(q, q, q, dropout_prob=0.5)
    assert error.value.argument == "dropout_prob"


def test_the_repeatable_backward(monkeypatch):
    """cuDNN's forward with the blockwise backward, the forward played by JAX's own attention."""

    def forward(pattern, scale, q, k, v):
        wide = (x.astype(jnp.float32) for x in (q, k, v))  # JAX compiles no float16 here
        o = jax.nn.dot_product_attention(*wide, scale=scale, is_causal=pattern.causal)
        return o.astype(q.dtype)

    monkeypatch.setattr(core, "_cudnn", forward)
    rng = np.random.default_rng(0)
    q, k, v, do = (array(rng.standard_normal((2, 96, h, 64)), jnp.float16) for h in (4, 2, 2, 4))
    _, back = jax.vjp(lambda *a: cudnn.flash_attention(*a, causal=True), q, k, v)
    see = np.tril(np.ones((96, 96), bool))[None, None]
    want = oracle.gradients(oracle.Case(q, k, v, see=see), do)
    for got, ref in zip(back(do), (want.dq, want.dk, want.dv), strict=True):
        check_close(got, ref)
