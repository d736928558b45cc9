# ruff: noqa: E501, RUF043 (tables of messages, one line each)
"""Configs of operations, and what is answered about a call without running it."""

import inspect
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel.modules as modules
from ejkernel.modules._table import operation_class
from ejkernel.ops import (
    ConfigError,
    KernelNotFound,
    KernelNotSupported,
    default_key_builder_with_sharding,
)
from ejkernel.types import MaskInfo
from ejkernel.types.calls.words import forms
from ejktest.calls import CALLS, call

FLASH = "flash_attention"
HOPPER = dict(q_blocksize=192, kv_blocksize=128, num_stages=2, warpgroups=3)


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_configs_are_exported_with_their_fields(operation):
    cls = operation_class(operation)
    config = cls.config_cls
    assert cls().config_cls is config and getattr(modules, config.__name__) is config
    fields = list(config.__dataclass_fields__)
    assert fields[:2] == ["platform", "backend"]
    if operation == "native_sparse_attention":  # tiles first, then what was added to them
        assert fields[2:6] == ["q_tile", "kv_tile", "num_warps", "num_stages"]
    assert config() == config(platform="auto", backend="any") and hash(config()) == hash(config())
    values = {"fwd_params": {"q_blocksize": 32}, "bwd_params": None, "platform": "xla", "backend": "cpu", "context_parallel": "ring", "joins_heads": True, "fuses_gradients": False}  # fmt: skip
    made = config(**{f: values.get(f, 16 if f != "num_stages" else 2) for f in fields})
    assert config.from_dict(made.to_dict()) == made == config.from_json(made.to_json())
    assert made != config() and len({made, config(), made}) == 2
    with pytest.raises(ConfigError, match="no field wrong"):
        config.from_dict({"wrong": 1})
    with pytest.raises(Exception, match="frozen|cannot assign"):
        made.platform = "xla"
    illegal = {
        "num_warps": 3, "num_stages": 9, "q_tile": 24, "time_tile": 8, "token_tile": 2048, "block_m": 17,
        "num_splits": 0, "vmem_limit_bytes": 0, "fwd_params": {"q_blocksize": 48}, "platform": "cpu",
        "joins_heads": 1, "fuses_gradients": 1,
    }  # fmt: skip
    for name in set(illegal) & set(fields):
        with pytest.raises(ConfigError, match=re.escape(str(name))):
            config(**{name: illegal[name]})


def test_configs_given_to_a_call():
    c = call(FLASH)
    out = modules.flash_attention(**c.arguments)[0]
    for cfg in ({"fwd_params": {"q_blocksize": 16}}, modules.FlashAttentionConfig(platform="xla")):
        np.testing.assert_allclose(
            modules.flash_attention(**c.arguments, cfg=cfg)[0], out, atol=1e-5
        )
    with pytest.raises(TypeError, match="FlashAttentionConfig"):
        modules.flash_attention(**c.arguments, cfg=modules.PageAttentionConfig())
    with pytest.raises(ConfigError, match="q_blocksize.*100"):
        modules.flash_attention(**c.arguments, cfg={"fwd_params": {"q_blocksize": 100}})
    with pytest.raises(ValueError, match="contradict"):
        modules.flash_attention(**c.arguments, platform="xla", cfg={"platform": "pallas"})
    with pytest.raises(ConfigError, match=r"cfg: fwd_params: warpgroups=3: .*xla.flash_attention"):
        modules.flash_attention(**c.arguments, cfg={"fwd_params": HOPPER})


