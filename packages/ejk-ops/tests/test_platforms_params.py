import json
from dataclasses import FrozenInstanceError, dataclass

import numpy as np
import pytest

from ejkernel.ops import (
    Backend,
    BwdParams,
    ConfigError,
    FwdParams,
    OpConfig,
    Platform,
    WarpgroupParams,
)
from ejkernel.ops.config.store import decode_config, encode_config
from ejkernel.ops.params import bytes_field, count_field, params_field, tile_field
from ejkernel.ops.platforms import parse_backend, parse_platform


@dataclass(frozen=True)
class AttentionConfig(OpConfig):
    fwd_params: FwdParams | WarpgroupParams | None = params_field(FwdParams)
    bwd_params: BwdParams | None = params_field(BwdParams)


@dataclass(frozen=True)
class PagedConfig(OpConfig):
    num_splits: int | None = count_field()
    q_tile: int | None = tile_field(64)
    vmem_limit_bytes: int | None = bytes_field()


def test_platform_names():
    assert [p.value for p in Platform] == ["triton", "pallas", "xla", "cuda"]
    assert [b.value for b in Backend] == ["gpu", "tpu", "cpu", "any"]
    assert Platform.XLA == "xla" and isinstance(Platform.XLA, str) and str(Platform.XLA) == "xla"
    assert parse_platform(" Triton ") is Platform.TRITON
    assert parse_platform("auto") is parse_platform(None) is None
    assert parse_backend("GPU") is Backend.GPU


def test_unknown_names_list_the_legal_ones():
    with pytest.raises(ValueError, match=r"'cudnn'.*auto, triton, pallas, xla, cuda"):
        parse_platform("cudnn")
    with pytest.raises(ValueError, match=r"'npu'.*gpu, tpu, cpu, any"):
        parse_backend("npu")
    with pytest.raises(TypeError, match="platform"):
        parse_platform(3)  # ty: ignore


def test_fwd_and_bwd_params():
    fwd = FwdParams(q_blocksize=128, kv_blocksize=256, num_warps=4, num_stages=2)
    assert fwd.q_blocksize == 128 and fwd.blocksize_m is None
    bwd = BwdParams(q_blocksize=64, kv_blocksize=128)
    assert hash(bwd) == hash(BwdParams(q_blocksize=64, kv_blocksize=128)) and bwd != BwdParams()
    with pytest.raises(TypeError):
        BwdParams(num_key_splits=2)  # ty: ignore
    with pytest.raises(FrozenInstanceError):
        fwd.q_blocksize = 64  # ty: ignore


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("q_blocksize", v) for v in (0, 8, 15, 48, 100, 2048, -16, True, 64.0, "64")],
        *[("blocksize_keys", v) for v in (8, 33)],
        *[("num_warps", v) for v in (0, 3, 32, 2.0)],
        *[("num_stages", v) for v in (0, 9)],
        *[("num_key_splits", v) for v in (0, -1)],
        *[("blocksize_heads", v) for v in (0, 1.5)],
    ],
)
def test_illegal_values_name_field_value_and_range(field, value):
    with pytest.raises(ConfigError, match=rf"FwdParams\.{field}={value!r}: expected "):
        FwdParams(**{field: value})


@pytest.mark.parametrize("tile", [16, 32, 64, 128, 256, 512, 1024])
def test_legal_tiles(tile):
    assert FwdParams(q_blocksize=tile).q_blocksize == tile


def test_numpy_integers_become_python_ints():
    assert type(FwdParams(q_blocksize=np.int64(64)).q_blocksize) is int


def test_config_fields_and_defaults():
    cfg = PagedConfig()
    assert (cfg.platform, cfg.backend, cfg.q_tile, cfg.num_splits) == ("auto", "any", 64, None)
    assert PagedConfig(Platform.XLA, "CPU").to_dict() == {
        "platform": "xla",
        "backend": "cpu",
        "num_splits": None,
        "q_tile": 64,
        "vmem_limit_bytes": None,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"platform": "cudnn"},
        {"backend": "npu"},
        {"num_splits": 0},
        {"q_tile": 20},
        {"vmem_limit_bytes": 0},
        {"q_tile": 3, "num_splits": 2},
    ],
)
def test_illegal_config(fields):
    name = next(iter(fields))
    with pytest.raises(ConfigError, match=f"PagedConfig.{name}="):
        PagedConfig(**fields)


UNEVEN = dict(q_blocksize=192, kv_blocksize=160, num_stages=2, warpgroups=3)


def test_tiles_of_warpgroups_need_not_be_powers_of_two_and_come_back_as_they_were():
    cfg = AttentionConfig(fwd_params=UNEVEN)  # ty: ignore
    tiles = WarpgroupParams(**UNEVEN)
    assert cfg.fwd_params == tiles and tiles != FwdParams()
    assert AttentionConfig.from_json(cfg.to_json()) == cfg
    assert decode_config(json.loads(json.dumps(encode_config(cfg)))) == cfg
    with pytest.raises(ConfigError, match=r"q_blocksize=100: expected a multiple of 16"):
        WarpgroupParams(**UNEVEN | {"q_blocksize": 100})
    with pytest.raises(ConfigError, match=r"warpgroups=None: expected an integer >= 1"):
        WarpgroupParams(**UNEVEN | {"warpgroups": None})


def test_nested_parameters_from_mappings():
    cfg = AttentionConfig(fwd_params={"q_blocksize": 32})  # ty: ignore
    assert cfg.fwd_params == FwdParams(q_blocksize=32)
    with pytest.raises(ConfigError, match="no field block_q"):
        AttentionConfig(fwd_params={"block_q": 32})  # ty: ignore
    with pytest.raises(ConfigError, match="fwd_params=BwdParams"):
        AttentionConfig(fwd_params=BwdParams())  # ty: ignore


def test_round_trips():
    cfg = AttentionConfig("triton", "gpu", FwdParams(q_blocksize=64), BwdParams(num_warps=8))
    assert AttentionConfig.from_dict(cfg.to_dict()) == cfg
    assert AttentionConfig.from_json(cfg.to_json()) == cfg
    assert hash(AttentionConfig.from_json(cfg.to_json())) == hash(cfg)
    assert cfg.replace(backend="any").backend == "any"
    assert AttentionConfig.from_dict({}) == AttentionConfig()


def test_from_dict_refuses():
    with pytest.raises(ConfigError, match=r"PagedConfig has no field tile: expected platform"):
        PagedConfig.from_dict({"tile": 64})
    with pytest.raises(TypeError, match="mapping"):
        PagedConfig.from_dict([("q_tile", 64)])  # ty: ignore
    with pytest.raises(ConfigError, match="JSON"):
        PagedConfig.from_json("{")
    with pytest.raises(ConfigError, match="JSON object"):
        PagedConfig.from_json("[]")
