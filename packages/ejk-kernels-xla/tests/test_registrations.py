"""What the package registers is there, under one name and one signature per operation."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import ejkernel.kernels.xla as xla
from ejkernel.kernels.xla.kernel import XlaKernel
from ejkernel.ops import KernelRegistry


def test_register_imports_no_kernel() -> None:
    code = (
        "import sys, ejkernel.kernels.xla as xla; from ejkernel.ops import KernelRegistry; "
        "xla.register(KernelRegistry()); "
        "print([m for m in sys.modules if 'kernels.xla.' in m and '._' not in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("entry", xla.PACKAGE.entries, ids=lambda e: e.algorithm)
def test_every_entry_loads(entry) -> None:
    registry = KernelRegistry()
    xla.register(registry)
    implementation = registry.resolve(entry.algorithm, "xla")
    assert implementation.fn is getattr(xla, entry.public)
    assert isinstance(implementation.fn, XlaKernel)
    assert implementation.fn.call.algorithm == entry.algorithm
    assert entry.public in dir(xla)
    assert f"see the operation {implementation.fn.__name__}" in implementation.fn.__doc__
    assert implementation.heuristic.resolve() == implementation.fn.heuristic
    assert inspect.signature(implementation.fn) == signature(implementation.fn.call.signature)


def signature(function) -> inspect.Signature:
    """An operation's, as every backend has it."""
    declared = inspect.signature(function)
    cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
    return declared.replace(parameters=[*declared.parameters.values(), cfg])


def test_functions_win_over_subpackages_of_the_same_name() -> None:
    from ejkernel.kernels.xla import flash_attention
    from ejkernel.kernels.xla.flash_attention import implementation

    assert flash_attention is implementation.flash_attention is xla.flash_attention
