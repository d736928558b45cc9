"""Kernels that are listed as text, and packages that are found through entry points."""

import sys
import threading
from importlib.metadata import EntryPoint

import pytest

from ejkernel.ops import EjkernelWarning, KernelNotSupported, KernelRegistry
from ejktest.device import H200, on


def add(registry, platform, backend):
    @registry.register("op", platform, backend)
    def op(q, k, bias=None, *, causal=False, cfg=None):
        return platform

    return op


# Lazy registration

MODULE = """
def op(q, k, bias=None, *, causal=False, cfg=None): return "lazy"
def other(q, *, cfg=None): return "other"
def supports(inv): return None if inv == "fine" else "not fine"
def heuristic(inv): return {"q_tile": 64}
"""


@pytest.fixture
def lazy_module(tmp_path, monkeypatch):
    name = f"lazy_kernels_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_a_priority_that_cannot_be_imported_makes_choice_pass_on(registry, lazy_module):
    xla = add(registry, "xla", "any")
    registry.register_lazy(
        "op",
        "xla",
        "cpu",
        50,
        target=f"{lazy_module}:op",
        priority_for="no_such_module_of_kernels:priority_for",
    )
    assert registry.survey("op").usable[0].backend == "cpu"  # of no call: not asked
    assert lazy_module not in sys.modules
    with pytest.warns(EjkernelWarning, match="op/xla/cpu is not used.*no_such_module_of_kernels"):
        assert registry.get("op", inv="call") is xla


def test_lazy_registration_imports_on_use(registry, lazy_module):
    registry.register_lazy(
        "op",
        "xla",
        "any",
        target=f"{lazy_module}:op",
        supports=f"{lazy_module}:supports",
        heuristic=f"{lazy_module}:heuristic",
        version=2,
    )
    (record,) = registry.list_implementations("op")
    assert registry.survey("op").usable == (record,)
    assert lazy_module not in sys.modules and not record.loaded
    assert registry.get("op", inv="fine")(1, 2) == "lazy"
    assert record.loaded and record.version == 2
    assert record.heuristic("fine") == {"q_tile": 64}
    with pytest.raises(KernelNotSupported, match="not fine"):
        registry.get("op", inv="call")


def test_lazy_signature_is_checked_on_first_use(registry, lazy_module):
    add(registry, "xla", "any")
    registry.register_lazy("op", "xla", "cpu", 5, target=f"{lazy_module}:other")
    for _ in range(2):
        with pytest.raises(ValueError, match="op/xla/cpu differs from op/xla/any"):
            registry.get("op")
    assert any("lacks parameter 'k'" in line for line in registry.validate_signatures())


def test_a_broken_lazy_module_is_passed_over_with_one_warning(registry, lazy_module):
    xla = add(registry, "xla", "any")
    registry.register_lazy("op", "xla", "cpu", 5, target="no_such_module_here:op")
    registry.register_lazy("op2", "xla", "any", target=f"{lazy_module}:missing")
    with pytest.warns(EjkernelWarning, match="no_such_module_here") as caught:
        assert registry.get("op") is xla is registry.get("op")
    assert len(caught) == 1
    with pytest.warns(EjkernelWarning), pytest.raises(KernelNotSupported) as failed:
        registry.get("op2")
    assert isinstance(failed.value.__cause__, ImportError)
    assert "missing" in str(failed.value)


@pytest.mark.parametrize("target", ["module", "module:", ":f", "a b:f", "m:f:g"])
def test_lazy_target_must_name_a_function(registry, target):
    with pytest.raises(ValueError, match=r"expected 'package.module:function'"):
        registry.register_lazy("op", "xla", "any", target=target)


# Discovery

PACKAGE = """
import sys
loads = []
def make(platform, backend, priority):
    def register(registry):
        loads.append(platform)
        @registry.register("op", platform, backend, priority)
        def op(q, *, cfg=None): return platform
    return register
xla, triton, cuda = make("xla", "any", 0), make("triton", "gpu", 100), make("cuda", "gpu", 50)
def broken(registry):
    registry.register("half", "triton", "gpu")(lambda q, *, cfg=None: q)
    raise RuntimeError("no driver")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"kernel_package_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def discovering(package, **functions):
    points = tuple(
        EntryPoint(name, f"{package}:{function}", "ejkernel.kernels")
        for name, function in functions.items()
    )
    return KernelRegistry(discover=lambda: points)


def test_packages_are_loaded_when_they_may_be_needed(package):
    registry = discovering(package, triton="triton", cuda="cuda", xla="xla")
    assert registry.installed() == ("triton", "cuda", "xla") and package not in sys.modules
    assert registry.get("op")(0) == "xla"
    assert sys.modules[package].loads == ["xla"]
    with pytest.raises(KernelNotSupported):
        registry.get("op", "cuda")
    with on(H200):
        assert registry.get("op")(0) == "triton"
    assert sorted(sys.modules[package].loads) == ["cuda", "triton", "xla"]


def test_every_package_is_loaded_once_also_by_threads(package):
    registry = discovering(package, xla="xla")
    found = []
    threads = [threading.Thread(target=lambda: found.append(registry.get("op"))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert sys.modules[package].loads == ["xla"]


def test_a_failing_package_warns_for_auto_and_raises_when_forced(package):
    registry = discovering(package, triton="broken", xla="xla")
    assert registry.get("op")(0) == "xla"
    with on(H200):
        with pytest.warns(EjkernelWarning, match=r"'triton'.*no driver") as caught:
            assert registry.get("op")(0) == registry.get("op")(0) == "xla"
        assert len(caught) == 1
        with pytest.raises(KernelNotSupported, match="no driver") as failed:
            registry.get("op", "triton")
    assert isinstance(failed.value.__cause__, RuntimeError)
    assert isinstance(registry.failure("triton"), RuntimeError)
    assert "half" not in registry.list_algorithms()


def test_a_missing_entry_point_target_is_a_failure(package):
    registry = discovering(package, triton="nowhere", xla="xla")
    with on(H200), pytest.warns(EjkernelWarning, match="nowhere"):
        assert registry.get("op")(0) == "xla"
