import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from ejkernel.ops import ConfigError, EjkernelWarning, FwdParams, OpConfig, PersistentCache, env
from ejkernel.ops.config import store
from ejkernel.ops.config.failures import FailureCache
from ejkernel.ops.params import params_field, tile_field
from ejkernel.ops.utils.files import replace_text, write_output

SRC = Path(store.__file__).parents[3]


@dataclass(frozen=True)
class Config(OpConfig):
    fwd_params: FwdParams | None = params_field(FwdParams)
    tile: int | None = tile_field()


@dataclass(frozen=True)
class Plain:
    block: int = 1
    shape: tuple[int, ...] = (1, 2)


def key(i=0, kernel="flash_attention", device="cpu:cpu:2cores"):
    return f"{kernel}.v1@{device}#{i:032x}"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "configs"


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*.json*"))


def flash_file(folder):
    return folder / "cpu-cpu-2cores" / "flash_attention.json"


def test_from_results(folder):
    results = [SimpleNamespace(key=key(), best=Plain(3)), SimpleNamespace(key=key(1), best=None)]
    assert PersistentCache.from_results(results, folder).keys() == [key()]
    assert PersistentCache(folder).get(key()) == Plain(3)


def test_nothing_is_created_before_the_first_put(folder):
    cache = PersistentCache(folder)
    assert cache.get(key()) is None and cache.get(key(), 3) == 3 and key() not in cache
    assert len(cache) == 0 and cache.keys() == [] and not folder.exists()
    cache.put(key(), Config(tile=64))
    assert key() in cache and len(cache) == 1 and cache.keys() == [key()]


def test_values_come_back_as_the_class_they_were(folder):
    configs = [
        Config("triton", "gpu", FwdParams(q_blocksize=64), 32),
        Plain(3, (4, 5)),
        FwdParams(num_warps=4),
        {"a": [1, 2.5, None]},
        7,
    ]
    for i, cfg in enumerate(configs):
        PersistentCache(folder).put(key(i), cfg)
    assert [PersistentCache(folder).get(key(i)) for i in range(len(configs))] == configs
    assert PersistentCache(folder).get(key(1), cls=Plain) == Plain(3, (4, 5))


def test_one_file_per_device_and_kernel_and_misc_for_the_rest(folder):
    cache = PersistentCache(str(folder))
    cache.put(key(), Plain())
    cache.put(key(1), Plain())
    cache.put(key(device="gpu:nvidia-h200:9.0"), Plain())
    cache.put(key(kernel="../evil name"), Plain())
    cache.put("my own key", Plain())
    cache.put(("tuple", 1), Plain(2))
    assert files(folder) == [
        "cpu-cpu-2cores/evil-name.json",
        "cpu-cpu-2cores/flash_attention.json",
        "gpu-nvidia-h200-9.0/flash_attention.json",
        "misc.json",
    ]
    assert PersistentCache(folder).get(("tuple", 1)) == Plain(2)
    assert len(PersistentCache(folder)) == 6
    content = json.loads(flash_file(folder).read_text())
    assert (content["schema"], content["kernel"]) == (1, "flash_attention")
    assert content["device"] == "cpu:cpu:2cores" and len(content["entries"]) == 2


def test_one_json_file(tmp_path):
    cache = PersistentCache(tmp_path / "sub" / "all.json")
    cache.put(key(), Plain())
    cache.put("mine", Plain(2))
    assert files(tmp_path) == ["sub/all.json"]
    again = PersistentCache(tmp_path / "sub" / "all.json")
    assert sorted(again.keys()) == sorted([key(), "mine"]) and again.get("mine") == Plain(2)


def test_default_path_follows_the_variable(monkeypatch, tmp_path):
    cache = PersistentCache()
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "a"))
    cache.put("k", Plain(1))
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "b"))
    assert cache.get("k") is None
    cache.put("k", Plain(2))
    assert files(tmp_path) == ["a/configs/misc.json", "b/configs/misc.json"]


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    PersistentCache("~/cache").put("k", Plain())
    assert files(tmp_path) == ["cache/misc.json"]


def test_clear_and_replace_and_facts(folder):
    cache = PersistentCache(folder)
    cache.put(key(), Plain(1), metadata={"shape": [1, 2]})
    assert PersistentCache(folder).metadata(key()) == {"shape": [1, 2]}
    cache.put(key(), Plain(2))
    assert PersistentCache(folder).get(key()) == Plain(2)
    assert cache.metadata(key()) is None
    versions = {cache.version}
    cache.clear()
    versions.add(cache.version)
    assert len(versions) == 2 and len(cache) == len(PersistentCache(folder)) == 0


