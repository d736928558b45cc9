"""Compiled code on disk: shared by processes, renewed when the source changes, never trusted."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import compiled
from ejkernel.kernels.triton.compiled import (
    Source,
    cache_key,
    clear_memory_cache,
    compile_kernel,
)
from ejkernel.kernels.triton.targets import cuda_target

HOPPER = cuda_target(90)
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def twice(x):
    return x * 2

@triton.jit
def double(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, twice(tl.load(x + i)))
"""
PROCESS = """
import hashlib, sys, time
sys.path.insert(0, sys.argv[1])
import double_kernel
from ejkernel.kernels.triton import compiled
from ejkernel.kernels.triton.targets import cuda_target

made, compile_once = [], compiled._compile
compiled._compile = lambda *args: (made.append(1), time.sleep(0.2), compile_once(*args))[2]
source = compiled.Source(
    double_kernel.double, (("x", "*fp32"), ("BLOCK", "constexpr")), (("BLOCK", 128),), ("x",),
    (("num_stages", 1), ("num_warps", 4)),
)
code = compiled.compile_kernel(source, cuda_target(90))
print(len(made), hashlib.sha256(repr(code).encode()).hexdigest())
"""


def load(folder: Path, text: str = KERNEL):
    """The kernel of a module written into ``folder``."""
    folder.mkdir(exist_ok=True)
    path = folder / "double_kernel.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("double_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def source_of(kernel) -> Source:
    signature = (("x", "*fp32"), ("BLOCK", "constexpr"))
    options = (("num_stages", 1), ("num_warps", 4))
    return Source(kernel, signature, (("BLOCK", 128),), ("x",), options)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    clear_memory_cache()
    yield folder
    clear_memory_cache()


@pytest.fixture
def compilations(monkeypatch):
    made = []
    once = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda *a: (made.append(1), once(*a))[1])
    return made


def test_processes_share_the_directory(cache, tmp_path, compilations) -> None:
    """Two at once on an empty directory leave one file; a later one compiles nothing."""
    kernel = load(tmp_path / "kernels")
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "kernels")]
    env = os.environ | {"EJKERNEL_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}

    def start():
        return subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def answer(process):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out.split()

    first = [answer(p) for p in [start() for _ in range(2)]]
    files = [p for p in cache.rglob("*") if p.is_file()]
    assert len(files) == 1 and files[0].suffix == ".json"
    assert sum(int(count) for count, _ in first) >= 1
    later = repr(compile_kernel(source_of(kernel), HOPPER))
    assert {digest for _, digest in first} == {hashlib.sha256(later.encode()).hexdigest()}
    assert not compilations


def test_memory_then_disk_then_compiler(cache, tmp_path, compilations) -> None:
    source = source_of(load(tmp_path / "kernels"))
    code = compile_kernel(source, HOPPER)
    assert compile_kernel(source, HOPPER) is code
    clear_memory_cache()
    assert compile_kernel(source, HOPPER) == code
    assert len(compilations) == 1
    assert code.name == "double" and ".target sm_90a" in code.text


def test_the_memory_holds_a_bounded_number_of_codes(
    cache, tmp_path, compilations, monkeypatch
) -> None:
    source = source_of(load(tmp_path / "kernels"))
    monkeypatch.setattr(compiled, "CODES_LIMIT", 0)
    code = compile_kernel(source, HOPPER)
    assert compile_kernel(source, HOPPER) == code and not compiled._memory
    assert len(compilations) == 1


HUGE = 4 * 2**40


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"name": "double"}', "\0", HUGE], ids=repr)
def test_an_unreadable_entry_is_a_miss(cache, tmp_path, compilations, damage) -> None:
    source = source_of(load(tmp_path / "kernels"))
    code = compile_kernel(source, HOPPER)
    (path,) = cache.rglob("*.json")
    if damage == HUGE:
        os.truncate(path, HUGE)  # sparse: takes no space on the disk
    else:
        path.write_text(damage)
    clear_memory_cache()
    assert compile_kernel(source, HOPPER) == code
    assert len(compilations) == 2
    assert json.loads(path.read_text())["name"] == "double"


def test_a_directory_that_cannot_be_written_costs_only_time(
    tmp_path, monkeypatch, compilations
) -> None:
    source = source_of(load(tmp_path / "kernels"))
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(blocked))
    assert compile_kernel(source, HOPPER).name == "double"

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "full"))
    monkeypatch.setattr(os, "replace", full)
    clear_memory_cache()
    assert compile_kernel(source, HOPPER).name == "double"
    assert [p for p in (tmp_path / "full").rglob("*") if p.is_file()] == []
    assert len(compilations) == 2


def test_a_change_in_a_called_function_is_a_change(tmp_path) -> None:
    keys = {
        cache_key(source_of(load(tmp_path / name, text)), HOPPER)
        for name, text in {
            "same": KERNEL,
            "again": KERNEL,
            "called": KERNEL.replace("x * 2", "x * 3"),
            "own": KERNEL.replace("twice(tl.load(x + i))", "tl.load(x + i)"),
        }.items()
    }
    assert len(keys) == 3


def test_versions_of_triton_do_not_share(tmp_path, monkeypatch) -> None:
    import triton

    source = source_of(load(tmp_path / "kernels"))
    key = cache_key(source, HOPPER)
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert cache_key(source, HOPPER) != key
    # the limit is a property of the device: checked at every use, not compiled in
    assert cache_key(source, replace(HOPPER, shared_limit=1)) == cache_key(source, HOPPER)


def test_default_directory(monkeypatch) -> None:
    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    assert compiled.cache_directory() == Path.home() / ".cache/ejkernel/triton"
