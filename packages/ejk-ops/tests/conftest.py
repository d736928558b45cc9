"""Each test starts on the CPU, without variables of ours and without remembered warnings."""

import contextlib

import jax
import pytest

from ejkernel.ops import KernelRegistry, env
from ejkernel.ops.errors import reset_warnings


@pytest.fixture(autouse=True)
def clean_slate(request, monkeypatch, tmp_path):
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "default_cache"))
    reset_warnings()
    on_gpu = any(map(request.node.get_closest_marker, ("gpu", "multigpu")))
    with contextlib.nullcontext() if on_gpu else jax.default_device("cpu"):
        yield
    reset_warnings()


@pytest.fixture
def registry():
    return KernelRegistry()
