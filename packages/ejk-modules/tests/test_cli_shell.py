"""``ejk`` in a shell: help, completion, narrow terminals, kernels of one's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from ejkernel.modules.cli import app, completion, main, report
from ejkernel.modules.cli.output import Output
from ejkernel.ops.errors import reset_warnings

MINE = """
from dataclasses import dataclass
import jax
from ejkernel.ops import Kernel

@dataclass(frozen=True)
class Tiles:
    tile: int = 16

class Mine(Kernel[Tiles, jax.Array]):
    def run(self, x, *, cfg):
        return x * 2

    def config_space(self, inv):
        return [Tiles(16), Tiles(32)]
"""


def ejk(capsys, *words):
    """Exit status, and the JSON that was printed."""
    from ejkernel.ops.execution import executor

    executor._default = None
    reset_warnings()
    status = main([*map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_alone_it_prints_its_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    told = capsys.readouterr().out
    assert stopped.value.code == 0 and all(name in told for name in app.COMMANDS)


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_fits_a_narrow_terminal(command, capsys, monkeypatch):
    """All but examples, which are to be copied."""
    monkeypatch.setenv("COLUMNS", "50")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 50 and not line.startswith("  ejk ")] == []


def test_own_kernels_are_tuned_exported_and_imported(capsys, tmp_path, monkeypatch):
    import jax.numpy as jnp

    from ejkernel.ops import Invocation, save_invocations
    from ejkernel.ops.utils import allowed

    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    calls, kept = tmp_path / "calls.json", tmp_path / "kept.json"
    module = __import__(name)
    save_invocations(calls, [Invocation(module.Mine(), (jnp.ones(4),))])
    content = calls.read_text()

    def forget_classes():
        for known_name in [k for k in allowed._classes if name in k]:
            monkeypatch.delitem(allowed._classes, known_name)

    def forget():
        forget_classes()
        del sys.modules[name]

    forget()

    status, done = ejk(capsys, "tune", "--recorded", calls)
    assert status == 1 and "1 of 1 recorded call left out; kernels of your own" in done["error"]
    assert "--import MODULE" in done["error"]
    status, done = ejk(capsys, "tune", "--recorded", calls, "--import", name, "--iters", "1")
    assert status == 0 and [r["operation"] for r in done["tuned"]] == ["Mine"]
    assert ejk(capsys, "cache", "export", kept, "--kernel", "Mine")[1]["configs"] == 1
    (shown,) = ejk(capsys, "cache", "show", "Mine")[1]
    assert ejk(capsys, "cache", "clear", "--kernel", "Mine")[1]["forgotten"] == 1
    forget_classes()
    status, done = ejk(capsys, "cache", "import", kept)
    assert status == 1 and done["counts"] == {"unknown": 1}
    del sys.modules[name]
    status, done = ejk(capsys, "--import", name, "cache", "import", kept)
    assert status == 0 and done["counts"] == {"added": 1}
    assert ejk(capsys, "cache", "show", "Mine")[1] == [shown] and content == calls.read_text()
    status, done = ejk(capsys, "cache", "ls", "--import", "no_such_module")
    assert status == 2 and "no_such_module" in done["error"]
    sys.modules.pop(name, None)


def test_import_may_stand_at_every_place():
    args = app.parse_words("--import a --plain cache --import=b ls --import c --json".split())
    assert args.imports == ["a", "b", "c"] and args.action == "ls" and args.json and args.plain
    args = app.parse_words(["shapes"])
    assert args.imports == [] and not args.json and not args.plain


def test_the_working_folder_is_searched_last(tmp_path, monkeypatch, capsys):
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    before = [entry for entry in sys.path if entry]
    monkeypatch.setattr(sys, "path", list(before))
    assert main(["--import", "json", "completion", "bash"]) == 0
    assert sys.path == before  # found elsewhere
    assert main(["--import", name, "completion", "bash"]) == 0
    assert sys.path == [*before, str(tmp_path)] and name in sys.modules
    del sys.modules[name]
    done = subprocess.run(
        [sys.executable, "-m", "ejkernel.modules.cli", "--import", name, "completion", "bash"],
        env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and f"No module named '{name}'" in done.stderr


def test_completion_knows_every_command(capsys, tmp_path):
    known = completion.words()
    assert set(known) == set(app.COMMANDS) and "flash_attention" in known["explain"]
    assert "--recorded" in known["tune"] and {"ls", "export"} <= set(known["cache"])
    for shell in completion.SHELLS:
        assert main(["completion", shell]) == 0
        assert "flash_attention" in capsys.readouterr().out
    if shutil.which("bash"):
        script = completion.bash() + (
            "\nCOMP_WORDS=(ejk explain flash_at); COMP_CWORD=2; _ejk; echo ${COMPREPLY[@]}"
            "\nCOMP_WORDS=(ejk ca); COMP_CWORD=1; _ejk; echo ${COMPREPLY[@]}"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["flash_attention", "cache"] and done.stderr == ""


COLUMNS = ("case", "mode", "what", "ms", "TFLOP/s", "of the bound", "speed over")
ROW = (
    "llama3-8b-4k",
    "fwd+bwd",
    "ejkernel-triton",
    12.5,
    480.1,
    "71% arithmetic",
    "jax-cudnn 1.1x",
)


@pytest.fixture
def output_on(monkeypatch):
    """Makes the output of a terminal of so many columns, with or without rich."""

    def make(width, rich):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
        if not rich:
            return Output()
        pytest.importorskip("rich")
        from ejkernel.modules.cli.rich_output import RichOutput

        return RichOutput()

    return make


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("rich", [False, True])
def test_no_word_is_broken_on_a_narrow_terminal(capsys, output_on, width, rich):
    out = output_on(width, rich)
    out.table(COLUMNS, [ROW, ROW], right=(3, 4))
    told = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, told.splitlines())) <= width
    for word in " ".join(map(str, ROW)).split():
        assert len(re.findall(rf"(?<!\S){re.escape(word)}(?!\S)", told)) == 2, word


@pytest.mark.parametrize("rich", [False, True])
def test_a_narrow_terminal_drops_columns_of_one_table(capsys, output_on, rich):
    out = output_on(80, rich)
    out.table(COLUMNS, [ROW, ROW], right=(3, 4), optional=(4, 5, 7))
    printed = capsys.readouterr()
    lines = [line for line in printed.out.splitlines() if ROW[0] in line]
    assert len(lines) == 2 and max(map(len, lines)) <= 80
    dropped = [name for name in COLUMNS if name not in printed.out.split("\n\n")[0]]
    assert dropped and f"too narrow for: {', '.join(dropped)}" in printed.err


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_has_headings_in_place_of_columns(capsys, output_on, width, rich):
    out = output_on(width, rich)
    forward = (ROW[0], "fwd", *ROW[2:])
    out.table(COLUMNS, [ROW, ROW, forward], right=(3, 4), optional=(6, 5, 4), headings=2)
    out.fields([(f"{' '.join(ROW[:3])}", "a reason that is longer than one line of a terminal")])
    printed = capsys.readouterr()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.out).splitlines()
    assert max(map(len, lines)) <= width
    titles = [line for line in lines if line.startswith(f"{ROW[0]}, ")]
    assert [title.split()[1] for title in titles] == [ROW[1], "fwd"]
    assert sum("12.5" in line and ROW[2] in line for line in lines) == 3
    assert printed.err.count("too narrow for") == 1
    assert printed.out.count("71% arithmetic" if width == 60 else "480.1") == 3


@pytest.mark.parametrize("rich", [False, True])
def test_a_path_longer_than_a_line_stays_whole(capsys, output_on, rich):
    """A path can be copied out of a remark."""
    path = "/home/someone/" + "a_folder_with_a_long_name/" * 3 + "flash_attention.json"
    output_on(60, rich).note(f"recorded in {path}; ejk report shows it")
    assert f"{path};" in capsys.readouterr().err.split()


@pytest.mark.usefixtures("report_libraries")
def test_the_page_fits_a_phone_and_escapes_what_it_shows():
    from ejkernel.modules.cli.sections import Section, Table

    table = Table(("x",), [("<b>\x1b",), (0.123456,), (None,)])
    sections = [Section("a", "b", "c", [table])]
    text = report.render(title="t", subtitle="s", numbers={}, sections=sections)
    assert 'name="viewport" content="width=device-width' in text
    assert "@media (max-width:46em) { svg { max-width:none; } }" in text  # charts scroll
    cells = re.findall("<td>(.*)</td>", text)
    assert cells == ["&lt;b&gt;\\x1b", "0.1235", ""]


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_the_report_names_the_library_that_is_missing(capsys, monkeypatch, missing):
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == missing else name)
    assert main(["report", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == f'ejk report needs {missing}: python -m pip install "ejk-modules[report]"'