def test_supports_and_forced_platforms():
    c = call(FLASH)
    assert modules.supports(FLASH) and modules.supports(FLASH, **c.arguments)
    assert modules.supports("gla", platform="xla") and modules.supports("ragged_page_attention_v2")
    abstract = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in c.arrays.items()}
    assert modules.supports(FLASH, **abstract, causal=True)
    wrong = modules.supports(FLASH, **{**abstract, "key": jax.ShapeDtypeStruct((1,), jnp.float32)})
    assert not wrong and "key: expected" in wrong.reason
    assert wrong.argument == "key"
    assert not modules.supports(FLASH, **abstract, cfg={"fwd_params": HOPPER})
    refused = modules.supports(FLASH, **abstract, platform="triton")
    assert not refused and refused.reason and refused.nearest == "xla"
    assert not modules.supports("attention", platform="triton")
    with pytest.raises(KernelNotFound, match="flash_attention"):
        modules.supports("flashy")
    with pytest.raises(KernelNotFound, match=r"did you mean 'gla_attention'\?"):
        modules.supports("glaattention")
    with pytest.raises(ValueError, match="auto, triton"):
        modules.supports(FLASH, platform="tritom")
    with pytest.raises(KernelNotSupported) as caught:
        modules.flash_attention(**c.arguments, platform="triton")
    error = caught.value
    assert error.algorithm == FLASH and error.platform == "triton" and error.nearest == "xla"


def test_explain_takes_an_operation_in_any_form(capsys):
    c = call(FLASH)
    for operation in (
        FLASH,
        modules.flash_attention,
        modules.FlashAttention,
        modules.FlashAttention(),
    ):
        told = modules.explain(operation, **c.arguments)
        assert told.platform == "xla" and told.tier == "heuristics"
        assert isinstance(told.cfg, modules.FlashAttentionConfig) and "xla" in str(told)
        assert str(told) in capsys.readouterr().out
    told = str(modules.explain(FLASH, **c.arguments, cfg={"fwd_params": HOPPER}))
    assert "q_blocksize=192, kv_blocksize=128, num_stages=2, warpgroups=3" in told
    told = modules.explain(FLASH, **c.arguments, cfg={"fwd_params": {"q_blocksize": 16}})
    assert told.tier == "override"


@pytest.mark.parametrize("operation", ["flash_attention", "blocksparse_attention", "mla_attention"])
def test_calls_that_drop_have_a_key_of_their_own(operation):
    c, kernel = call(operation), operation_class(operation).shared()
    key = lambda **options: default_key_builder_with_sharding(  # noqa: E731
        kernel, (), {**c.arguments, **options}
    )
    seeds = (None, 3, np.uint32(3), jax.random.key(0), jnp.uint32(1))
    dropping = {key(dropout_prob=0.1, dropout_seed=seed) for seed in seeds}
    assert dropping == {key(dropout_prob=np.float32(0.5))}
    kept = {key(dropout_prob=p, dropout_seed=seed) for p in (0, 0.0) for seed in seeds}
    assert kept == {key()} and not kept & dropping


def test_lengths_of_one_bucket_share_a_key():
    def key(length, batch=1, heads=2, **options):
        q = jax.ShapeDtypeStruct((batch, length, heads, 8), jnp.float32)
        return modules.explain(FLASH, q, q, q, **options).key

    assert key(33) == key(64) == key(40, batch=3) != key(65)
    assert key(33) != key(33, heads=4)
    assert key(33) != key(33, causal=True)
    segments = [MaskInfo.from_segments(jnp.zeros((1, n), jnp.int32)) for n in (33, 64)]
    assert key(33, mask_info=segments[0]) == key(64, mask_info=segments[1]) != key(33)


@pytest.mark.parametrize("name", sorted(CALLS))
def test_help_opens_with_a_readable_signature(name):
    function = getattr(modules, name)
    signature = str(inspect.signature(function))
    assert max(map(len, signature.splitlines())) < 180
    for word in ("jaxtyping", "Union", "Optional", "ndarray,", "jaxlib", "typing."):
        assert word not in signature, word
    assert "platform: str | Platform | None = None" in signature
    assert "jaxtyping" not in pydoc.render_doc(function)


def test_the_signature_shows_the_axes_and_the_annotations_stay():
    lines = str(inspect.signature(modules.flash_attention)).splitlines()
    assert lines[1].strip() == "query: float|float8_e4m3fn[batch, q_len, heads, head_dim],"
    assert "    dropout_seed: int | int[] | key[] | None = None," in lines
    assert "    precision: PrecisionLike | None = None," in lines
    assert lines[-1] == ") -> Array | tuple[Array, Array]"
    annotation = modules.flash_attention.__annotations__["query"]
    assert forms(annotation) == (("float|float8_e4m3fn", "batch q_len heads head_dim"),)
