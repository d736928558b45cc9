"""Which calls flash attention accepts, its errors, and its tiles, from static properties."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import triton as package
from ejkernel.kernels.triton import compat, flash_attention
from ejkernel.kernels.triton.targets import compile_for, cuda_target, rocm_target
from ejkernel.ops import KernelNotSupported, KernelRegistry
from ejkernel.types import InvalidArgument, MaskInfo
from ejkernel.types.masks.structure import HULL, LISTED, Unsupported
from ejktest.bound import bound

struct = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def versions_are_fine(monkeypatch):
    monkeypatch.setattr(compat, "unavailable_reason", lambda: None)


def array(*shape: int, dtype="bfloat16"):
    return struct(shape, jnp.dtype(dtype))


def arguments(**change):
    call = {
        "query": array(2, 64, 8, 64),
        "key": array(2, 64, 2, 64),
        "value": array(2, 64, 2, 64),
    }
    return {**call, **change}


def reason(**change) -> str | None:
    return flash_attention.supports(call(**change))


def call(**change):
    return bound(flash_attention.call, **arguments(**change))


def with_dims(d: int, dv: int | None = None, dtype="bfloat16"):
    return {
        "query": array(2, 64, 8, d, dtype=dtype),
        "key": array(2, 64, 2, d, dtype=dtype),
        "value": array(2, 64, 2, d if dv is None else dv, dtype=dtype),
    }


IDS = np.zeros((2, 64), np.int32)
ACCEPTED = [
    {},
    with_dims(80),
    with_dims(256),
    with_dims(192, 128),
    with_dims(128, dtype="float32"),
    {"query": array(2, 1, 8, 64)} | dict.fromkeys(("key", "value"), array(2, 4096, 2, 64)),
    {"causal": True, "causal_offset": -3, "sliding_window": (4, 5), "precision": "highest"},
    {"precision": "BF16_BF16_F32"},
    {"bias": array(1, 8, 64, 64), "softmax_aux": array(3), "logits_soft_cap": 30.0},
    {"dropout_prob": 0.1, "return_lse": True, "softmax_scale": -1.0},
    {"attention_mask": array(2, 64, dtype="bool")},
    {"mask_info": MaskInfo(q_segment_ids=IDS, kv_segment_ids=IDS, chunk_size=16)},
    {
        "query": array(1, 64, 8, 64),
        "key": array(1, 64, 2, 64),
        "value": array(1, 64, 2, 64),
        "cum_seqlens_q": np.array([0, 64]),
    },
]


@pytest.mark.parametrize("change", ACCEPTED, ids=range(len(ACCEPTED)))
def test_supported_calls_are_accepted(change) -> None:
    assert reason(**change) is None


REFUSED = [
    ("query: float64", with_dims(64, dtype="float64")),
    ("query: head dim 60", with_dims(60)),
    ("query: head dim 264", with_dims(264)),
    ("value: head dim 20", with_dims(64, 20)),
    ("value: head dim 0", with_dims(64, 0)),
    ("logits_dtype", {"logits_dtype": "float64"}),
    (
        "precision: an algorithm",
        with_dims(64, dtype="float32") | {"precision": jax.lax.DotAlgorithmPreset.F32_F32_F32},
    ),
    (
        "mask_info: more than one set of segment ids",
        {
            "mask_info": MaskInfo(q_segment_ids=IDS, kv_segment_ids=IDS)
            & MaskInfo(q_segment_ids=IDS + 1, kv_segment_ids=IDS + 1)
        },
    ),
]


@pytest.mark.parametrize(("start", "change"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused_with_the_argument(start: str, change) -> None:
    with jax.enable_x64(True):
        assert reason(**change).startswith(start)


def test_missing_packages_are_the_first_reason(monkeypatch) -> None:
    monkeypatch.setattr(compat, "unavailable_reason", lambda: "triton is not installed")
    assert reason(**with_dims(60)) == "triton is not installed"


def test_old_devices() -> None:
    with compile_for(cuda_target(75)):
        assert reason() == "the device has compute capability 7.5; 8.0 or newer is needed"


def test_called_with_what_is_refused() -> None:
    x = jnp.ones((1, 16, 2, 20))
    with pytest.raises(Unsupported, match="head dim 20"):
        flash_attention(x, x, x)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (InvalidArgument, "query", {"query": np.ones((1, 16, 32))}),
        (InvalidArgument, "key", {"key": np.ones((1, 16, 2, 32), np.int32)}),
        (InvalidArgument, "key", {"key": np.ones((1, 16, 2, 64), np.float32)}),
        (InvalidArgument, "value", {"value": np.ones((1, 17, 2, 32), np.float32)}),
        (
            InvalidArgument,
            "key: expected kv_heads that divide",
            {n: np.ones((1, 16, 3, 32), np.float32) for n in ("key", "value")},
        ),
        (InvalidArgument, "bias", {"bias": np.ones((1, 3, 16, 16), np.float32)}),
        (InvalidArgument, "softmax_aux", {"softmax_aux": np.ones((3, 1), np.float32)}),
        (InvalidArgument, "softmax_scale", {"softmax_scale": jnp.ones(())}),
        (InvalidArgument, "dropout_seed", {"dropout_prob": 0.5, "dropout_seed": np.ones(2)}),
        (ValueError, "logits_soft_cap", {"logits_soft_cap": 0.0}),
        (ValueError, "dropout_prob", {"dropout_prob": 1.0}),
        (ValueError, "sliding_window", {"sliding_window": -1}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_name_the_argument(error, message, change) -> None:
    call = {n: np.ones((1, 16, 2, 32), np.float32) for n in ("query", "key", "value")} | change
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: flash_attention(**call))


@pytest.mark.parametrize(
    "target",
    [cuda_target(80), cuda_target(89), cuda_target(90), rocm_target("gfx942")],
    ids=lambda t: t.name,
)
def test_heuristic_is_a_candidate_and_a_config(target) -> None:
    """The heuristic's tiles come first; a config given back gives the same tiles."""
    with compile_for(target):
        for change in ACCEPTED:
            inv = call(**change)
            best, others = flash_attention.heuristic(inv), flash_attention.candidates(inv)
            assert others[0] == best
            assert len({str(c) for c in others}) == len(others) > 3
            problem = flash_attention.problem(inv.arguments)
            chosen = flash_attention.choose(problem, target)
            assert flash_attention.apply_config(chosen, best, problem, target) == chosen
            for config in others:
                tiles = flash_attention.apply_config(chosen, config, problem, target)
                assert flash_attention.fields(tiles) == config


