"""Shipped tables: read by the nearest call, and a known card is never tuned."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Invocation,
    KernelRegistry,
    OpConfig,
    PersistentCache,
    RegisteredKernel,
    policy_override,
    target_device,
)
from ejkernel.ops.config.key_distance import SimilarityRules, key_distance
from ejkernel.ops.config.store import Entry, encode_config, format_file
from ejkernel.ops.config.tables import covers
from ejkernel.ops.params import tile_field
from ejkernel.ops.utils.buckets import bucket_shape
from ejktest.device import H200, on

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the choice on a CPU")


@dataclass(frozen=True)
class Tile(OpConfig):
    tile: int | None = tile_field()


class Rows(RegisteredKernel[Tile, jax.Array]):
    """``x`` float ``[rows, heads, dim]``: rows are bucketed, the last axis decides tiles."""

    algorithm = "rows"
    trained = False
    similarity = SimilarityRules(
        untuned_arguments=frozenset({"scale"}), size_arguments=frozenset({"window"})
    )

    def run(self, x, *, window=None, causal=False, scale=None, cfg):
        raise AssertionError("implementations run")

    def bucket(self, inv):
        return {"x": bucket_shape(inv.arguments["x"].shape, (0,))}


def make(*tables):
    registry = KernelRegistry()
    tiles = [{"tile": t} for t in (16, 32, 64)]

    def rows(x, *, window=None, causal=False, scale=None, cfg=None):
        return x * 2

    for platform, backend, priority in (("xla", "any", 0), ("triton", "gpu", 100)):
        registry.register(
            "rows", platform, backend, priority, heuristic=lambda inv: tiles[0],
            candidates=lambda inv: tiles,
        )(rows)  # fmt: skip
    for path in tables:
        registry.add_config_table(path)
    return Rows(registry=registry)


def x(rows, heads=4, dim=8, dtype=jnp.float32):
    return jnp.zeros((rows, heads, dim), dtype)


@pytest.fixture
def table(tmp_path):
    """Tuned for 64 and 4096 rows of this machine's device."""
    entries = {}
    for rows, tile in ((64, 32), (4096, 64)):
        inv = Invocation(make(), (x(rows),))
        entries[inv.key] = Entry(encode_config(Tile("xla", tile=tile)), dict(inv.payload))
    path = tmp_path / "table.json"
    path.write_text(format_file({"device": target_device().fingerprint}, entries))
    return SimpleNamespace(path=path)


def executor(autotune=None):
    return Executor(ConfigSelectorChain(ConfigCache(), autotune=autotune))


def test_the_nearest_bucket_serves_and_nothing_is_tuned(table, monkeypatch):
    kernel, events = make(table.path), []
    chain = ConfigSelectorChain(ConfigCache(), on_event=lambda name, _: events.append(name))
    run = Executor(chain)
    for rows, tile in ((64, 32), (50, 32), (100, 32), (2000, 64), (16384, 64)):
        assert run.choose_config(kernel, x(rows)) == Tile("xla", tile=tile)
    assert set(events) == {"persistent", "memory"}  # two of these share a bucket
    assert run.explanation(kernel, x(200, heads=2), scale=0.5).cfg.tile == 32
    forced = run.explanation(kernel, x(64), platform="xla")
    assert (forced.tier, forced.cfg.tile) == ("persistent", 32)
    # too different for the table: arithmetic, at once, unless tuning is asked for
    for other in (x(64, dim=16), x(64, dtype=jnp.bfloat16), x(60000), x(64, heads=32)):
        told = run.explanation(kernel, other)
        assert told.tier == "heuristics"
        assert "tables know this device" in dict(told.tiers)["autotune"]
        with policy_override(autotune=True):
            assert run.explanation(kernel, other).tier == "autotune"
        assert executor(True).explanation(kernel, other).tier == "autotune"
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "autotune")
    assert run.explanation(kernel, x(64, dim=16)).tier == "autotune"
    monkeypatch.delenv("EJKERNEL_AUTOTUNE_POLICY")
    assert executor().explanation(make(), x(64)).tier == "autotune"  # an unknown card


def test_of_two_entries_within_reach_the_nearer_one_serves(tmp_path):
    entries = {}
    for rows, tile in ((64, 32), (256, 64)):
        inv = Invocation(make(), (x(rows),))
        entries[inv.key] = Entry(encode_config(Tile("xla", tile=tile)), dict(inv.payload))
    path = tmp_path / "t.json"
    path.write_text(format_file({"device": target_device().fingerprint}, entries))
    told = executor(False).explanation(make(path), x(200))
    assert (told.tier, told.cfg.tile) == ("persistent", 64)


