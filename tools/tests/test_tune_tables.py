"""The builder of shipped tables, on kernels that tell their own time."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tune_tables
from ejkernel.ops.config.store import Entry
from ejkernel.ops.core.invocation import call_invocation
from ejkernel.ops.core.keys import payload_key
from ejkernel.ops.execution import timing
from ejktest.device import described
from ejktest.tunable import Doubled
from tuned import prepare
from tuned.calls import TableCall, hopeless, in_order
from tuned.calls import calls as calls_of
from tuned.shipped import FOLDERS, ShippedTable, shipped_names


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
            yield TableCall(call, call_invocation(Doubled("op", 16, 32), (), {"x": x}))

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


def test_the_table_of_a_device_is_spread_over_the_packages(tmp_path):
    device = "gpu:some-card:9.0"
    table = ShippedTable(device, tmp_path)
    for i, platform in enumerate(("triton", "xla", "xla")):
        facts = {"kernel": "op", "version": 1, "device": device, "n": i}
        table.entries[payload_key(facts)] = Entry({"config": {"platform": platform}}, facts)
    table.write()
    assert shipped_names(tmp_path) == ["some_card.json"]
    found = {p: tmp_path / folder / "some_card.json" for p, folder in FOLDERS.items()}
    assert {p: len(entries(path)) for p, path in found.items() if path.exists()} == {
        "triton": 1,
        "xla": 2,
    }
    again = ShippedTable(device, tmp_path)
    assert again.entries.keys() == table.entries.keys()
    again.entries.popitem()
    again.write()
    assert sum(len(entries(path)) for path in found.values() if path.exists()) == 2


def made_up_table(path):
    """Three calls: one tuned well beyond the heuristic, one not, one whose heuristic failed."""

    def entry(case, platform, ms, heuristic_ms=None, *, kernel="flash_attention", **config):
        key = f"{kernel}.v1@gpu:some-card:9.0#{len(entries):032x}"
        measured = {"case": case, "ms": ms, "spread": 0.01, "date": "2026-01-02", "pass": "fwd+bwd"}
        if platform == "auto":
            measured["heuristic_ms"] = heuristic_ms
        entries[key] = {
            "config": {"platform": "triton", "backend": "any", **config},
            "facts": {"kernel": kernel, "platform": platform},
            "measured": measured,
        }

    entries = {}
    tiles = {"fwd_params": {"q_blocksize": 64, "num_warps": None, "kv_blocksize": 32}}
    entry("big", "auto", 2.0, 3.0, **tiles)
    entry("big", "xla", 8.0, platform_="xla")
    entry("small", "auto", 1.0, 1.1, bwd_params=None)
    entry("odd", "auto", 0.5, kernel="page_attention", num_warps=4)
    provenance = {"date": "2026-01-02", "versions": {"jax": "0.11.2"}}
    content = {"schema": 1, "device": "gpu:some-card:9.0", "provenance": provenance}
    path.write_text(json.dumps({**content, "entries": entries}))


def test_the_report_needs_no_device_and_shows_every_call(tmp_path, capsys):
    table, page = tmp_path / "card.json", tmp_path / "page.md"
    made_up_table(table)
    arguments = ["--report", "--out", str(table), "--page", str(page)]
    assert tune_tables.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpu:some-card:9.0"
    big, small, odd = (
        next(x for x in lines if f" {name} " in x) for name in ("big", "small", "odd")
    )
    assert big.split() == "flash_attention big 3.0000 2.0000 1.500 triton 64x32".split()
    assert small.split()[2:5] == ["1.1000", "1.0000", "1.100"]
    assert odd.split() == "page_attention odd failed 0.5000 triton num_warps=4".split()
    assert "heuristic within 15% of tuned: 1 of 2" in lines
    assert "calls whose heuristic config did not run: 1" in lines and "winners: triton 3" in lines
    text = page.read_text()
    assert "| big | fwd+bwd | 3.0000 | 2.0000 | 1.0% | 1.50 | triton 64x32 | xla 8.0000 |" in text
    assert "## page_attention" in text and "jax 0.11.2" in text and "2026-01-02" in text
    table.write_text("{")
    assert tune_tables.main(arguments) == 1 and "not JSON" in capsys.readouterr().err


def test_the_shipped_tables_can_be_shown(capsys):
    assert tune_tables.main(["--report"]) == 0
    assert "heuristic within 15% of tuned" in capsys.readouterr().out


# ---- which calls --------------------------------------------------------------------------------


@pytest.fixture
def h200():
    with described("NVIDIA H200", "gpu", 132):
        yield


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a described card")
def test_calls_that_serve_most_others_come_first(h200):
    found = in_order(calls_of("flash_attention,page_attention", "*", "gpu"))
    names = [call.name for call in found]
    assert names[0] == "flash_attention llama3-8b-4k" and len(names) == len(set(names))
    place = names.index
    assert place("flash_attention gemma2-9b-8k-cap") < place("page_attention decode-b64-8k-page16")
    assert place("page_attention decode-b1-128k") < place("flash_attention sweep-d64-s8192-full")
    # near to Llama 3 8B: after all that is new
    assert place("flash_attention sweep-d256-s8192-full") < place("flash_attention mixtral-8x7b-8k")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a described card")
def test_plain_attention_that_only_moves_logits_is_left_out(h200):
    (llama,) = calls_of("flash_attention", "llama3-8b-4k", "gpu")
    (gemma,) = calls_of("flash_attention", "gemma2-9b-8k-cap", "gpu")

    def reasons(call):
        space = call.inv.kernel.config_space(call.inv)
        return {cfg.platform: hopeless(call, cfg) for cfg in space}

    told = reasons(llama)
    assert "GB of logits" in told.pop("xla") and set(told.values()) == {None}
    assert set(reasons(gemma).values()) == {None}  # head dim 256: more work for each byte
    (page,) = calls_of("page_attention", "decode-b1-128k", "gpu")
    assert set(reasons(page).values()) == {None}


def test_prepare_lowers_the_triton_candidates(h200, monkeypatch, capsys, tmp_path):
    lowered = []
    monkeypatch.setattr(prepare, "lower", lambda inv, cfg: lowered.append(cfg.platform))
    chosen = ["--cases", "decode-b1-128k", "--ops", "page_attention", "--out", str(tmp_path / "t")]
    assert tune_tables.main(["--prepare", "NVIDIA H200", *chosen]) == 0
    assert "1 calls ready" in capsys.readouterr().out and set(lowered) == {"triton"}
