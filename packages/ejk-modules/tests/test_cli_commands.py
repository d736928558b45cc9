"""``ejk``: every subcommand says what it found, to people and to programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import ejk_command
from ejkernel import modules
from ejkernel.modules import MeanPoolingConfig
from ejkernel.modules.cli import doctor_checks, main
from ejkernel.modules.operations.mean_pooling import MeanPooling

WORDS = ["s=64", "d=16", "dtype=float32"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache directory, and a default executor, of the test's own."""
    from ejkernel.ops.execution import executor

    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(executor, "_default", None)
    return tmp_path / "cache"


@pytest.fixture
def candidates(monkeypatch):
    """Two configurations to choose from, which the XLA implementations do not have."""
    configs = [MeanPoolingConfig(platform="xla", token_tile=t) for t in (16, 32, 64)]
    monkeypatch.setattr(MeanPooling, "config_space", lambda self, inv: configs)


def asked(capsys, *words: str) -> tuple[int, object]:
    """Exit status and parsed output of ``ejk words --json``, as in a process of its own."""
    from ejkernel.ops.execution import executor

    executor._default = None
    capsys.readouterr()
    status = main([*words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_starting_imports_no_jax():
    code = (
        "import sys, ejkernel.modules.cli.app as a; a.build_parser(); print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_doctor_names_a_package_that_replaces_a_kernel(monkeypatch):
    from ejkernel import ops

    package = EntryPoint("xla", "fancy:register", "ejkernel.kernels")

    def register(registry):
        for _ in range(2):

            @registry.register("op", "xla", "any", replace=True)
            def op(x, *, cfg=None):
                return x

    ours = EntryPoint("xla", "mine:register", "ejkernel.kernels")
    monkeypatch.setattr(EntryPoint, "load", lambda self: register)
    registry = ops.KernelRegistry(discover=lambda: (ours, package))
    monkeypatch.setattr(ops, "kernel_registry", registry)
    (found,) = (check for check in doctor_checks.packages() if check.what == "replaced")
    assert found.status == "warn" and "uninstall fancy:register" in found.fix
    assert found.found == "fancy:register replaces op/xla/any of mine:register"


def test_help_and_unknown_words(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0 and "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "flash_attention", "--nonsense"])
    assert stopped.value.code == 2


# ---- doctor ------------------------------------------------------------------------------------


def test_doctor_on_this_machine(capsys):
    status, found = asked(capsys, "doctor")
    assert status == 0 and found["usable"] is True
    by_name = {c["what"]: c for c in found["checks"]}
    assert by_name["a small call"]["status"] == "ok"
    assert by_name["JAX devices"]["status"] == "ok"
    assert all(row["platforms"]["xla"] == "yes" for row in found["operations"])
    assert main(["doctor", "--no-run", "--plain"]) == 0
    assert "ejkernel can be used here" in capsys.readouterr().out


def test_gated_gradients_of_a_wrong_compiler_are_reported(monkeypatch):
    (right,) = doctor_checks.gated_gradients("xla")
    assert right.status == "ok", right.found
    exact = modules.recurrent_attention

    def wrong(q, k, v, g, **options):
        return exact(q, k, v, g=g + 1e-2 * v[..., 0], **options)

    monkeypatch.setattr(modules, "recurrent_attention", wrong)
    (found,) = doctor_checks.gated_gradients("xla")
    assert found.status == "fail" and "triton" in found.fix


def test_doctor_names_the_fix(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_OPS_STAMP", "bananas")
    status, found = asked(capsys, "doctor", "--no-run")
    (check,) = [c for c in found["checks"] if c["status"] == "fail"]
    assert status == 1 and check["fix"] == "unset EJKERNEL_OPS_STAMP"
    monkeypatch.delenv("EJKERNEL_OPS_STAMP")
    monkeypatch.setenv("EJKERNEL_CACHEDIR", "x")
    (tmp_path / "ejkernel").mkdir()
    (tmp_path / "ejkernel" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    status, found = asked(capsys, "doctor")
    (check,) = [c for c in found["checks"] if c["status"] == "fail"]
    assert status == 1 and "hides ejkernel" in check["found"] and "rename" in check["fix"]


@pytest.mark.parametrize(
    ("versions", "what", "status", "fix"),
    [
        ({"jax": "0.9.1", "jaxlib": "0.9.1"}, "JAX", "warn", "jax>=0.10,<0.13"),
        ({"jaxlib": "0.11.0"}, "jaxlib", "fail", "jaxlib==0.10.2"),
        ({"jax-cuda12-plugin": "0.10.1"}, "JAX plugin", "fail", "jax-cuda12-plugin==0.10.2"),
        ({"ejk-kernels-xla": None}, "packages", "fail", "pip install ejk-kernels-xla"),
        ({"triton": "3.5.0"}, "Triton", "warn", "triton>=3.7.1"),
        ({"triton": None}, "Triton", "warn", "ejk-modules[triton]"),
        ({}, "JAX plugin", "warn", "ejk-modules[cuda13]"),
    ],
)
def test_versions_that_do_not_go_together(monkeypatch, versions, what, status, fix):
    from ejkernel.modules.cli import checks, installed

    have = dict.fromkeys([*ejk_command.OURS, "triton", "jax-triton"], "3.9.0")
    have |= {"jax": "0.10.2", "jaxlib": "0.10.2"} | versions
    monkeypatch.setattr(installed, "version", have.get)
    monkeypatch.setattr(installed, "hardware", lambda: {"nvidia": "driver 580"})
    found = [c for check in checks.INSTALLATION for c in check() if c.what == what]
    assert any(c.status == status and fix in c.fix for c in found), found


# ---- explain, shapes -----------------------------------------------------------------------------


def test_explain_a_case_and_words(capsys):
    status, found = asked(capsys, "explain", "flash_attention", "--shape", "llama3-8b-4k")
    assert status == 0 and found["implementation"] == "flash_attention/xla/any"
    assert found["tier"] == "heuristics" and "bf16[4,4096,32,128]" in found["arguments"]
    assert dict(found["refused"])["flash_attention/cuda/gpu"].startswith("it needs an NVIDIA gpu")
    assert main(["explain", "gla", "b=2", "--shape", "gla-b2-8k", "h=4", "--plain"]) == 0
    told = capsys.readouterr()
    assert "query bf16[2,8192,4,128]" in told.out
    assert "no GPU here" in told.err


def test_explain_for_a_device_that_is_not_here(capsys):
    words = ["explain", "flash_attention", "--shape", "llama3-8b-4k"]
    status, found = asked(capsys, *words, "--device", "h200")
    assert status == 0 and found["device"] == "gpu:nvidia-h200:9.0"
    _, found = asked(capsys, *words, "--device", "tpu:TPU v5 lite", "platform=xla")
    assert found["device"].startswith("tpu:") and found["platform"] == "xla"
    assert main([*words, "--device", "h20000"]) == 2
    assert "h200" in capsys.readouterr().err


def test_explain_says_what_would_be_refused(capsys):
    status, found = asked(capsys, "explain", "flash_attention", "s=64", "platform=triton")
    assert status == 1 and found["tier"] == "error" and "needs a gpu" in found["error"]


def test_explain_many(capsys):
    assert main(["explain", "page_attention", "--shapes", "--plain"]) == 0
    told = capsys.readouterr().out
    assert "cpu-b4-2k" in told and "decode-b64" not in told


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["explain", "flash_atention"], "did you mean flash_attention"),
        (["explain", "flash_attention", "--shape", "lama3-8b-4k"], "llama3-8b-4k"),
        (["explain", "flash_attention", "head=3"], "heads"),
        (["explain", "flash_attention", "s=64", "logits_soft_cap=-1"], "logits_soft_cap"),
        (["shapes", "page_atention"], "page_attention"),
        (["bench", "flash_attention", "--modes", "sideways"], "expected fwd"),
        (["tune"], "give an operation"),
        (["cache", "clear"], "--all"),
        (["cache", "clear", "--kernel", "flash_atention"], "did you mean flash_attention"),
        (["cache", "export", "x.json", "--kernel", "flash_atention"], "flash_attention"),
        (["cache", "import", "nowhere.json"], "No such file"),
    ],
)
def test_bad_input_is_one_line(capsys, words, near):
    assert main(words) != 0
    told = capsys.readouterr().err
    assert near in told and "Traceback" not in told


def test_shapes_are_listed(capsys):
    status, counts = asked(capsys, "shapes")
    assert status == 0 and counts["flash_attention"] > 50
    status, found = asked(capsys, "shapes", "mla_decode", "deepseek*")
    assert {s["heads"] for s in found} == {128, 16}


# ---- tune, cache ---------------------------------------------------------------------------------


def test_tune_then_cache_then_clear(capsys, candidates, tmp_path, own_cache):
    table = tmp_path / "table.json"
    status, done = asked(capsys, "tune", "mean_pooling", *WORDS, "--iters", "2",
                         "--table", str(table))  # fmt: skip
    (row,) = done["tuned"]
    assert status == 0 and row["candidates"] >= 3 and row["best_ms"] <= row["heuristic_ms"]
    _, again = asked(capsys, "tune", "mean_pooling", *WORDS)
    assert again["tuned"] == [] and "--force" in again["left"][0]["why"]
    _, explained = asked(capsys, "explain", "mean_pooling", *WORDS)
    assert explained["tier"] == "persistent" and explained["config"] == row["config"]

    status, listed = asked(capsys, "cache", "ls")
    assert [f["configs"] for f in listed["files"]] == [1]
    status, shown = asked(capsys, "cache", "show", "mean_pooling")
    assert shown[0]["measured"]["ms"] == row["best_ms"]
    assert asked(capsys, "cache", "show", shown[0]["key"].rpartition("#")[2][:6])[1] == shown
    assert main(["cache", "show", "mean_poling"]) == 2
    assert "mean_pooling" in capsys.readouterr().err

    exported = tmp_path / "all.json"
    assert asked(capsys, "cache", "export", str(exported))[1]["configs"] == 1
    header = json.loads(table.read_text())
    assert header["kernel"] == "mean_pooling" and header["provenance"]["versions"]["jax"]
    assert json.loads(exported.read_text())["entries"] == header["entries"]
    assert asked(capsys, "cache", "clear", "--kernel", "flash_attention")[1]["forgotten"] == 0
    assert asked(capsys, "cache", "clear", "--all")[1]["forgotten"] == 1
    assert asked(capsys, "cache", "import", str(exported))[1]["counts"] == {"added": 1}
    assert asked(capsys, "cache", "import", str(exported))[1]["counts"] == {"kept": 1}
    _, listed = asked(capsys, "cache", "show")
    assert listed[0]["config"] == row["config"]


def test_winners_are_shown_where_the_table_cannot_be_written(capsys, candidates, tmp_path):
    (tmp_path / "file").touch()
    words = [*WORDS, "--iters", "1", "--table", str(tmp_path / "file" / "table.json")]
    status, done = asked(capsys, "tune", "mean_pooling", *words)
    assert status == 2 and len(done["tuned"]) == 1


def test_recorded_calls_are_tuned(capsys, candidates, tmp_path, monkeypatch):
    import numpy as np

    from ejkernel.modules import mean_pooling
    from ejkernel.ops import clear_invocations, policy_override, save_invocations

    clear_invocations()
    monkeypatch.setenv("EJKERNEL_OPS_RECORD", "1")
    with policy_override(autotune=False):
        mean_pooling(np.ones((2, 64, 16), np.float32))
    monkeypatch.delenv("EJKERNEL_OPS_RECORD")
    save_invocations(tmp_path / "calls.json")
    clear_invocations()
    words = ["tune", "--recorded", str(tmp_path / "calls.json"), "--iters", "1"]
    status, done = asked(capsys, *words)
    assert status == 0 and [r["operation"] for r in done["tuned"]] == ["mean_pooling"]
    assert main([*words, "--shapes"]) == 2
    assert main(["tune", "--recorded", str(tmp_path / "none.json")]) == 2


def test_nothing_to_choose_is_said(capsys):
    status, done = asked(capsys, "tune", "mean_pooling", *WORDS)
    assert status == 0 and done["tuned"] == []
    assert "nothing to choose" in done["left"][0]["why"]


def test_a_newer_file_is_left_alone_and_reported(capsys, own_cache, tmp_path):
    newer = own_cache / "configs" / "cpu-x" / "flash_attention.json"
    newer.parent.mkdir(parents=True)
    text = '{"schema": 99, "entries": {}}'
    newer.write_text(text)
    assert main(["cache", "ls"]) == 0
    told = capsys.readouterr()
    assert "left alone" in told.err and str(newer) in told.err
    assert main(["cache", "clear", "--all"]) == 0
    assert newer.read_text() == text
    assert main(["cache", "import", str(newer)]) == 1
    status, found = asked(capsys, "doctor", "--no-run")
    (check,) = [c for c in found["checks"] if c["what"] == "cache file"]
    assert status == 0 and check["status"] == "warn" and newer.read_text() == text


def test_ctrl_c_keeps_what_was_measured(capsys, candidates, monkeypatch):
    from ejkernel import ops

    real, seen = ops.autotune_recorded, []

    def interrupted(invocations, **options):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return real(invocations, **options)

    monkeypatch.setattr(ops, "autotune_recorded", interrupted)
    words = ["tune", "mean_pooling", "--shape", "*pool*", "--iters", "1", "--json"]
    monkeypatch.setattr(
        "ejkernel.modules.cli.tune.calls_of",
        lambda *_: [_call("64"), _call("1024")],
    )
    assert main(words) == 130
    told = capsys.readouterr()
    assert len(json.loads(told.out)["tuned"]) == 1 and "interrupted" in told.err
    assert [f["configs"] for f in asked(capsys, "cache", "ls")[1]["files"]] == [1]


def _call(length):
    from ejkernel.modules.workloads.find import from_words

    return from_words("mean_pooling", [f"s={length}", "d=16", "dtype=float32"])


# ---- bench, report -------------------------------------------------------------------------------


@pytest.mark.usefixtures("report_libraries")
def test_bench_then_report(capsys, candidates, tmp_path, monkeypatch):
    from ejkernel.modules.bench import limits

    monkeypatch.setattr(
        limits, "measure_limits", lambda *_, **__: limits.Limits({"float32": 1e11}, 1e10)
    )
    words = ["bench", "mean_pooling", *WORDS, "--rounds", "1", "--target-s", "0.001"]
    status, found = asked(capsys, *words)
    assert status == 0 and {r["contender"] for r in found["rows"]} == {"ejkernel", "jax-xla"}
    assert main(["tune", "mean_pooling", *WORDS, "--iters", "1", "--force"]) == 0
    page = tmp_path / "page.html"
    assert main(["report", "--out", str(page), "--no-doctor"]) == 0
    text = page.read_text()
    for name in ("What ran", "Against the bound", "Tuning landscape", "Tuned configurations"):
        assert name in text
    assert "<svg" in text and "<script" not in text and "<link" not in text
    assert not re.search(r"""(src|href)=["'][^#]|url\([^#]|@import""", text)  # loads nothing


@pytest.mark.usefixtures("report_libraries")
@pytest.mark.parametrize("ms, shown", [(0.0070081, "7.008 µs"), (0.1, "0.1 ms"), (12.5, "12.5 ms")])
def test_times_in_plots_are_short(ms, shown):
    from ejkernel.modules.cli import charts

    row = {"case": "a$", "mode": "fwd", "contender": "ejkernel", "ms": ms, "percent_of_limit": 50.0}
    drawn = charts.bound_chart([row], "a title")
    assert f">{shown}<" in drawn and ">a$<" in drawn and ">a title<" in drawn


@pytest.mark.usefixtures("report_libraries")
def test_report_of_nothing_is_a_page_about_the_machine(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["report", "--out", str(page)]) == 0
    assert "nothing was recorded" in capsys.readouterr().err
    assert "This machine" in page.read_text()
    assert main(["report", "nowhere.json"]) == 1
    told = capsys.readouterr().err
    assert "none of the files" in told and "Traceback" not in told


def test_rich_output_says_the_same(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["explain", "mean_pooling", *WORDS]) == 0
    told = capsys.readouterr().out
    assert "mean_pooling/xla/any" in told and "[" in told


# ---- on a card ---------------------------------------------------------------------------------

LIGHT = ["--rounds", "3", "--target-s", "0.03"]
CALLED = ["flash_attention", "b=2", "s=2k", "h=16", "d=128", "causal=true"]
STEPS = {
    "doctor": ["doctor"],
    "explain": ["explain", "flash_attention", "--shapes"],
    "bench": ["bench", "flash_attention", "--shape", "llama3-8b-4k", "--modes", "fwd", *LIGHT],
    "short": ["bench", "page_attention", "b=1", "c=2k", "h=32", "hk=8", "d=128", *LIGHT],
    "tune": ["tune", *CALLED, "--force", "--budget", "20"],
    "cache": ["cache", "show"],
}


@pytest.mark.gpu
def test_each_subcommand_on_a_gpu(capsys, tmp_path):
    """Under two minutes; short kernels are timed by the device itself, not from the host."""
    found = {}
    for name, words in STEPS.items():
        status, found[name] = asked(capsys, *words)
        assert status == 0, (name, found[name])
    clocks = {r["clock"] for r in found["short"]["rows"] if r["ms"]}
    assert clocks == {"device"}, "CUPTI did not answer"
    assert found["tune"]["tuned"] and found["cache"]
    assert main(["report", "--out", str(tmp_path / "report.html")]) == 0
