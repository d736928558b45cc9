"""``ejk`` with wrong words, unwritable folders and Ctrl-C: one line, or JSON, and a status."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest

from ejkernel.modules import MeanPoolingConfig
from ejkernel.modules.cli import checks, main, shapes
from ejkernel.modules.cli.bench import keep_peers
from ejkernel.modules.cli.interrupt import Interrupts
from ejkernel.modules.cli.output import Output
from ejkernel.ops import PersistentCache
from ejkernel.ops.errors import reset_warnings


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["explain"], "the following arguments are required: OP\n"),
        (["explain", "mean_pooling", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["bench", "mean_pooling", "--rounds", "0"], "--rounds: given 0, expected a number >= 1"),
        (["bench", "mean_pooling", "--target-s", "-1"], "--target-s: given -1, expected seconds"),
        (["tune", "mean_pooling", "--budget", "nan"], "--budget: given nan, expected seconds > 0"),
        (["tune", "mean_pooling", "--iters", "1.5"], "--iters: given 1.5, expected a number >= 1"),
    ],
)
def test_wrong_words_are_json_where_json_is_asked_for(capsys, words, message):
    for asked in ([*words, "--json"], ["--json", *words]):
        with pytest.raises(SystemExit) as stopped:
            main(asked)
        assert stopped.value.code == 2
        told = capsys.readouterr()
        assert message in json.loads(told.out)["error"] + "\n" and message in told.err
    with pytest.raises(SystemExit):
        main(words)
    assert capsys.readouterr().out == ""


def test_how_to_speak_may_come_first(capsys):
    assert main(["--json", "shapes", "mean_pooling"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_peers_that_are_not_there(capsys):
    assert main(["bench", "mean_pooling", "s=16", "--peers", "jax-xl,cudnn", "--json"]) == 2
    assert "did you mean jax-xla" in json.loads(capsys.readouterr().out)["error"]


def test_ours_may_be_named_alone():
    case = SimpleNamespace(contenders={"ejkernel": 0, "jax-xla": 1})
    keep_peers([case], "ejkernel")
    assert list(case.contenders) == ["ejkernel"]


def test_json_has_no_numbers_that_json_cannot_say(capsys):
    Output(json=True).data({"ms": float("nan"), "rows": [(1.0, float("inf"))]})
    assert json.loads(capsys.readouterr().out) == {"ms": None, "rows": [[1.0, None]]}


@pytest.mark.usefixtures("report_libraries")
def test_a_folder_that_is_none(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = [c for c in checks.cache() if c.status == "warn"]
    assert len(found) == 1 and "cannot be written" in found[0].found
    out = tmp_path / "file" / "report.html"
    assert main(["report", "--no-doctor", "--out", str(out), "--json"]) == 2
    assert str(tmp_path / "file") in json.loads(capsys.readouterr().out)["error"]


# ---- what cannot be written --------------------------------------------------------------------

KEY = "mean_pooling.v1@cpu:cpu:2cores#" + "0123456789abcdef" * 2


@contextlib.contextmanager
def full_disk(monkeypatch):
    """Ends every file after 64 bytes: the write that crosses this fails as on a full disk."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a cut .pyc would outlive the test
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("report_libraries")
@pytest.mark.parametrize(
    "words", [["report", "--no-doctor", "--out"], ["cache", "export"]], ids=lambda words: words[0]
)
def test_a_full_disk_is_one_line_and_leaves_no_file(capsys, monkeypatch, tmp_path, words):
    PersistentCache().put(KEY, MeanPoolingConfig(token_tile=16))
    folder = tmp_path / "out"
    folder.mkdir()
    file = folder / "file"
    for old in (None, "old"):
        if old is not None:
            file.write_text(old)
        with full_disk(monkeypatch):
            assert main([*words, str(file), "--json"]) == 2
        told = capsys.readouterr()
        assert json.loads(told.out) == {"error": f"{file}: File too large"}
        assert told.err.splitlines()[-1] == f"ejk: {file}: File too large"
        assert [p.read_text() for p in folder.iterdir()] == ([] if old is None else [old])
    link = folder / "link"
    link.symlink_to(file)
    assert main([*words, str(link)]) == 0
    assert link.is_symlink() and len(file.read_text()) > 64


