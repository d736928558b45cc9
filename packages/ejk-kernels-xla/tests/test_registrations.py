"""What the package registers is there, under one name and one signature per operation."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ejkernel.kernels.xla as xla
from ejkernel.kernels.xla._registrations import REGISTRATIONS
from ejkernel.ops import KernelRegistry


def test_register_imports_no_kernel() -> None:
    code = (
        "import sys, ejkernel.kernels.xla as xla; from ejkernel.ops import KernelRegistry; "
        "xla.register(KernelRegistry()); "
        "print([m for m in sys.modules if 'kernels.xla.' in m and '._' not in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("entry", REGISTRATIONS, ids=lambda r: r.algorithm)
def test_every_entry_loads(entry) -> None:
    registry = KernelRegistry()
    xla.register(registry)
    implementation = registry.resolve(entry.algorithm, "xla")
    assert implementation.fn is getattr(xla, entry.function)
    assert callable(implementation.fn) and entry.function in dir(xla)
    assert implementation.fn.__doc__
    if entry.heuristic:
        implementation.heuristic.resolve()


def test_functions_win_over_subpackages_of_the_same_name() -> None:
    from ejkernel.kernels.xla import flash_attention
    from ejkernel.kernels.xla.flash_attention import interface

    assert flash_attention is interface.flash_attention is xla.flash_attention
