"""The builder of shipped tables, on kernels that tell their own time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tune_tables
from ejkernel.ops import Kernel, OpConfig
from ejkernel.ops.core.invocation import call_invocation
from ejkernel.ops.execution import timing
from ejkernel.ops.params import tile_field
from tuned.calls import TableCall
from tuned.calls import calls as calls_of


@dataclass(frozen=True)
class Tile(OpConfig):
    tile: int | None = tile_field()


class Op(Kernel[Tile, jax.Array]):
    trained = False

    def run(self, x, *, cfg):
        if x.shape == (3,):
            raise RuntimeError("no such shape")
        return x * 2

    def config_space(self, inv):
        return [Tile("xla", tile=16), Tile("xla", tile=32)]


@pytest.fixture
def calls(monkeypatch):
    """Three calls; tile 32 takes half the time of tile 16. ``calls.stop_at`` presses Ctrl-C."""
    state = SimpleNamespace(stop_at=None, sizes=[1, 2, 4])

    def seconds(self, racer, calls):
        return 2e-3 / racer.cfg.tile * 16

    def jobs(ops, cases, device):
        for n in state.sizes:
            x = jax.ShapeDtypeStruct((n,), jnp.float32)

            def concrete(n=n):
                if n == state.stop_at:
                    raise KeyboardInterrupt
                return {"x": jnp.ones(n)}

            call = SimpleNamespace(
                operation="op", name=f"n{n}", concrete=concrete, shape=None, source="", device="cpu"
            )
            yield TableCall(call, call_invocation(Op(), (), {"x": x}))

    monkeypatch.setattr(timing.QueueClock, "seconds", seconds)
    monkeypatch.setattr(tune_tables, "calls", jobs)
    return state


def entries(path):
    return json.loads(path.read_text())["entries"].values()


def test_a_run_that_is_stopped_goes_on(calls, tmp_path, capsys):
    out = tmp_path / "table.json"
    calls.stop_at = 4
    assert tune_tables.main(["--out", str(out), "--ahead", "0"]) == 0
    told = capsys.readouterr().out
    assert "3 calls to tune, 0 in" in told and "1 calls left: run it again" in told
    assert [e["measured"]["case"] for e in entries(out)] == ["n1", "n2"]
    assert {e["config"]["tile"] for e in entries(out)} == {32}
    calls.stop_at = None
    assert tune_tables.main(["--out", str(out), "--trials"]) == 0
    told = capsys.readouterr().out
    assert "1 calls to tune, 2 in" in told and "all done" in told and len(entries(out)) == 3
    assert "op n4" in told and " 2.000 " in told and "2/2" in told and "xla tile=32" in told
    assert "heuristic within 15% of tuned: 0 of 1" in told and "winners: xla 1" in told
    assert tune_tables.main(["--out", str(out), "--again", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["op n1", "op n2", "op n4"]


def test_the_budget_and_failures(calls, tmp_path, capsys):
    out = tmp_path / "table.json"
    assert tune_tables.main(["--out", str(out), "--budget", "-1"]) == 1
    assert "3 calls left" in capsys.readouterr().out and not out.exists()
    calls.sizes = [3, 1]
    assert tune_tables.main(["--out", str(out)]) == 1
    assert "FAILED op n3: " in capsys.readouterr().out and len(entries(out)) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="where XLA is alone")
def test_shapes_give_jobs_where_there_is_something_to_choose():
    assert list(calls_of("flash_attention", "llama3*", "gpu")) == []  # only XLA here