def test_every_line_of_the_table_resolves() -> None:
    """Every line of the table resolves; a forced platform is refused where there is no GPU."""
    registry = KernelRegistry()
    package.register(registry)
    for algorithm in registry.list_algorithms():
        (spec,) = registry.list_implementations(algorithm)
        assert (spec.platform.value, spec.backend.value) == ("triton", "gpu")
        assert spec.priority == 100, algorithm
    for name in package.PACKAGE.functions:
        assert "cfg" in inspect.signature(getattr(package, name)).parameters
    assert set(package.PACKAGE.functions) <= set(dir(package))
    assert len(package.PACKAGE.functions) == len(registry.list_algorithms())
    if jax.default_backend() == "cpu":
        with pytest.raises(KernelNotSupported, match="triton"):
            registry.get("flash_attention", "triton")


def test_explain_says_how_a_dense_mask_skips_tiles() -> None:
    """Lists where the target has them, else ranges; a mask by index has nothing to say."""
    dense = call(attention_mask=array(2, 1, 64, 64, dtype="bool"))
    with compile_for(cuda_target(90)):
        assert flash_attention.notes(dense) == (LISTED,)
        assert flash_attention.notes(call(causal=True)) == ()
        assert flash_attention.notes(call(mask_info=MaskInfo.from_segments(IDS))) == (HULL,)
    with compile_for(cuda_target(80)):
        assert flash_attention.notes(dense) == (HULL,)
