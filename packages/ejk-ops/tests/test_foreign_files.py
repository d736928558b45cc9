"""Files that somebody else wrote: nothing in them is imported, called or constructed.

A file may name registered kernels, configs and types. Each reader is given files that name a class
of the standard library, one of an imported module, a module that is not imported, and a function.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops import (
    ConfigCache,
    ConfigSelectorChain,
    EjkernelWarning,
    Executor,
    Invocation,
    Kernel,
    PersistentCache,
    allow_in_files,
    labels_to_configs,
    load_invocations,
    save_invocations,
)
from ejkernel.ops import env as environment
from ejkernel.ops.config.failures import FailureCache
from ejkernel.ops.config.selection import Choice
from ejkernel.ops.config.tables import nearest_configs
from ejkernel.ops.errors import AutotuneError
from ejkernel.ops.execution.multihost import PeerGroup
from ejkernel.ops.utils import allowed, files
from ejkernel.ops.utils.files import MAX_BYTES

MADE: list[object] = []


@dataclass
class Bomb:
    """Of an imported module, a dataclass, harmless to name: but nobody declared it."""

    args: object = None

    def __post_init__(self):
        MADE.append(self)


@dataclass(frozen=True)
class Config:
    tile: int = 1


class Op(Kernel[Config, jax.Array]):
    def run(self, x, option=None, *, cfg):
        return x

    def heuristic_cfg(self, inv):
        return Config()


class Loose(Kernel[object, jax.Array]):
    """Does not say the class of its configs."""

    def run(self, x, *, cfg):
        return x

    def config_space(self, inv):
        return [{"tile": 1}, {"tile": 2}]


X = jnp.ones((2, 3))
FOREIGN = (
    f"{Bomb.__module__}:Bomb",
    "subprocess:Popen",
    "antigravity:nothing",
    "os:system",
    "ejkernel.ops.config.persistent:PersistentCache",
    "ejkernel.kernels.nowhere:thing",
    7,
)
every_name = pytest.mark.parametrize("name", FOREIGN, ids=str)


@pytest.fixture(autouse=True)
def nothing_happens(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *a, **k: MADE.append("Popen"))
    MADE.clear()
    before = set(sys.modules)
    yield
    assert MADE == []
    assert "antigravity" not in set(sys.modules) - before
    assert not (tmp_path / "touched").exists()


def fields(tmp_path):
    command = ["sh", "-c", f"touch {tmp_path / 'touched'}"]
    return {"args": command}


def config_file(path: Path, name: object, key: str, config: object, metadata: object = None):
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"class": name, "config": config, "facts": metadata}
    path.write_text(json.dumps({"schema": 1, "entries": {key: entry}}))


@every_name
def test_the_persistent_cache(tmp_path, name):
    path = tmp_path / "c.json"
    config_file(path, name, "k", fields(tmp_path))
    refused = "not known" if isinstance(name, str) else "corrupt"
    with pytest.warns(EjkernelWarning, match=refused):
        assert PersistentCache(path).get("k") is None
    chain = ConfigSelectorChain(ConfigCache(), PersistentCache(tmp_path), autotune=False)
    inv = Invocation(Loose(), (X,)).bound
    config_file(tmp_path / "misc.json", name, inv.key, fields(tmp_path))
    assert chain.choose(inv, inv.kernel) == {"tile": 1}


@every_name
@pytest.mark.filterwarnings("ignore::ejkernel.ops.EjkernelWarning")
def test_shipped_tables(tmp_path, name):
    inv = Invocation(Loose(), (X,)).bound
    config_file(tmp_path / "t.json", name, "k", fields(tmp_path), dict(inv.payload))
    assert list(nearest_configs([tmp_path / "t.json"], inv.payload, None)) == []
    sound = dict(inv.payload)
    config_file(tmp_path / "u.json", None, "k", {"tile": 2}, sound)
    assert list(nearest_configs([tmp_path / "u.json"], inv.payload, None)) == [({"tile": 2}, 0.0)]


@every_name
@pytest.mark.filterwarnings("ignore::ejkernel.ops.EjkernelWarning")
def test_remembered_failures(tmp_path, name):
    cache = PersistentCache(tmp_path / "configs")
    failures = FailureCache(cache)
    key = "Op.v1@cpu:x#" + "0" * 32
    failures.remember(key, Config(), "it broke")
    (path,) = tmp_path.rglob("failures/*/*.json")
    text = path.read_text().replace(json.dumps(allowed.class_name(Config)), json.dumps(name))
    path.write_text(text.replace('"tile": 1', '"args": "touch"'))
    FailureCache(cache).reason(key, Config())


@every_name
@pytest.mark.parametrize("form", ["kernel", "data", "enum", "node", "dtype"])
def test_recorded_calls(tmp_path, name, form):
    path = tmp_path / "calls.json"
    inv = Invocation(Op(), (X,), {"option": 1})
    assert save_invocations(path, [inv, Invocation(Op(), (X,))]) == 2
    content = json.loads(path.read_text())
    first = content["calls"][0]
    if form == "kernel":
        first["kernel"]["class"] = name
    else:
        listed = {"list": fields(tmp_path)["args"]}
        value = {
            "data": [name, {"args": listed}],
            "enum": [name, "args"],
            "node": [name, None, [listed]],
            "dtype": name,
        }[form]
        first["kwargs"]["option"] = {form: value}
    path.write_text(json.dumps(content))
    with pytest.warns(EjkernelWarning, match="left out") as caught:
        (sound,) = load_invocations(path)
    assert sound.key == Invocation(Op(), (X,)).bound.key
    assert repr(name)[1:-1] in str(caught[0].message)


def test_the_command_of_a_recorded_argument_is_not_run(tmp_path):
    """As it was found: an argument of a recorded call that starts a shell."""
    path = tmp_path / "calls.json"
    save_invocations(path, [Invocation(Op(), (X,), {"option": 1})])
    content = json.loads(path.read_text())
    shell = {"args": {"list": fields(tmp_path)["args"]}}
    content["calls"][0]["kwargs"]["option"] = {"data": ["subprocess:Popen", shell]}
    path.write_text(json.dumps(content))
    with pytest.warns(EjkernelWarning, match="'subprocess:Popen' is not known"):
        assert load_invocations(path) == []


@every_name
def test_labels_in_the_text_of_a_program(name, tmp_path):
    content = quote(json.dumps({"class": name, "config": fields(tmp_path)}), safe="")
    (found,) = labels_to_configs([f"Op.v1#{content}"], executor=Executor()).values()
    assert type(found) in (dict, type(None))


@every_name
def test_messages_of_other_processes(tmp_path, name):
    class Client:
        def blocking_key_value_get(self, key, timeout):
            cfg = {"class": name, "config": fields(tmp_path)}
            return json.dumps({"tier": "persistent", "cfg": cfg})

    inv = Invocation(Loose(), (X,)).bound
    group = PeerGroup(Client(), process_id=1)
    with pytest.raises(AutotuneError, match="cannot be read"):
        group.agree(inv, None, lambda: Choice(None, "heuristics", inv.key))


def test_no_reader_imports_by_a_name_it_has_read():
    """Imports by name in ejkernel.ops: of our own constant, and of what a package registers."""
    root = Path(allowed.__file__).parents[1]
    text = {path.name: path.read_text() for path in root.rglob("*.py")}
    found = [(n, line.strip()) for n, t in text.items() for line in t.splitlines()]
    assert sorted((n, line) for n, line in found if "import_module(" in line) == [
        ("allowed.py", "importlib.import_module(_DECLARES)  # a fixed module"),
        ("implementation.py", "value: Any = importlib.import_module(module)"),
        ("packages.py", "return getattr(import_module(module), name)"),
    ]
    words = ("pickle", "marshal", "__import__", "sys.modules.get")
    where = {w: sorted(n for n, t in text.items() if w in t) for w in words}
    # versions.py reads __version__ of our own list, serialization.py the modules of annotations
    assert where.pop("sys.modules.get") == ["serialization.py", "versions.py"]
    assert not any(where.values())


# What may be named


def test_the_config_of_a_kernel_comes_back_in_a_process_that_put_none(tmp_path):
    path = tmp_path / "c.json"
    config_file(path, allowed.class_name(Config), "k", {"tile": 4})
    assert PersistentCache(path).get("k") == Config(4)

    @dataclass(frozen=True)
    class Given:
        tile: int = 0

    config_file(path, allowed.class_name(Given), "k", {"tile": 5})
    with pytest.warns(EjkernelWarning, match="allow_in_files"):
        assert PersistentCache(path).get("k") is None
    assert PersistentCache(path).get("k", cls=Given) == Given(5)
    Kernel("mine", config_cls=Given)
    assert PersistentCache(path).get("k") == Given(5)


def test_what_is_allowed_comes_back(tmp_path):
    @dataclass(frozen=True)
    class Layout:
        rows: int

    path = tmp_path / "calls.json"
    save_invocations(path, [Invocation(Op(), (X,), {"option": Layout(3)})])
    with pytest.warns(EjkernelWarning, match="Layout' is not known"):
        assert load_invocations(path) == []
    assert allow_in_files(Layout) is Layout
    (inv,) = load_invocations(path)
    assert inv.abstract_kwargs["option"] == Layout(3)
    with pytest.raises(TypeError, match="cls must be a class"):
        allow_in_files("os:system")  # type: ignore[type-var]


# Files that are none


DEEP = '{"schema": 1, "entries": {"k": {"config": ' + "[" * 100_000 + "]" * 100_000 + "}}}"


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        DEEP.replace("[" * 99_900, "").replace("]" * 99_900, ""),
        '{"schema": 1, "entries": {"k": {"config": 1, "class": []}}}',
        '{"schema": 1, "entries": [1]}',
    ],
    ids=["deep", "deepish", "class", "entries"],
)
def test_a_nested_or_wrongly_typed_file_is_set_aside(tmp_path, text):
    path = tmp_path / "misc.json"
    path.write_text(text)
    cache = PersistentCache(tmp_path)
    with pytest.warns(EjkernelWarning, match="corrupt"):
        assert cache.get("k") is None
    cache.put("k", 3)
    assert PersistentCache(tmp_path).get("k") == 3
    assert [p.read_text() for p in tmp_path.glob("*.corrupt-*")] == [text]


@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_what_is_no_file_is_not_opened(tmp_path, kind):
    path = tmp_path / "misc.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    cache = PersistentCache(tmp_path)
    with pytest.warns(EjkernelWarning, match="not a regular file"):
        assert cache.get("k") is None
        cache.put("k", 3)
    assert cache.get("k") == 3 and path.exists()
    other = "Op.v1@cpu:x#" + "0" * 32
    cache.put(other, 4)
    assert PersistentCache(tmp_path).get(other) == 4  # the files of others are sound
    with pytest.raises(OSError, match="not a regular file"):
        load_invocations(path)


def sparse(path: Path, size: int) -> Path:
    """A file of ``size`` bytes that takes no space on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 4 * 2**40])
