"""Tables made by tuning: what the file says, and how a run goes on."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from ejkernel.ops import AutotunePolicy, Autotuner, AutotuneResult, Invocation, Trial, target_device
from ejkernel.ops.execution import timing
from ejktest.tunable import Doubled, Tile
from tuned import building
from tuned.building import TableBuilder, table_name

ROWS = Doubled("rows", 16, 32, 64)


def x(rows):
    return jnp.zeros((rows, 4, 8), jnp.float32)


@pytest.fixture
def clock(monkeypatch):
    """The tile that a shape likes is fast; ``clock[rows]`` says which."""
    likes = {}

    def seconds(self, racer, calls):
        return 1e-3 if racer.cfg.tile == likes[racer.arguments[0].shape[0]] else 2e-3

    monkeypatch.setattr(timing.QueueClock, "seconds", seconds)
    return likes


@pytest.fixture
def table(tmp_path, clock):
    """Tuned for 64 and 4096 rows of this machine's device."""
    clock.update({64: 32, 4096: 64})
    builder = TableBuilder(tmp_path / "table.json", target_device().fingerprint)
    tuner = Autotuner(AutotunePolicy(True, num_warmup=0, num_iters=2))
    for rows in clock:
        inv = Invocation(ROWS, (x(rows),))
        builder.add(inv, tuner.tune(inv, inputs=((x(rows),), {})), f"rows-{rows}")
    return builder


def test_the_file_says_where_it_comes_from(table):
    content = json.loads(table.path.read_text())
    assert content["schema"] == 1 and content["device"] == target_device().fingerprint
    assert content["provenance"]["date"] and "jax" in content["provenance"]["versions"]
    (entry, _) = content["entries"].values()
    assert entry["config"]["tile"] == 64 and entry["facts"]["kernel"] == "rows"
    measured = entry["measured"]
    assert measured["case"] == "rows-4096" and measured["ms"] == 1.0 and measured["spread"] == 0
    assert measured["heuristic_ms"] == 2.0 and "jax" in measured["versions"]


def test_a_run_goes_on_where_it_stopped(table, clock, monkeypatch):
    again = TableBuilder(table.path, target_device().fingerprint)
    key = Invocation(ROWS, (x(64),)).key
    assert again.done(key) and not again.done(Invocation(ROWS, (x(9000),)).key)
    monkeypatch.setattr(building, "versions_text", lambda: "jax 99")
    assert not again.done(key) and len(again.entries) == 2
    with pytest.raises(ValueError, match="table for"):
        TableBuilder(table.path, "gpu:nvidia-h200:9.0")
    table.path.write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="schema 2"):
        TableBuilder(table.path, target_device().fingerprint)


def test_platforms_that_lost_are_kept_for_calls_that_force_them(tmp_path):
    configs = [Tile("triton", tile=16), Tile("triton", tile=32), Tile("xla"), Tile("cuda")]
    trials = [Trial(c, ms) for c, ms in zip(configs, (3.0, 2.0, 1.0, None), strict=True)]
    inv = Invocation(ROWS, (x(64),))
    builder = TableBuilder(tmp_path / "t.json", inv.device_fingerprint)
    builder.add(inv, AutotuneResult(inv.kernel, inv.key, configs[2], 1.0, trials), "case")
    stored = [(e.metadata["platform"], e.config(Tile)) for e in builder.entries.values()]
    assert sorted(stored) == [("auto", configs[2]), ("triton", configs[1])]
    # tuned again, Triton wins: what it had lost with must not serve calls that force it
    builder.add(inv, AutotuneResult(inv.kernel, inv.key, configs[0], 0.5, trials), "case")
    stored = [(e.metadata["platform"], e.config(Tile)) for e in builder.entries.values()]
    assert sorted(stored) == [("auto", configs[0]), ("xla", configs[2])]


def test_the_name_of_a_table():
    assert table_name("gpu:nvidia-h200:9.0") == "nvidia_h200.json"
    assert table_name("cpu:cpu:2cores") == "cpu.json"
