"""Files that somebody else wrote, through the commands that read them: nothing in them is obeyed.

Sound files of every kind are changed in one place or torn, with fixed seeds, and given to every
command that reads such a file.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import subprocess
import unicodedata
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ejkernel.modules import FlashAttentionConfig, MeanPoolingConfig
from ejkernel.modules.cli import main
from ejkernel.modules.cli.output import printable
from ejkernel.modules.operations.mean_pooling import MeanPooling
from ejkernel.ops import PersistentCache, save_invocations
from ejkernel.ops.core.invocation import Invocation, call_invocation

ESCAPE = "\x1b[2J\x1b]0;mine\x07\u202e\x9b31m\r"
MADE: list[str] = []


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path, monkeypatch):
    from ejkernel.ops.execution import executor

    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(executor, "_default", None)
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *a, **k: MADE.append("Popen"))
    MADE.clear()
    yield
    assert MADE == []


def recorded() -> Invocation:
    x = jax.ShapeDtypeStruct((2, 64, 16), jnp.float32)
    inv = call_invocation(MeanPooling.shared(), (), {"x": x}).bound
    return inv


KEY = "mean_pooling.v1@cpu:cpu:2cores#" + "0123456789abcdef" * 2
ROW = {
    "case": "c", "mode": "fwd", "contender": "ejkernel", "ms": 0.5, "spread_ms": 0.1,
    "tflops": 1.0, "gbps": 2.0, "percent_of_limit": 50.0, "speed_over": {"jax-xla": 1.5},
    "temp_mb": None, "note": "", "bound": "memory", "clock": "host", "tier": "heuristics",
    "implementation": "mean_pooling/xla/any", "config": "token_tile=16",
}  # fmt: skip
TILES = ((16, 32, 1.0), (32, 32, 2.0), (32, 64, 1.5))
CALL = {
    "operation": "mean_pooling", "shape": "s", "key": KEY, "pass": "fwd", "heuristic_ms": 2.0,
    "best_ms": 1.0, "heuristic_over_best": 2.0, "spread": 0.1, "seconds": 1.0, "candidates": 3,
    "timed": 3, "interrupted": False, "config": {"token_tile": 16},
    "trials": [
        {"config": {"a_tile": a, "b_tile": b}, "ms": t, "fwd_ms": t, "bwd_ms": None, "error": None}
        for a, b, t in TILES
    ],
}  # fmt: skip
HEAD = {"date": "2026-01-01", "time": "2026-01-01T00:00:00", "device": "cpu", "versions": {}}


def sound_files(folder: Path) -> dict[str, object]:
    """The content of one sound file of each kind."""
    save_invocations(folder / "calls.json", [recorded()])
    cache = PersistentCache(folder / "c.json")
    measured = {"ms": 1.0, "heuristic_ms": 2.0, "spread": 0.01, "date": "2026-01-01"}
    metadata = dict(recorded().payload)
    cache.put(KEY, MeanPoolingConfig(token_tile=16), metadata=metadata, measured=measured)
    flash = KEY.replace("mean_pooling", "flash_attention")
    cache.put(flash, FlashAttentionConfig(fwd_params={"q_blocksize": 64}), measured=measured)
    limits = {"flops": {"float32": 1e11}, "bytes_per_s": 1e10}
    return {
        "calls": json.loads((folder / "calls.json").read_text()),
        "cache": json.loads((folder / "c.json").read_text()),
        "bench": {"kind": "bench", "op": "mean_pooling", **HEAD, "limits": limits, "rows": [
            ROW, {**ROW, "contender": "jax-xla"}]},
        "tune": {"kind": "tune", "op": "mean_pooling", **HEAD, "trials": [CALL]},
    }  # fmt: skip


VALUES = (
    None, True, 0, -1, 1e999, 10**400, "", "x" * 300, ESCAPE, "\ud800", [], {}, [[]],
    {"data": ["subprocess:Popen", {"args": {"list": ["true"]}}]}, "subprocess:Popen", [1, "a"],
    {"a": {"b": [1]}},
)  # fmt: skip


def places(content: object, path: tuple = ()) -> list[tuple]:
    found = [path]
    items = content.items() if isinstance(content, dict) else (
        enumerate(content) if isinstance(content, list) else ())  # fmt: skip
    for name, inner in items:
        found += places(inner, (*path, name))
    return found


def changed(content: object, chance: random.Random) -> str:
    """The text of a file with one thing wrong."""
    content = copy.deepcopy(content)
    *way, last = chance.choice([p for p in places(content) if p])
    holder = content
    for name in way:
        holder = holder[name]
    how = chance.random()
    if how < 0.6:
        holder[last] = copy.deepcopy(chance.choice(VALUES))
    elif how < 0.75:
        del holder[last]
    elif how < 0.9 and isinstance(holder, dict):
        holder[chance.choice((ESCAPE, "new", ""))] = holder.pop(last)
    else:
        text = json.dumps(content)
        return text[: chance.randrange(len(text))]
    return json.dumps(content)


def run(*words: object) -> tuple[int | str, str]:
    """Exit status of ``ejk`` (or the traceback it would end in) and all it says."""
    from ejkernel.ops.errors import reset_warnings
    from ejkernel.ops.execution import executor

    executor._default = None
    reset_warnings()
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            status = main([str(w) for w in words])
        except Exception as error:
            status = f"{type(error).__name__}: {error} at {error.__traceback__}"
    return status, told.getvalue()


def obeyed(text: str) -> str:
    """What a terminal would obey in ``text``."""
    return "".join(c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n")


READERS = {
    "calls": [("tune", "--recorded", "FILE")],
    "cache": [
        ("cache", "ls"), ("cache", "show"), ("cache", "show", "--json"),
        ("cache", "export", "OUT"), ("cache", "import", "FILE", "--replace"),
        ("report", "--no-doctor", "--out", "PAGE"),
    ],
    "bench": [("report", "FILE", "--no-doctor", "--out", "PAGE")],
    "tune": [("report", "FILE", "--no-doctor", "--out", "PAGE")],
}  # fmt: skip


@pytest.mark.usefixtures("report_libraries")
@pytest.mark.parametrize("kind", READERS)
def test_changed_files_are_survived(tmp_path, kind):
    content = sound_files(tmp_path)[kind]
    chance = random.Random(f"{kind} 1")
    wrong = []
    for i in range(25):
        text = changed(content, chance)
        home = tmp_path / "cache" / "configs" / "cpu-cpu-2cores" / "mean_pooling.json"
        home.parent.mkdir(parents=True, exist_ok=True)
        file = home if kind == "cache" else tmp_path / "file.json"
        for words in READERS[kind]:
            file.write_text(text)
            given = {"FILE": file, "OUT": tmp_path / "out.json", "PAGE": tmp_path / "page.html"}
            status, told = run(*(given.get(w, w) for w in words))
            if status not in (0, 1, 2) or obeyed(told) or "Traceback" in told:
                wrong.append((i, words, status, obeyed(told), text[:3000]))
    assert not wrong, f"{len(wrong)} of {25 * len(READERS[kind])}: {wrong[0]}"


@pytest.mark.usefixtures("report_libraries")
@pytest.mark.parametrize("kind", ["bench", "tune"])
def test_the_rest_of_a_record_is_shown(tmp_path, kind):
    content = sound_files(tmp_path)[kind]
    part = "rows" if kind == "bench" else "trials"
    name = "case" if kind == "bench" else "shape"
    broken = [
        {**content[part][0], **{name: "a wrong one", change: []}} for change in ("ms", "config")
    ]
    content[part] += [7, *broken] if kind == "bench" else [7, {**broken[1]}]
    file, page = tmp_path / "r.json", tmp_path / "page.html"
    file.write_text(json.dumps(content))
    status, told = run("report", file, "--no-doctor", "--out", page)
    assert status == 0 and "mean_pooling" in page.read_text()
    assert f"{file}: left out: 1 of" in told and "it is no object" in told
    assert "a wrong one" not in page.read_text()


def test_the_rest_of_the_recorded_calls_is_tuned(tmp_path, monkeypatch):
    configs = [MeanPoolingConfig(platform="xla", token_tile=t) for t in (16, 32)]
    monkeypatch.setattr(MeanPooling, "config_space", lambda self, inv: configs)
    file = tmp_path / "calls.json"
    save_invocations(file, [recorded()])
    content = json.loads(file.read_text())
    (sound,) = content["calls"]
    no_array = {**sound, "kwargs": {}}
    foreign = {**sound, "kwargs": {"x": {"data": ["subprocess:Popen", {}]}}}
    content["calls"] = [foreign, no_array, 3, sound]
    file.write_text(json.dumps(content))
    status, told = run("tune", "--recorded", file, "--iters", "1", "--plain")
    assert status == 1 and "'subprocess:Popen' is not known" in told
    assert "is missing the argument 'x'" in told and "of 1 heuristic configs" in told
    assert "3 of 4 recorded calls left out" in told
    content["calls"] = [sound, foreign]
    file.write_text(json.dumps(content))
    status, told = run("tune", "--recorded", file, "--json")
    assert status == 1 and '"left_out": 1' in told and "tuned already" in told
    content["calls"] = []
    file.write_text(json.dumps(content))
    assert run("tune", "--recorded", file) == (1, f"ejk: {file}: holds no recorded calls\n")


@pytest.mark.usefixtures("report_libraries")
def test_names_in_files_are_not_obeyed_by_the_terminal(tmp_path):
    home = tmp_path / "cache" / "configs" / "d"
    home.mkdir(parents=True)
    key = KEY.replace("mean_pooling", f"mean{ESCAPE}").replace("2cores", ESCAPE)
    entry = {"class": ESCAPE, "config": {ESCAPE: ESCAPE}, "measured": {"ms": ESCAPE}}
    entry["facts"] = {"arguments": {ESCAPE: {"shape": [ESCAPE], "dtype": ESCAPE}}}
    (home / "k.json").write_text(json.dumps({"schema": 1, "entries": {key: entry}}))
    (home / f"a{ESCAPE}.json").write_text("{")
    for words in READERS["cache"]:
        given = {"FILE": home / "k.json", "OUT": tmp_path / "o.json", "PAGE": tmp_path / "p.html"}
        status, told = run(*(given.get(w, w) for w in words))
        refused = "import" in words  # of a kernel that nothing here declares
        assert status == int(refused) and obeyed(told) == "", words
    assert "\\x1b[2J" in run("cache", "show")[1]
    assert "\x1b" not in (tmp_path / "p.html").read_text()


def test_unprintable_characters_are_escaped():
    assert printable("plain é 漢 ✔\nnext") == "plain é 漢 ✔\nnext"
    assert printable("\x1b[0m\ud800\u202e\t") == "\\x1b[0m\\ud800\\u202e\\t"


def test_rich_output_is_clean_too(capsys, monkeypatch):
    pytest.importorskip("rich")
    from ejkernel.modules.cli.rich_output import RichOutput

    monkeypatch.setenv("NO_COLOR", "1")
    out = RichOutput()
    text = f"[red]{ESCAPE}"
    out.title(text)
    out.text(text)
    out.fields([(text, text)])
    out.table((text,), [(text,)])
    out.checks([("warn", text, text, text)])
    out.note(text)
    out.error(text)
    told = capsys.readouterr()
    assert obeyed(told.out) == obeyed(told.err) == ""
    assert told.out.count("[red]") == 8 and told.err.count("[red]") == 2