def test_another_writer_is_seen_at_once(folder):
    one, two = PersistentCache(folder), PersistentCache(folder)
    for i in range(20):
        one.put(key(), Plain(i))
        assert two.get(key()) == Plain(i)
        two.put(key(), Plain(-i))
        assert one.get(key()) == Plain(-i)


def test_unknown_or_illegal_entries_are_misses(folder):
    cache = PersistentCache(folder)
    for i in range(4):
        cache.put(key(i), Config(tile=64))
    path = flash_file(folder)
    content = json.loads(path.read_text())
    entries = content["entries"]
    entries[key(0)]["class"] = "no.such.module:Config"
    entries[key(1)]["config"]["tile"] = 33
    entries[key(2)]["config"]["unknown"] = 1
    path.write_text(json.dumps(content))
    again = PersistentCache(folder)
    assert [again.get(key(i)) for i in range(4)] == [None, None, None, Config(tile=64)]
    assert again.get(key(0), cls=Config) == Config(tile=64)
    assert key(0) not in again
    with pytest.raises(ConfigError):
        Config.from_dict(entries[key(1)]["config"])


def test_local_classes_come_back_in_the_process_that_put_them(folder):
    @dataclass(frozen=True)
    class Local:
        a: int = 1

    cache = PersistentCache(folder)
    cache.put(key(), Local(5))
    assert cache.get(key()) == PersistentCache(folder).get(key()) == Local(5)


def test_what_json_cannot_hold_stays_in_memory_with_one_warning(folder):
    cache = PersistentCache(folder)
    thing, pair = object(), {"a": (1, 2)}
    with pytest.warns(EjkernelWarning, match="memory only.*cannot be written"):
        cache.put("thing", thing)
    with pytest.warns(EjkernelWarning, match="memory only.*would read back as"):
        cache.put("pair", pair)
    assert cache.get("thing") is thing and cache.get("pair") == pair
    assert not folder.exists() and sorted(cache.keys()) == ["pair", "thing"]


# Trouble on disk


@pytest.mark.parametrize(
    "damage", ["", "{", '{"schema": 1}', '{"schema": 1, "entries": {"k": 3}}', b"\xff\xfe{", "\0\0"]
)
def test_a_corrupt_file_is_moved_aside_with_one_warning(folder, damage):
    PersistentCache(folder).put(key(), Plain())
    path = flash_file(folder)
    raw = damage if isinstance(damage, bytes) else damage.encode()
    path.write_bytes(raw)
    cache = PersistentCache(folder)
    with pytest.warns(EjkernelWarning, match="corrupt") as caught:
        assert cache.get(key()) is None
        cache.put(key(1), Plain(2))
        assert cache.get(key(1)) == Plain(2)
    assert len(caught) == 1
    (aside,) = path.parent.glob("*.corrupt-*")
    assert aside.name.startswith("flash_attention.json.corrupt-")
    assert aside.read_bytes() == raw
    assert PersistentCache(folder).keys() == [key(1)]


def test_put_on_a_corrupt_file_moves_it_aside_too(folder):
    PersistentCache(folder).put(key(), Plain())
    flash_file(folder).write_text("{ torn")
    with pytest.warns(EjkernelWarning, match="corrupt"):
        PersistentCache(folder).put(key(1), Plain(2))
    assert PersistentCache(folder).keys() == [key(1)]


@pytest.mark.parametrize("other", ['{"schema": 2, "entries": {}}', '{"mine": 1}', "[1, 2]"])
def test_a_file_of_another_schema_is_left_alone(folder, other):
    path = flash_file(folder)
    path.parent.mkdir(parents=True)
    path.write_text(other)
    cache = PersistentCache(folder)
    newer = "2" in other and "schema" in other
    told = pytest.warns(EjkernelWarning, match="newer version") if newer else nullcontext()
    with told:
        assert cache.get(key()) is None
    cache.put(key(), Plain(3))
    cache.put(key(1), Plain(4))
    assert path.read_text() == other
    assert files(folder) == [
        "cpu-cpu-2cores/flash_attention.json",
        "cpu-cpu-2cores/flash_attention.schema1.json",
    ]
    again = PersistentCache(folder)
    assert again.get(key()) == Plain(3) and sorted(again.keys()) == [key(), key(1)]
    again.clear()
    assert path.read_text() == other and len(PersistentCache(folder)) == 0