@pytest.mark.parametrize("before", ["", "other"])
def test_a_full_disk_takes_no_config(capsys, monkeypatch, tmp_path, before):
    """Imported configs are stored, or the import fails; ``clear`` leaves the file as it was."""
    file = tmp_path / "configs.json"
    PersistentCache().put(KEY, MeanPoolingConfig(token_tile=16))
    assert main(["cache", "export", str(file)]) == 0
    assert main(["cache", "clear", "--all"]) == 0
    if before:
        PersistentCache().put(KEY.replace("0", "1"), MeanPoolingConfig(token_tile=32))
    capsys.readouterr()
    with full_disk(monkeypatch):
        reset_warnings()
        assert main(["cache", "import", str(file), "--json"]) == 2
    told = capsys.readouterr()
    message = json.loads(told.out)["error"]
    assert "cannot be written" in message and "File too large" in message
    assert told.err == f"ejk: {message}\n"
    assert KEY not in PersistentCache()
    if before:
        with full_disk(monkeypatch):
            assert main(["cache", "clear", "--all"]) == 2
        error = capsys.readouterr().err
        assert error.endswith(": File too large\n") and error.count("\n") == 1
        assert KEY.replace("0", "1") in PersistentCache()
    assert main(["cache", "import", str(file)]) == 0
    assert KEY in PersistentCache()


@pytest.mark.parametrize("words", [["shapes"], ["shapes", "--json"], ["completion", "bash"]])
def test_full_standard_output_is_one_line(capsys, monkeypatch, words):
    try:
        full = open("/dev/full", "w")
    except OSError:
        pytest.skip("no /dev/full")
    monkeypatch.setattr("sys.stdout", full)
    assert main(words) == 2
    assert capsys.readouterr().err == "ejk: standard output: No space left on device\n"


def test_names_that_the_terminal_cannot_encode(monkeypatch):
    PersistentCache().put(KEY.replace("mean", "möan"), {"tile": 16})
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["cache", "show"]) == 0
    assert rb"m\xf6an_pooling" in written.getvalue()


def test_a_fault_of_ours_is_json_too(capsys, monkeypatch):
    def fails(args, out):
        raise KeyError("missing")

    monkeypatch.setattr(shapes, "run_command", fails)
    with pytest.raises(KeyError):
        main(["shapes", "--json"])
    assert json.loads(capsys.readouterr().out) == {"error": "KeyError: 'missing'"}


@pytest.mark.parametrize("said", ["", "Unable to initialize backend 'cuda'\nand more"])
def test_a_machine_without_the_device_asked_for(capsys, monkeypatch, said):
    def none(*_args, **_options):
        raise (RuntimeError(said) if said else AssertionError)  # of JAX, with and without a plugin

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setattr(jax, "local_devices", none)
    asked = jax.config.jax_platforms or ""
    message = said.split("\n")[0] or f"JAX finds no device (JAX_PLATFORMS={asked})"
    assert main(["doctor", "--no-run", "--json"]) == 1
    checks_made = {c["what"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    assert checks_made["JAX devices"]["found"] == message
    assert main(["explain", "mean_pooling", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": message}


# ---- Ctrl-C ------------------------------------------------------------------------------------


def test_interrupt_in_a_callback_of_the_collector_is_heard_later():
    def callback(phase, info):
        if phase == "start" and not interrupts.seen:
            signal.raise_signal(signal.SIGINT)

    gc.callbacks.append(callback)
    try:
        with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
            gc.collect()  # Python drops what the callback raises
            assert interrupts.seen
            time.sleep(10)
    finally:
        gc.callbacks.remove(callback)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_in_a_finalizer_is_heard_later():
    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        Finalized()
        assert interrupts.seen
        time.sleep(10)


def test_an_error_after_an_interrupt_is_an_interrupt(capsys, monkeypatch):
    from ejkernel.modules.cli import shapes

    def start_of_an_extension(args, out):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("Encountered an error while initializing the extension.") from None

    monkeypatch.setattr(shapes, "run_command", start_of_an_extension)
    assert main(["shapes", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted"}


def test_the_process_ends_with_130():
    code = (
        "import signal, ejkernel.modules.cli.shapes as s\n"
        "from ejkernel.modules.cli import command\n"
        "s.run_command = lambda *a: signal.raise_signal(signal.SIGINT)\n"
        "raise SystemExit(command())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "shapes"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 130 and done.stderr.strip() == "ejk: interrupted"


def test_an_interrupt_while_commands_are_imported_is_a_line():
    code = (
        "import importlib, signal, sys\n"
        "importlib.import_module = lambda *a: signal.raise_signal(signal.SIGINT)\n"
        "from ejkernel.modules.cli import command\n"
        "sys.argv = ['ejk', 'shapes']\n"
        "command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.strip() == "ejk: interrupted"
