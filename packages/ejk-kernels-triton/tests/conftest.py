"""What several files of these tests ask for."""

from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True, scope="module")
def toolchain(request):
    """On a card jax-triton is loaded before the first test, and says what it lacks."""
    if request.node.get_closest_marker("gpu"):
        from ejkernel.kernels.triton import compat

        compat.toolchain()


@pytest.fixture(params=[2, 4], ids=["jax-triton 0.3", "jax-triton 0.4"])
def launcher(request, monkeypatch, tmp_path):
    """Either form of jax-triton's custom call, without its plugin."""
    from ejkernel.kernels.triton import compat
    from ejkernel.kernels.triton.compiled import clear_memory_cache
    from ejktest.launcher import Recorder

    modern = request.param == 4
    recorder = Recorder(arity=9 if modern else 7)
    name = "triton_kernel_call_ffi" if modern else "triton_kernel_call"
    tools = compat.Toolchain(recorder, name, request.param, modern, "")
    monkeypatch.setattr(compat, "toolchain", lambda: tools)
    monkeypatch.setattr(compat, "has_tensor_maps", lambda: modern)
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    clear_memory_cache()
    return SimpleNamespace(name=name, modern=modern, launches=recorder.launches)