def test_another_device_another_version(table):
    kernel = make(table.path)
    with on(H200):
        inv = Invocation(kernel, (x(64),))
        assert not covers([table.path], inv.payload)
        assert executor(False).explanation(kernel, x(64)).tier == "heuristics"
        ours = json.loads(table.path.read_text())
        text = json.dumps(ours).replace(target_device("cpu").fingerprint, inv.device_fingerprint)
        text = text.replace('"platform": "xla"', '"platform": "triton"')
        fake = table.path.with_name("nvidia_h200.json")
        fake.write_text(text)
        told = executor().explanation(make(table.path, fake), x(200))
        assert (told.tier, told.cfg) == ("persistent", Tile("triton", tile=32))
        assert told.implementation == "rows/triton/gpu"
        told = executor().explanation(make(fake), x(300), platform="xla")
        assert told.tier == "heuristics" and "tables know" in dict(told.tiers)["autotune"]
    kernel.version = 2
    assert executor(False).explanation(kernel, x(64)).tier == "heuristics"


def test_distances_grow_with_what_differs():
    def payload(*args, **kwargs):
        return Invocation(make(), args, kwargs).payload

    def distance(ours, theirs):
        return key_distance(ours, theirs, Rows.similarity)

    here = payload(x(64), causal=True)
    assert distance(here, payload(x(50), causal=True)) == 0
    near = distance(here, payload(x(256), causal=True))
    scaled = distance(here, payload(x(64), causal=True, scale=1.0))
    unsaid = key_distance(here, payload(x(64), causal=True, scale=1.0))
    assert unsaid == float("inf")  # only the kernel knows what its words mean
    heads = distance(here, payload(x(64, heads=2), causal=True))
    assert 0 < scaled < near == 2 < heads < float("inf")
    forced = {**here, "platform": "xla"}
    assert 0 < distance(here, forced) < heads and distance(forced, here) == float("inf")
    for other in (
        payload(x(64, dim=16), causal=True),
        payload(x(64, dtype=jnp.float16), causal=True),
        payload(x(64)[0], causal=True),
        payload(x(512), causal=True),  # eight times as long
        payload(x(64, heads=32), causal=True),
        payload(x(256, heads=8), causal=True),  # eight times as much in all
        payload(x(64), causal=False),
        payload(x(64), causal=True, window=3),
        {**here, "mesh": [["tp", 4]], "specs": ["", ""]},
    ):
        assert distance(here, other) == float("inf")


def test_sizes_of_windows_may_differ_and_their_kind_may_not():
    def payload(window):
        return Invocation(make(), (x(64),), {"window": window}).payload

    def distance(ours, theirs):
        return key_distance(payload(ours), payload(theirs), Rows.similarity)

    assert distance(1023, (1023, 1023)) == 0
    assert 0 < distance((1023, 0), (4095, 0)) < 3
    for other in ((None, 0), (127, 0), (1023, 1023), None):
        assert distance((1023, 0), other) == float("inf")


@pytest.mark.parametrize(("shape", "near"), [((1, 2, 64, 8), True), ((1, 2, 32, 16), False)])
def test_arrays_inside_masks_have_the_same_layout(shape, near):
    """Lengths may differ there, too; what is neither a length nor heads may not."""

    def payload(shape):
        array = {"shape": list(shape), "dtype": "bool", "sharding": None, "free": [2]}
        mask = {"node": "Mask", "children": [array], "static": None}
        return {"arguments": {"mask": mask}}

    found = key_distance(payload((1, 2, 32, 8)), payload(shape), Rows.similarity)
    assert (found < float("inf")) == near


def test_a_broken_table_warns_once_and_is_passed_over(tmp_path):
    (tmp_path / "t.json").write_text("{")
    kernel = make(tmp_path / "t.json")
    with pytest.warns(UserWarning, match=r"t\.json is not used"):
        assert executor(False).explanation(kernel, x(64)).tier == "heuristics"


def test_what_memory_holds_is_used_where_it_can_be(table):
    """Calls of one key may differ in floats, and platforms in what they do with them."""
    kernel = make(table.path)
    chain = ConfigSelectorChain(ConfigCache())
    call = Invocation(kernel, (x(64),))
    chain.cache.put(call.key, Tile("triton", tile=64))  # which needs a GPU
    told = Executor(chain).explanation(kernel, x(64))
    assert (told.tier, told.cfg.tile) == ("persistent", 32)
    assert dict(told.tiers)["memory"].startswith("not used: ")
    chain.cache.put(call.key, Tile("xla", tile=64))
    assert Executor(chain).explanation(kernel, x(64)).tier == "memory"


def test_what_a_file_holds_is_used_where_it_can_be(table, tmp_path):
    """As of memory: a file written where Triton runs serves no call here."""
    kernel, own = make(table.path), PersistentCache(tmp_path / "own")
    own.put(Invocation(kernel, (x(64),)).key, Tile("triton", tile=64))
    told = Executor(ConfigSelectorChain(ConfigCache(), own)).explanation(kernel, x(64))
    assert (told.tier, told.cfg) == ("persistent", Tile("xla", tile=32))


def test_user_files_come_before_tables(table, tmp_path):
    kernel = make(table.path)
    own = PersistentCache(tmp_path / "own")
    own.put(Invocation(kernel, (x(64),)).key, Tile("xla", tile=16), measured={"ms": 1.0})
    chain = ConfigSelectorChain(ConfigCache(), own)
    assert Executor(chain).choose_config(kernel, x(64)).tile == 16
    assert own.measured(Invocation(kernel, (x(64),)).key) == {"ms": 1.0}