def test_a_file_too_large_to_read_is_set_aside(tmp_path, size):
    path = sparse(tmp_path / "misc.json", size)
    cache = PersistentCache(tmp_path)
    with pytest.warns(EjkernelWarning, match="larger than 64 MiB.*moved to"):
        assert cache.get("k") is None
    cache.put("k", 3)
    assert PersistentCache(tmp_path).get("k") == 3
    assert [p.stat().st_size for p in tmp_path.glob("*.corrupt-*")] == [size]
    inv = Invocation(Loose(), (X,)).bound
    with pytest.warns(EjkernelWarning, match="shipped config table.*larger than 64 MiB"):
        assert list(nearest_configs([sparse(path, size)], inv.payload, None)) == []
    with pytest.raises(OSError, match="larger than 64 MiB"):
        load_invocations(path)


def test_nothing_is_written_that_would_not_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 2000)
    cache = PersistentCache(tmp_path)
    cache.put("small", 1)
    with pytest.warns(EjkernelWarning, match="memory only.*larger than"):
        cache.put("large", "x" * 2000)
    other = "Op.v1@cpu:x#" + "0" * 32
    cache.put(other, 4)
    again = PersistentCache(tmp_path)
    assert again.get("small") == 1 and again.get(other) == 4 and again.get("large") is None


