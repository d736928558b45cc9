"""Shipped tables and the operations: what a table of a known card decides for real calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import FlashAttention, FlashAttentionConfig
from ejkernel.modules._table import operation_class
from ejkernel.ops import (
    AutotuneResult,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    KernelRegistry,
    Trial,
    discovery,
    kernel_registry,
)
from ejkernel.ops.config.store import read_table
from ejkernel.ops.core.invocation import call_invocation
from ejkernel.ops.core.keys import payload_key
from ejkernel.types import MaskInfo
from ejktest.device import H200, on
from tuned.tables import TableBuilder

CONFIG = FlashAttentionConfig("xla", fwd_params={"q_blocksize": 256, "kv_blocksize": 512})


def call(batch=4, length=4096, heads=32, kv_heads=8, dim=128, dtype="bfloat16", **options):
    shape = jax.ShapeDtypeStruct
    return {
        "query": shape((batch, length, heads, dim), dtype),
        "key": shape((batch, length, kv_heads, dim), dtype),
        "value": shape((batch, length, kv_heads, dim), dtype),
        "causal": True,
        **options,
    }


@pytest.fixture
def h200(tmp_path):
    """``tier, config`` of a call on a described H200 whose table knows Llama 3 8B."""
    with on(H200):
        registry = KernelRegistry(discover=discovery.installed)
        registry.load()
        registry._config_tables.clear()  # this test's table alone
        kernel = FlashAttention(registry=registry)
        inv = call_invocation(kernel, (), call())
        builder = TableBuilder(tmp_path / "h200.json", inv.device_fingerprint)
        trials = [Trial(CONFIG, 1.0)]
        builder.add(inv, AutotuneResult(kernel, inv.key, CONFIG, 1.0, trials), "llama3-8b-4k")
        registry.add_config_table(builder.path)
        executor = Executor(ConfigSelectorChain(ConfigCache()))

        def ask(**arguments):
            told = executor.explanation(kernel, **arguments)
            return told.tier, told.cfg

        yield ask


def test_near_calls_take_the_entry(h200):
    near = [
        call(),
        call(batch=1, length=6000),
        call(heads=24, kv_heads=8),
        call(heads=64, kv_heads=8, length=8192),
        call(softmax_scale=0.1, return_lse=True),
    ]
    assert [h200(**arguments) for arguments in near] == [("persistent", CONFIG)] * len(near)
    assert h200(**call(), platform="xla") == ("persistent", CONFIG)


def test_others_are_left_to_arithmetic_and_never_tuned(h200):
    for arguments in (
        call(dim=64),
        call(dtype="float32"),
        call(precision="highest"),
        call(bias=jax.ShapeDtypeStruct((1, 1, 4096, 4096), "bfloat16")),
        call(causal=False),
        call(sliding_window=(1023, 0)),
        call(logits_soft_cap=30.0),
        call(softmax_aux=jax.ShapeDtypeStruct((32, 1), "float32")),
        call(mask_info=MaskInfo.from_segments(jnp.zeros((4, 4096), jnp.int32))),
        call(length=512),
        call(length=131072),
        call(heads=32, kv_heads=32),  # no groups
        call(heads=8, kv_heads=1),
        call(batch=64, heads=64, kv_heads=16),
    ):
        tier, cfg = h200(**arguments)
        assert tier == "heuristics" and cfg != CONFIG


def test_dropout_is_not_sent_where_there_is_none(h200):
    assert h200(**call())[1].platform == "xla"
    tier, cfg = h200(**call(), dropout_prob=0.1)
    assert cfg.platform in ("xla", "triton") and tier == "heuristics"
    assert h200(**call(), dropout_seed=3) == ("persistent", CONFIG), "nothing is dropped"


def test_tables_in_the_packages_are_sound():
    kernel_registry.load()
    platforms = {"cudnn": "cuda"}  # whose folder is named otherwise
    for path in kernel_registry.config_tables:
        folder = path.parents[1].name
        check(path, platforms.get(folder, folder))
    assert len(kernel_registry.config_tables) == 4


def check(path, platform):
    header, entries = read_table(path)
    assert header["provenance"]["date"] and header["provenance"]["versions"] and entries
    for key, entry in entries.items():
        assert entry.metadata["device"] == header["device"]
        assert key == payload_key(entry.metadata)
        kernel = operation_class(entry.metadata["kernel"]).shared()
        assert kernel.version == entry.metadata["version"], (
            "tuned for an older version of the operation"
        )
        cfg = entry.config(kernel.config_cls)
        assert cfg is not None and cfg.platform == platform, "each package ships its own"
        assert entry.measured["ms"] > 0 and entry.measured["case"]
