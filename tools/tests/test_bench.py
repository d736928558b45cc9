"""Benchmarks measure what they say, and refuse names that do not exist."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from dataclasses import asdict, replace
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command
from bench import one_of_many, overlap, plot, report
from bench.workloads import scaling
from ejkernel.modules.bench import timing
from ejkernel.modules.bench.case import Case, case_of
from ejkernel.modules.bench.limits import Limits
from ejkernel.modules.bench.record import environment
from ejkernel.modules.bench.runner import compile_ahead, run_case
from ejkernel.modules.workloads import call_of
from ejkernel.modules.workloads.shapes import SHAPES


def small_case() -> Case:
    return Case(
        "small",
        lambda: (jnp.ones((8, 8)), jnp.ones((8, 8))),
        {"ours": jnp.matmul, "peer": lambda a, b: b @ a, "absent": "needs a GPU"},
        1024.0,
        768.0,
        "float32",
        (0, 1),
    )


def test_a_case_becomes_rows_with_ratios(tmp_path):
    limits = Limits({"float32": 1e9}, 1e9)
    rows = run_case(small_case(), "fwd+bwd", limits, rounds=2, target_s=0.001)
    ours, peer, absent = rows
    assert ours.ms > 0 and ours.speed_over["peer"] == pytest.approx(1 / peer.speed_over["ours"])
    # forward and backward together are counted as 3.5 times the forward
    assert ours.tflops == pytest.approx(3.5 * 1024 / (ours.ms * 1e-3) / 1e12)
    assert absent.ms is None and absent.note == "needs a GPU"
    measured = {"op": "small", "limits": asdict(limits), "rows": [asdict(r) for r in rows]}
    result = {**environment(), **measured}
    assert "not run: needs a GPU" in report.markdown(result)
    path = report.write_json(tmp_path, "small", result)
    texts = "".join(ElementTree.parse(plot.write_chart(path)).getroot().itertext())
    assert all(name in texts for name in ("small", "forward + backward", "ours", "peer"))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7])
def test_contenders_follow_each_other_equally_often(count):
    names = [f"c{i}" for i in range(count)]
    rounds = [timing._round_order(names, number) for number in range(2 * count)]
    assert all(sorted(turns) == names for turns in rounds)
    assert sorted(turns[0] for turns in rounds) == sorted(2 * names)
    pairs = Counter(pair for turns in rounds for pair in itertools.pairwise(turns))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), 2)


def test_a_cache_is_given_for_good_and_comes_back():
    shape = next(s for s in SHAPES if s.name == "cpu-mixed")
    case = case_of(call_of(shape, "ragged_page_attention_v3"), peers=False)
    ((number, result),) = case.updates.items()
    assert case.call.names[number] == "kv_cache" and result == 1
    ((made,),) = (x.values() for x in compile_ahead([(case, "fwd")]))
    program = timing.Program(made[0], case.inputs(), case.updates)
    before = program.arguments[number]
    program()
    assert before.is_deleted() and not program.arguments[number].is_deleted()
    (row,) = run_case(case, "fwd", Limits({"float32": 1e9}, 1e9), rounds=1, target_s=0.001)
    assert row.ms > 0 and not row.note


def test_programs_compiled_ahead_are_those_that_are_timed():
    def broken(a, b):
        raise ValueError("no such form")

    small = small_case()
    small.contenders["broken"] = broken
    shape = next(s for s in SHAPES if s.name == "cpu-d64-s512-causal")
    shape = replace(shape, kv_heads=2, q_len=64)  # q, k and v differ in shape
    real = case_of(call_of(shape, "flash_attention"), peers=False)
    limits = Limits({"float32": 1e9}, 1e9)
    runs = [(small, "fwd+bwd"), (real, "fwd")]
    for (case, mode), made in zip(runs, compile_ahead(runs), strict=True):
        rows = run_case(case, mode, limits, rounds=1, target_s=0.001, programs=made)
        again = run_case(case, mode, limits, rounds=1, target_s=0.001)
        assert [(r.contender, r.note, r.temp_mb) for r in rows] == [
            (r.contender, r.note, r.temp_mb) for r in again
        ]
        assert rows[0].ms > 0
    assert made.keys() == real.contenders.keys()


def test_a_run_writes_json_markdown_and_a_chart(tmp_path, capsys):
    assert {"first_call", "imports", "memory", "overhead"} <= set(command.names())
    options = ["--peers", "", "--modes", "fwd", "--rounds", "1", "--target-s", "0.001"]
    cases = ["--cases", "cpu-d64-s512-c*,cpu-d64-s512-causal,cpu-d64-s512-full"]
    assert command.main(["flash_attention", *cases, *options, "--out", str(tmp_path)]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"flash_attention.{ending}" for ending in ("json", "md", "svg")}
    rows = json.loads((tmp_path / "flash_attention.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["cpu-d64-s512-full", "cpu-d64-s512-causal"]
    assert all(row["contender"] == "ejkernel" and row["ms"] > 0 for row in rows)


def test_unknown_names(tmp_path, capsys):
    assert command.main(["flash_attention", "--cases", "nothing", "--out", str(tmp_path)]) == 2
    assert "unknown shape of flash_attention 'nothing'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["no_such_op"])


@pytest.mark.parametrize(
    "options",
    [["--kinds", "alone,strong"], ["--devices", "2,x"], ["--lock", "/no/folder"], ["--sizes", "x"]],
)
def test_options_of_scaling_that_it_cannot_use(options, capsys):
    with pytest.raises(SystemExit):
        command.main(["scaling", *options])
    assert options[0] in capsys.readouterr().err


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_scaling_times_one_device_of_several_and_all_of_them(tmp_path, capsys):
    sizes = scaling.Sizes((256,), 2, 16, 2, 64, 2, 2)
    options = {"cases": "ring zigzag *,flash heads", "rounds": 1, "target_s": 1e-4}
    options |= {"kinds": "together,alone", "lock": tmp_path / "lock"}
    args = argparse.Namespace(devices="2", out=tmp_path, budget_s=None, **options)
    assert scaling.main(args, sizes) == 0
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    ring = "ring zigzag 256"
    cases = {"together": ("flash heads", ring, f"{ring} combined"), "alone": ("flash heads", ring)}
    order = [(r["kind"], r["case"], r["mode"]) for r in rows]
    assert order == [
        (kind, case, mode) for kind in cases for case in cases[kind] for mode in ("fwd", "fwd+bwd")
    ]
    assert all(r["ms"] > 0 and r["share"] > 0 and r["devices"] == 2 for r in rows)
    assert not any(r["unwanted"] for r in rows)
    sent = [r["collectives"] for r in rows]
    assert not any(sent[:2])  # heads need nothing of each other
    # every one of the calls in a row sends keys and values, and with gradients these home
    assert sent[2:6] == [{"collective-permute": n} for n in (2, 4, 2, 4)]
    out = capsys.readouterr().out
    assert out.count("collective-permute") == 4 and out.count("[target") == 6
    scaling.add_to_record(tmp_path, scaling.Row(ring, "fwd", "together", 2, note="no time"))
    scaling.add_to_record(tmp_path, scaling.Row(ring, "fwd", "together", 4, 1.0, 0.5))
    added = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert added[:-1] == rows and added[-1]["devices"] == 4
    drawing = plot.write_chart(tmp_path / "scaling.json")
    texts = "".join(ElementTree.parse(drawing).getroot().itertext())
    assert all(name in texts for name in (ring, "flash heads", "forward + backward"))


def test_scaling_says_what_it_had_no_time_for(tmp_path, capsys):
    options = {"cases": "gla *", "kinds": "together,alone", "lock": None}
    args = argparse.Namespace(devices="2", out=tmp_path, budget_s=1.0, **options)
    assert scaling.main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.endswith("not run: no time left") for line in lines)
    assert len(json.loads((tmp_path / "scaling.json").read_text())["rows"]) == len(lines)


def test_one_device_of_several_computes_its_part():
    """Without the others: shapes and work of one device, whatever the collective."""

    def run(x):
        part = jax.lax.all_to_all(x, "x", 1, 0, tiled=True) * jax.lax.axis_index("x")
        gathered = jax.lax.all_gather(jax.lax.ppermute(part, "x", [(0, 1)]), "x")
        return jax.lax.psum_scatter(gathered, "x")

    with one_of_many.as_device(3, 4):
        out = jax.jit(lambda x: run(x))(jnp.ones((2, 8)))
    np.testing.assert_array_equal(out, np.full((8, 2), 3.0))
    with pytest.raises(NameError):
        jax.make_jaxpr(run)(jnp.ones((2, 8)))


def test_axes_of_kernels_keep_their_meaning_on_one_device_of_several():
    def program(_):
        return jax.lax.axis_index("item"), jax.lax.axis_size("item"), jax.lax.axis_index("x")

    with one_of_many.as_device(3, 4):
        items, sizes, devices = jax.vmap(program, axis_name="item")(jnp.zeros(2))
    np.testing.assert_array_equal(items, [0, 1])
    assert (int(np.max(sizes)), int(np.max(devices))) == (2, 3)


def test_communication_is_hidden_while_something_is_computed():
    events = [("ncclDevKernel_SendRecv", 0, 10), ("flash", 2, 6), ("flash", 5, 8), ("add", 20, 30)]
    assert overlap.hidden_share(events) == pytest.approx(0.6)
    assert overlap.hidden_share([*events, ("ncclAllReduce", 20, 30)]) == pytest.approx(0.8)
    assert overlap.hidden_share([("flash", 0, 1)]) is None