def test_no_home_directory(tmp_path, monkeypatch):
    import pwd

    def nobody(*_):
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv(environment.CACHE_DIR)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    executor = Executor(ConfigSelectorChain(ConfigCache(), PersistentCache(), autotune=False))
    with pytest.warns(EjkernelWarning, match="memory only.*HOME or EJKERNEL_CACHE_DIR") as caught:
        assert executor(Op(), X).shape == X.shape
        cache = PersistentCache()
        cache.put("k", 3)
        assert cache.get("k") == 3 and cache.keys() == ["k"]
        cache.clear()
        assert len(cache) == 0 and "memory" in repr(cache)
        assert FailureCache(cache).reason("k", Config()) is None
    assert len(caught) == 1
    with pytest.raises(OSError, match="there is no home directory"):
        _ = cache.path


def test_a_kernel_named_like_another_ones_file(tmp_path):
    keys = [f"{kernel}.v1@cpu:x#{'0' * 32}" for kernel in ("x", "x.schema1", "x.schema1.schema1")]
    for i, key in enumerate(keys):
        PersistentCache(tmp_path).put(key, i)
        again = PersistentCache(tmp_path)
        assert [again.get(k) for k in keys[: i + 1]] == list(range(i + 1))
        assert sorted(again.keys()) == sorted(keys[: i + 1])
    # a file that an earlier version gave such a name hides nothing
    (folder,) = (p for p in tmp_path.iterdir() if p.is_dir())
    for path in folder.glob("*.json"):
        path.unlink()
    PersistentCache(tmp_path).put(keys[0], 0)
    config_file(folder / "x.schema1.json", None, keys[1], 1)
    assert PersistentCache(tmp_path).get(keys[0]) == 0