def memory_only(cache, match):
    """One warning, no error, and the cache goes on in memory."""
    with pytest.warns(EjkernelWarning, match=match) as caught:
        cache.put(key(), Plain(1))
        cache.put(key(1), Plain(2))
    assert len(caught) == 1
    assert cache.get(key()) == Plain(1) and cache.get(key(1)) == Plain(2) and len(cache) == 2
    assert key() in cache


def test_full_disk_at_rename(folder, monkeypatch):
    PersistentCache(folder).put(key(9), Plain(9))
    before = flash_file(folder).read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache = PersistentCache(folder)
    with pytest.warns(EjkernelWarning, match="No space left") as caught:
        cache.put(key(), Plain(1))
        cache.put(key(1), Plain(2))
    assert len(caught) == 1 and cache.get(key(1)) == Plain(2) and cache.get(key(9)) == Plain(9)
    assert flash_file(folder).read_bytes() == before
    assert not list(folder.rglob("*.tmp"))


def test_full_disk_while_writing(folder, monkeypatch):
    real = os.fdopen

    def full(handle, mode="r", **kwargs):
        if "w" in mode:
            with open("/dev/full", "wb") as device:
                os.dup2(device.fileno(), handle)
        return real(handle, mode, **kwargs)

    monkeypatch.setattr(os, "fdopen", full)
    memory_only(PersistentCache(folder), "No space left")
    assert not list(folder.rglob("*.tmp")) and not files(folder)


def test_read_only_folder(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o500)
    if os.geteuid() == 0:  # permissions do not bind root

        def refuse(self, *args, **kwargs):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))

        monkeypatch.setattr(Path, "mkdir", refuse)
    try:
        memory_only(PersistentCache(folder), "Permission denied")
    finally:
        folder.chmod(0o700)
    assert not files(folder)


def test_a_folder_that_cannot_be_read_is_warned_about_once(folder, monkeypatch):
    PersistentCache(folder).put(key(), Plain(3))

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "open", refuse)
    cache = PersistentCache(folder)
    with pytest.warns(EjkernelWarning, match="memory only.*Permission denied") as told:
        assert cache.get(key()) is None and cache.get(key(kernel="mean_pooling")) is None
        assert FailureCache(cache).reason(key(), Plain(3)) is None
        cache.put(key(), Plain(4))
        assert cache.get(key()) == Plain(4)
    assert len(told) == 1


def test_path_below_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    memory_only(PersistentCache(tmp_path / "file" / "configs"), "cannot be written")


def test_a_lock_that_is_never_released(folder):
    import filelock

    cache = PersistentCache(folder, lock_timeout=0.05)
    path = flash_file(folder)
    path.parent.mkdir(parents=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        memory_only(cache, "lock")
    # and stays in memory: no second wait for every later config
    cache.put(key(2), Plain(3))
    assert cache.get(key(2)) == Plain(3) and not files(folder)


# Several processes. The workers load the caches without JAX, which they do not need.

WORKER = """
import sys, types
from dataclasses import dataclass
package = types.ModuleType("ejkernel.ops")
package.__path__ = [sys.argv[1] + "/ejkernel/ops"]
sys.modules["ejkernel.ops"] = package
from ejkernel.ops.config import store
from ejkernel.ops.config.persistent import PersistentCache
assert "jax" not in sys.modules
"""

WRITER = (
    WORKER
    + """
folder, worker = sys.argv[2], int(sys.argv[3])
cache = PersistentCache(folder, lock_timeout=120)
for i in range(200):
    kernel = "flash_attention" if i % 2 else f"kernel_{i % 8}"
    cache.put(f"{kernel}.v1@cpu:cpu:2cores#{worker * 200 + i:032x}", {"block": worker * 200 + i})
"""
)

ENDLESS = (
    WORKER
    + """
cache = PersistentCache(sys.argv[2], lock_timeout=120)
i = 0
while True:
    cache.put(f"flash_attention.v1@cpu:cpu:2cores#{i % 500:032x}", {"block": i})
    if i == 0:
        print("started", flush=True)
    i += 1
"""
)


def start(script, *args):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(SRC), *map(str, args)], stdout=subprocess.PIPE, text=True
    )


