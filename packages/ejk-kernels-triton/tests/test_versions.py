"""Which installed versions are accepted."""

from __future__ import annotations

import os
import sys

import pytest

from ejkernel.kernels.triton import compat

GOOD = {"triton": "3.9.0", "jax-triton": "0.4.1"}


@pytest.fixture
def versions(monkeypatch):
    def pretend(**found):
        found = {name.replace("_", "-"): version for name, version in found.items()}
        monkeypatch.setattr(compat, "installed", lambda name: {**GOOD, **found}.get(name))
        compat.toolchain.cache_clear()

    yield pretend
    compat.toolchain.cache_clear()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("3.7.1", (3, 7, 1)), ("3.9.0+git1a2b", (3, 9, 0)), ("3.7.1rc12", (3, 7, 1)), ("", ())],
)
def test_version_tuple(text, parsed) -> None:
    assert compat.version_tuple(text) == parsed


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"triton": None}, "triton is not installed"),
        ({"jax_triton": None}, "jax-triton is not installed"),
        ({"triton": "3.4.0"}, "triton 3.4.0 is older than 3.7.1"),
        ({"triton": "3.6.0"}, "wrong gradients on Hopper"),
        ({"triton": "3.7.0"}, "triton 3.7.0 is older than 3.7.1"),
        ({"jax_triton": "0.3.0"}, "jax-triton 0.3.0 is too old"),
    ],
    ids=str,
)
def test_refused_versions(versions, found, message) -> None:
    """The error says what is wrong and names combinations that work."""
    versions(**found)
    with pytest.raises(compat.IncompatibleVersions, match=message) as caught:
        compat.toolchain()
    for part in ("Python 3.11", "jax-triton 0.3.1", "jax-triton>=0.4.1", "triton>=3.7.1"):
        assert part in str(caught.value)
    assert compat.unavailable_reason() == str(caught.value)


@pytest.mark.parametrize("triton", ["3.7.1", "3.8.0", "3.9.0", "4.0.0"])
def test_accepted_versions(versions, triton) -> None:
    versions(triton=triton)
    assert compat.unavailable_reason() is None


@pytest.mark.parametrize(
    ("version", "target", "api", "maps"),
    [("0.3.1", "triton_kernel_call", 2, False), ("0.4.1", "triton_kernel_call_ffi", 4, True)],
)
def test_forms_of_the_custom_call(versions, monkeypatch, version, target, api, maps) -> None:
    has = {"TritonKernelCall": None, "create_tma_descriptor_parameter": None}
    native = type("Native", (), has)
    versions(jax_triton=version)
    monkeypatch.setattr(compat, "_native_module", lambda: native)
    tools = compat.toolchain()
    assert (tools.call_target, tools.api_version, tools.tensor_maps) == (target, api, maps)
    assert compat.has_tensor_maps() == maps


def test_no_plugin(versions, monkeypatch) -> None:
    versions()
    monkeypatch.setattr(compat, "_native_module", lambda: None)
    with pytest.raises(compat.IncompatibleVersions, match=r"no GPU plugin.*combinations that work"):
        compat.toolchain()


def test_jax_triton_that_cannot_be_imported(versions, monkeypatch) -> None:
    """As 0.3.1 without a plugin: an ImportError of its own; its variable is put back."""
    versions()
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    with pytest.raises(compat.IncompatibleVersions, match="jax-triton cannot be imported"):
        compat.toolchain()
    assert os.environ["TRITON_CACHE_DIR"] == "/somewhere"
