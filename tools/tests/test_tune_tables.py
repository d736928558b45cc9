"""The builder of shipped tables, on kernels that tell their own time."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import tune_tables
from ejkernel.modules.cli.tuning import Task
from ejkernel.ops import AutotunePolicy, Autotuner, AutotuneResult, Invocation, Trial, target_device
from ejkernel.ops.config.store import Entry
from ejkernel.ops.core.invocation import call_invocation
from ejkernel.ops.core.keys import payload_key
from ejkernel.ops.execution import timing
from ejktest.device import described
from ejktest.tunable import Doubled, Tile
from tuned import calls as table_calls
from tuned import prepare, tables
from tuned.calls import in_order, named_tasks, pruned_reason
from tuned.tables import FOLDERS, ShippedTable, TableBuilder, shipped_names, table_name


@pytest.fixture
def calls(monkeypatch):
    """Three calls; tile 32 takes half the time of tile 16. ``calls.stop_at`` presses Ctrl-C."""
    state = SimpleNamespace(stop_at=None, sizes=[1, 2, 4])

    def seconds(self, racer, calls):
        return 2e-3 / racer.cfg.tile * 16

    def tasks(ops, cases, device):
        for n in state.sizes:
            x = jax.ShapeDtypeStruct((n,), jnp.float32)

            def concrete(n=n):
                if n == state.stop_at:
                    raise KeyboardInterrupt
                return {"x": jnp.ones(n)}

            call = SimpleNamespace(
                operation="op", name=f"n{n}", concrete=concrete, shape=None, source="", device="cpu"
            )
            inv = call_invocation(Doubled("op", 16, 32), (), {"x": x})
            yield Task("op", call.name, inv.bound, call, may_fail=True)

    monkeypatch.setattr(timing.QueueClock, "seconds", seconds)
    monkeypatch.setattr(table_calls, "named_tasks", tasks)
    return state


def entries(path):
    return json.loads(path.read_text())["entries"].values()


def test_a_run_that_is_stopped_goes_on(calls, tmp_path, capsys):
    out = tmp_path / "table.json"
    calls.stop_at = 4
    assert tune_tables.main(["--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "3 of 3 calls to tune" in told and "1 calls left: run it again" in told
    assert [e["measured"]["case"] for e in entries(out)] == ["n1", "n2"]
    assert {e["config"]["tile"] for e in entries(out)} == {32}
    calls.stop_at = None
    assert tune_tables.main(["--out", str(out)]) == 0
    told, progress = capsys.readouterr()
    assert "1 of 3 calls to tune" in told and "all done" in told and len(entries(out)) == 3
    assert re.search(r"^op +n4 .* 2\.00x .*xla tile=32$", told, re.MULTILINE)
    assert "op n4 2/2 1.0000 ms, best 1.0000 ms  xla tile=32" in progress
    assert "0 of 1 heuristic configs are within 15%" in told
    assert tune_tables.main(["--out", str(out), "--force", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["op n1", "op n2", "op n4"]


def test_the_budget_and_failures(calls, tmp_path, capsys):
    out = tmp_path / "table.json"
    assert tune_tables.main(["--out", str(out), "--budget", "-1"]) == 1
    assert "3 calls left" in capsys.readouterr().out and not out.exists()
    calls.sizes = [3, 1]
    assert tune_tables.main(["--out", str(out)]) == 1
    assert re.search("cannot be tuned: .* op n3", capsys.readouterr().out)
    assert len(entries(out)) == 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="where XLA is alone")
def test_shapes_give_jobs_where_there_is_something_to_choose():
    assert named_tasks("flash_attention", "llama3*", "gpu") == []  # only XLA here


def test_the_table_of_a_device_is_spread_over_the_packages(tmp_path):
    device = "gpu:some-card:9.0"
    table = ShippedTable(device, tmp_path)
    for i, platform in enumerate(("triton", "xla", "xla")):
        metadata = {"kernel": "op", "version": 1, "device": device, "n": i}
        table.entries[payload_key(metadata)] = Entry({"config": {"platform": platform}}, metadata)
    table.write()
    assert shipped_names(tmp_path) == ["some_card.json"]
    paths = {p: tmp_path / folder / "some_card.json" for p, folder in FOLDERS.items()}
    assert {p: len(entries(path)) for p, path in paths.items() if path.exists()} == {
        "triton": 1,
        "xla": 2,
    }
    again = ShippedTable(device, tmp_path)
    assert again.entries.keys() == table.entries.keys()
    again.entries.popitem()
    again.write()
    assert sum(len(entries(path)) for path in paths.values() if path.exists()) == 2


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
    text = page.read_text()
    assert capsys.readouterr().out.rstrip() == text.rstrip()
    assert text.startswith("# Tuned and heuristic configurations: `gpu:some-card:9.0`\n")
    assert "| small | fwd+bwd | 1.1000 | 1.0000 | 1.0% | 1.10 | triton |  |" in text
    assert "| odd | fwd+bwd | did not run | 0.5000 | 1.0% |  | triton num_warps=4 |  |" in text
    assert "- Heuristic within 15% of tuned: 1 of 2.\n" in text
    assert "config did not run: 1.\n" in text and "- Winners: triton 3.\n" in text
    assert "| big | fwd+bwd | 3.0000 | 2.0000 | 1.0% | 1.50 | triton 64x32 | xla 8.0000 |" in text
    assert "## page_attention" in text and "jax 0.11.2" in text and "2026-01-02" in text
    table.write_text("{")
    assert tune_tables.main(arguments) == 1 and "not JSON" in capsys.readouterr().err


def test_the_shipped_tables_can_be_shown(capsys):
    assert tune_tables.main(["--report"]) == 0
    assert "Heuristic within 15% of tuned" in capsys.readouterr().out


# ---- which calls --------------------------------------------------------------------------------


@pytest.fixture
def h200():
    with described("NVIDIA H200", "gpu", 132):
        yield


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a described card")
def test_calls_that_serve_most_others_come_first(h200):
    tasks = in_order(named_tasks("flash_attention,page_attention", "*", "gpu"))
    names = [call.name for call in tasks]
    assert names[0] == "flash_attention llama3-8b-4k" and len(names) == len(set(names))
    at = names.index
    assert at("flash_attention gemma2-9b-8k-cap") < at("page_attention decode-b64-8k-page16")
    assert at("page_attention decode-b1-128k") < at("flash_attention sweep-d64-s8192-full")
    # near to Llama 3 8B: after all that is new
    assert at("flash_attention sweep-d256-s8192-full") < at("flash_attention mixtral-8x7b-8k")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a described card")
def test_plain_attention_that_only_moves_logits_is_left_out(h200):
    (llama,) = named_tasks("flash_attention", "llama3-8b-4k", "gpu")
    (gemma,) = named_tasks("flash_attention", "gemma2-9b-8k-cap", "gpu")

    def reasons(task):
        space = task.inv.kernel.config_space(task.inv)
        return {cfg.platform: pruned_reason(task, cfg) for cfg in space}

    told = reasons(llama)
    assert "GB of logits" in told.pop("xla") and set(told.values()) == {None}
    assert set(reasons(gemma).values()) == {None}  # head dim 256: more work for each byte
    (page,) = named_tasks("page_attention", "decode-b1-128k", "gpu")
    assert set(reasons(page).values()) == {None}


def test_prepare_lowers_the_triton_candidates(h200, monkeypatch, capsys, tmp_path):
    lowered = []
    monkeypatch.setattr(prepare, "lower", lambda inv, cfg: lowered.append(cfg.platform))
    chosen = ["--cases", "decode-b1-128k", "--ops", "page_attention", "--out", str(tmp_path / "t")]
    assert tune_tables.main(["--prepare", "NVIDIA H200", *chosen]) == 0
    assert "1 calls ready" in capsys.readouterr().out and set(lowered) == {"triton"}


# ---- what a table says -------------------------------------------------------------------------

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
    assert again.is_tuned(key) and not again.is_tuned(Invocation(ROWS, (x(9000),)).key)
    monkeypatch.setattr(tables, "versions_text", lambda: "jax 99")
    assert not again.is_tuned(key) and len(again.entries) == 2
    with pytest.raises(ValueError, match="table for"):
        TableBuilder(table.path, "gpu:nvidia-h200:9.0")
    table.path.write_text('{"schema": 2}')
    with pytest.raises(ValueError, match="schema 2"):
        TableBuilder(table.path, target_device().fingerprint)


def test_platforms_that_lost_are_stored_for_calls_that_force_them(tmp_path):
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