def test_four_processes_writing_lose_nothing(folder):
    workers = [start(WRITER, folder, n) for n in range(4)]
    assert [w.wait(timeout=180) for w in workers] == [0] * 4
    cache = PersistentCache(folder)
    found = {k: cache.get(k)["block"] for k in cache.keys()}
    assert sorted(found.values()) == list(range(800))
    assert all(int(k.rpartition("#")[2], 16) == block for k, block in found.items())
    assert not list(folder.rglob("*.tmp")) and not list(folder.rglob("*corrupt*"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_writer_leaves_the_file_whole(folder):
    for delay in (0.0, 0.013, 0.029):
        writer = start(ENDLESS, folder)
        assert writer.stdout is not None and writer.stdout.readline() == "started\n"
        time.sleep(0.1 + delay)
        writer.kill()
        writer.wait(timeout=60)
        _, entries = store.parse_file(flash_file(folder).read_text())
        assert entries and len(PersistentCache(folder)) == len(entries)
    # the lock of a dead process holds nobody up, and what it left half-written is removed
    leftover = flash_file(folder).with_name(".flash_attention.12345.tmp")
    leftover.write_text("{ torn")
    PersistentCache(folder, lock_timeout=5).put(key(7777), {"block": -1})
    assert PersistentCache(folder).get(key(7777)) == {"block": -1} and not leftover.exists()


def test_a_writer_killed_between_writing_and_renaming(folder):
    PersistentCache(folder).put(key(), Plain(1))
    before = flash_file(folder).read_bytes()
    script = WORKER + (
        "import os, signal\n"
        "os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"PersistentCache(sys.argv[2]).put({key(1)!r}, {{'block': 2}})\n"
    )
    assert start(script, folder).wait(timeout=60) == -signal.SIGKILL
    assert flash_file(folder).read_bytes() == before
    assert PersistentCache(folder).get(key()) == Plain(1)
    PersistentCache(folder).put(key(2), Plain(2))
    assert len(PersistentCache(folder)) == 2 and not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("write", [replace_text, write_output])
def test_no_link_is_written_through(tmp_path, monkeypatch, write):
    target, victim = tmp_path / "x.json", tmp_path / "victim"
    victim.write_text("untouched")
    names = [f"{os.getpid()}-{threading.get_ident()}", "0011", "2233"]
    for name in names[:2]:
        target.with_name(f".x.{name}.tmp").symlink_to(victim)
    monkeypatch.setattr(secrets, "token_hex", lambda size, left=names[1:]: left.pop(0))
    write(target, "new")
    assert target.read_text() == "new" and not target.is_symlink()
    assert victim.read_text() == "untouched" and len(list(tmp_path.glob(".x.*"))) == 2


def test_a_link_in_place_of_the_lock_is_not_followed(folder):
    victim = folder.parent / "victim"
    victim.write_text("untouched")
    flash_file(folder).parent.mkdir(parents=True)
    flash_file(folder).with_suffix(".lock").symlink_to(victim)
    memory_only(PersistentCache(folder, lock_timeout=0.2), "cannot be written")
    assert victim.read_text() == "untouched"


def test_named_output_keeps_links_and_reaches_pipes(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("old")
    link.symlink_to(target)
    write_output(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    source, sink = os.pipe()
    write_output(f"/proc/self/fd/{sink}", "text")
    assert os.read(source, 10) == b"text"
    os.close(source)
    os.close(sink)


def test_a_kernel_name_too_long_for_a_file_stays_in_memory_alone(folder):
    cache = PersistentCache(folder)
    long, longest = key(kernel="k" * 250), key(kernel="k" * 300)
    with pytest.warns(EjkernelWarning, match="memory only.*name too long") as caught:
        for name in (long, longest, longest, key()):
            cache.put(name, Plain(3))
            assert cache.get(name) == Plain(3)
    assert len(caught) == 1
    again = PersistentCache(folder)
    assert again.get(long) == again.get(key()) == Plain(3) and again.get(longest) is None
    failures = FailureCache(cache)
    failures.remember(longest, Plain(), "it broke")
    failures.remember(key(), Plain(), "it broke")
    assert FailureCache(cache).reason(key(), Plain()) == "it broke"


@pytest.mark.parametrize("home", ["", "relative"])
def test_an_empty_or_relative_home_keeps_nothing(tmp_path, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv(env.CACHE_DIR)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(EjkernelWarning, match="memory only.*no home directory"):
        cache = PersistentCache()
        cache.put(key(), Plain(3))
    assert cache.get(key()) == Plain(3) and not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="HOME or EJKERNEL_CACHE_DIR"):
        env.cache_dir()
    with pytest.raises(OSError, match="no home directory"):
        PersistentCache("~/configs")
    monkeypatch.setenv("HOME", "/")
    assert env.cache_dir() == Path("/.cache/ejkernel")
