"""What happens when parts of the shared namespace are missing or hidden, and what import costs."""

import subprocess
import sys

import pytest

from ejkernel.modules import _namespace


def run(code, *args):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, timeout=120
    )
    return done.stdout, done.stderr


def test_a_missing_distribution_is_named():
    _, error = run("import sys; sys.modules['ejkernel.types'] = None; import ejkernel.modules")
    assert "ejk-types not found in" in error and "pip install ejk-types" in error


def test_a_distribution_without_its_files_is_named(tmp_path, monkeypatch):
    """Uninstalling the other project leaves folders of ours without ``__init__.py``."""
    (tmp_path / "damaged_types").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_namespace, "PORTIONS", {"damaged_types": "ejk-types"})
    with pytest.raises(ImportError, match=r"ejk-types not found .* `ejk doctor` prints the line"):
        _namespace.check()


def test_a_regular_package_of_the_same_name_is_explained():
    code = """
import ejkernel
ejkernel.__file__ = "/elsewhere/ejkernel/__init__.py"
import ejkernel.modules
"""
    _, error = run(code)
    assert "ejkernel is a regular package here (/elsewhere/ejkernel/__init__.py)" in error
    assert "`ejk doctor` prints the line that repairs" in error


def test_the_import_is_light_and_names_are_found():
    code = """
import sys, time, jax
start = time.perf_counter()
import ejkernel.modules
print(time.perf_counter() - start)
from ejkernel.modules import FlashAttention, FlashAttentionConfig, flash_attention
print(any(name.startswith(("triton", "jax_triton")) for name in sys.modules))
print(FlashAttention.function is flash_attention, FlashAttentionConfig().platform)
"""
    out, error = run(code)
    seconds, triton, *names = out.split()
    assert float(seconds) <= 0.5 and triton == "False" and names == ["True", "auto"], error


def test_the_import_changes_nothing_and_a_process_may_be_forked_after_it():
    code = """
import os, signal, threading, warnings, jax
from jax._src import xla_bridge

def everything():
    signals = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    return dict(jax.config.values), dict(os.environ), warnings.filters[:], signals, \\
        threading.active_count(), list(xla_bridge._backends)

before = everything()
import ejkernel.modules as modules
from ejkernel.ops import kernel_registry
assert "flash_attention" in kernel_registry.list_algorithms()
print(everything() == before, flush=True)
import numpy as np
child = os.fork()
x = np.ones((1, 4, 2, 8), np.float32)
print(float(modules.flash_attention(x, x, x).sum()), flush=True)
if child:
    print(os.waitpid(child, 0)[1])
"""
    out, error = run(code)
    assert out.split() == ["True", "64.0", "64.0", "0"], error
