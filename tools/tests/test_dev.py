import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import dev

SCRIPT = Path(dev.__file__).resolve()


@pytest.fixture
def clone(tmp_path):
    """A repository whose environment is ready and whose hatch prints what it is given."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "dev.py").write_text(SCRIPT.read_text())
    home = tmp_path / ".venv" / "py{}.{}".format(*sys.version_info[:2])
    (home / "hatch" / "bin").mkdir(parents=True)
    hatch = home / "hatch" / "bin" / "hatch"
    hatch.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        "keep = {k: v for k, v in os.environ.items() if k.startswith(('HATCH', 'PYTHONP', 'UV'))}\n"
        "print(json.dumps([sys.argv[1:], keep]), flush=True)\n"
        "if 'sleep' in sys.argv:\n"
        "    try:\n"
        "        time.sleep(30)\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "sys.exit(sys.argv.count('fail') * 7)\n"
    )
    hatch.chmod(0o755)
    probe = "import dev; print(dev.fingerprint(), end='')"
    stamp = subprocess.check_output([sys.executable, "-c", probe], cwd=tmp_path / "tools")
    (home / "ready").write_bytes(stamp)
    return tmp_path


def call(clone, *args, **env):
    command = [sys.executable, "tools/dev.py", *args]
    return subprocess.run(
        command, cwd=clone, env=os.environ | env, capture_output=True, text=True, timeout=60
    )


def handed_over(done):
    return json.loads(done.stdout.splitlines()[-1])


def test_hands_over_to_hatch_with_data_in_the_clone(clone):
    arguments, env = handed_over(call(clone, "test", "-k", "a and {b}", PYTHONPATH="/elsewhere"))
    assert arguments == ["run", "test", "-k", "a and {{b}}"]
    assert env["HATCH_DATA_DIR"].startswith(str(clone / ".venv"))
    assert env["HATCH_PYTHON"] == sys.executable
    assert "PYTHONPATH" not in env


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["demo"], ["demo"]),
        (["run", "python", "-V"], ["python", "-V"]),
        (["isolate", "ejk-ops", "-x"], ["+package=ops", "isolate:test", "-x"]),
        (["isolate", "types"], ["+package=types", "isolate:test"]),
        (["isolate", "-x"], ["isolate:test", "-x"]),
        (["docs", "--serve"], ["docs:build", "--serve"]),
        (["release", "ejk-ops"], ["release", "ejk-ops"]),
    ],
)
def test_arguments_for_hatch(words, expected):
    assert dev.hatch_arguments(words[0], words[1:]) == expected


def test_unknown_package_is_named():
    with pytest.raises(dev.SetupError, match="no package 'triton'; there are: types, ops, "):
        dev.hatch_arguments("isolate", ["triton"])


def test_exit_status_is_passed_on(clone):
    assert call(clone, "test", "fail").returncode == 7


def test_interrupt_ends_quietly(clone):
    command = [sys.executable, "tools/dev.py", "demo", "sleep"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=clone, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    process.stdout.readline()
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def test_usage_is_printed_for_unknown_commands(clone):
    assert "python3 tools/dev.py COMMAND" in call(clone, "help").stdout
    assert call(clone).returncode == 2
    done = call(clone, "tset")
    assert done.returncode == 2
    assert "unknown command 'tset'" in done.stderr
    done = call(clone, "run")
    assert done.returncode == 1
    assert "run needs a hatch script" in done.stderr


def test_every_command_is_a_hatch_script():
    import tomllib

    settings = tomllib.loads((SCRIPT.parent.parent / "pyproject.toml").read_text())
    scripts = settings["tool"]["hatch"]["envs"]["default"]["scripts"]
    assert set(dev.COMMANDS) - {"run", "clean", "isolate", "docs"} <= set(scripts)
    assert "build" in settings["tool"]["hatch"]["envs"]["docs"]["scripts"]
    matrix = settings["tool"]["hatch"]["envs"]["isolate"]["matrix"]
    assert tuple(matrix[0]["package"]) == dev.PACKAGES


def test_old_python_is_told_what_to_do(monkeypatch):
    assert dev.too_old((3, 11, 0)) is None
    monkeypatch.setattr(dev, "works", lambda name: name == "python3.12")
    assert dev.too_old((3, 9, 1)) == (
        "ejkernel needs Python 3.11 or newer, this is 3.9; "
        "python3.12 is installed: use it in place of python3."
    )
    monkeypatch.setattr(dev, "works", lambda name: False)
    assert "install Python 3.11, 3.12 or 3.13" in dev.too_old((3, 10))


def test_old_python_can_still_read_the_script():
    import ast

    ast.parse(SCRIPT.read_text(), feature_version=(3, 7))


class Recorder:
    """Stands for ``dev.run_command``: notes commands and answers with the status a test chooses."""

    def __init__(self, *failing):
        self.failing = failing
        self.commands = []

    def __call__(self, command, env, quiet=False):
        self.commands.append(command)
        return int(any(all(word in command for word in words) for words in self.failing))


def run_set_up(monkeypatch, recorder, tmp_path, missing=()):
    real = dev.importlib.util.find_spec
    monkeypatch.setattr(
        dev.importlib.util, "find_spec", lambda name: None if name in missing else real(name)
    )
    monkeypatch.setattr(dev, "run_command", recorder)
    dev.make_tool_environment(tmp_path, tmp_path / "hatch/bin/python", {})
    return recorder.commands


def test_plain_set_up(monkeypatch, tmp_path):
    venv, install = run_set_up(monkeypatch, Recorder(), tmp_path)
    assert venv[1:4] == ["-m", "venv", "--clear"]
    assert install[0] == str(tmp_path / "hatch/bin/python")
    assert install[-1] == dev.HATCH


@pytest.mark.parametrize("missing", [("ensurepip",), ()])
def test_without_ensurepip_the_callers_pip_fills_the_environment(monkeypatch, tmp_path, missing):
    target = tmp_path / "hatch"

    class PlainVenvFails(Recorder):
        def __call__(self, command, env, quiet=False):
            super().__call__(command, env, quiet)
            return int(command[-2:] == ["--clear", str(target)])

    commands = run_set_up(monkeypatch, PlainVenvFails(), tmp_path, missing)
    assert any("--without-pip" in command for command in commands)
    caller, filled = sys.executable, str(target / "bin/python")
    assert commands[-1][:5] == [caller, "-m", "pip", "--python", filled]


@pytest.mark.parametrize(
    ("failing", "missing", "message"),
    [
        ([], ("venv",), "has no venv module"),
        ([["pip", "--version"]], ("ensurepip",), "neither ensurepip nor pip"),
        ([["--without-pip"]], ("ensurepip",), "venv failed"),
        ([["install"]], (), "PIP_INDEX_URL"),
    ],
)
def test_set_up_that_cannot_work_says_why(monkeypatch, tmp_path, failing, missing, message):
    with pytest.raises(dev.SetupError, match=message):
        run_set_up(monkeypatch, Recorder(*failing), tmp_path, missing)


def test_full_disk_is_told_before_the_download(monkeypatch, tmp_path):
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    monkeypatch.setattr(dev.shutil, "disk_usage", lambda path: SimpleNamespace(free=5e8))
    with pytest.raises(dev.SetupError, match=r"0\.5 GB free"):
        dev.prepare(tmp_path / ".venv" / "py", tmp_path, tmp_path, {})


def test_an_environment_that_cannot_be_built_is_tried_again(monkeypatch, tmp_path):
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    home = tmp_path / ".venv" / "py"
    recorder = Recorder(["env", "create"])
    monkeypatch.setattr(dev, "run_command", recorder)
    for _ in range(2):
        with pytest.raises(dev.SetupError, match="could not be built"):
            dev.prepare(home, home / "hatch/bin/python", home / "hatch/bin/hatch", {})
    assert sum("create" in command for command in recorder.commands) == 2
    assert sum("install" in command for command in recorder.commands) == 1
    recorder.failing = ()
    for _ in range(2):
        dev.prepare(home, home / "hatch/bin/python", home / "hatch/bin/hatch", {})
    assert sum("create" in command for command in recorder.commands) == 3


def test_pip_mirrors_are_used_by_uv_too(monkeypatch):
    listing = (
        "global.index-url='https://mirror/simple'\n"
        ":env:.extra-index-url='https://a/simple https://b/simple'\n"
        "global.find-links='/wheels'\n"
        "global.timeout='60'\n"
        "global.cert='/etc/ca.pem'\n"
    )
    done = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(dev.subprocess, "run", lambda *args, **kwargs: done)
    assert dev.index_settings({}) == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }


def test_packages_that_exclude_each_other_are_named_before_the_resolver_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    home = tmp_path / ".venv" / "py"
    recorder = Recorder(["tools/release.py", "--ranges"])
    monkeypatch.setattr(dev, "run_command", recorder)
    with pytest.raises(dev.SetupError, match="exclude each other"):
        dev.prepare(home, home / "hatch/bin/python", home / "hatch/bin/hatch", {})
    assert not any("create" in command for command in recorder.commands)
