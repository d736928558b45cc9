"""Without Triton the package imports, answers and traces; only lowering a kernel needs it.

Every kernel that the package lists is tried, so that a new one is covered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ejkernel.kernels.triton import PACKAGE
from ejktest.triton_calls import CALLS

PROBE = """
import json, sys
sys.modules.update(dict.fromkeys(("triton", "jax_triton")))
import jax
from ejkernel.kernels import triton as package
from ejkernel.kernels.triton import compat
from ejkernel.kernels.triton.targets import compile_for, cuda_target
from ejkernel.ops import kernel_registry
from ejktest import triton_calls
from ejktest.device import H200, on
from ejktest.operand_dtypes import dtype_cases
compat.installed = lambda name: None

def answer(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def refusal(algorithm):
    with on(H200):
        (refused,) = kernel_registry.survey(algorithm, "triton", inv=object()).refused
    return refused[1]

def lower(kernel):
    called = next(dtype_cases(kernel.call)).called
    call = jax.jit(called.forward(package))
    with compile_for(cuda_target(90)):
        call.trace(*called.shapes()).lower(lowering_platforms=("cuda",))

kernels = {e.algorithm: answer(lambda: package.PACKAGE.load(e)) for e in package.PACKAGE.entries}
# ring attention lowers flash attention's kernels, and its calls need a mesh axis
alone = {name: kernel for name, kernel in kernels.items() if name != "ring_attention"}
print(json.dumps({
    "kernels": {name: repr(kernel) for name, kernel in kernels.items()},
    "signatures": kernel_registry.validate_signatures(),
    "supports": {name: answer(lambda: refusal(name)) for name in kernels},
    "lowers": {name: answer(lambda: lower(k)) for name, k in alone.items()},
    "launches": {
        name: answer(lambda: len(triton_calls.launches(name, "sm_90")))
        for name in triton_calls.CALLS
    },
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    """Answers of a process that cannot import Triton, by kernel or call."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_is_imported(answers: dict) -> None:
    assert list(answers["kernels"]) == [entry.algorithm for entry in PACKAGE.entries]
    assert [kernel for kernel in answers["kernels"].values() if "Error" in kernel] == []
    assert answers["signatures"] == []


def test_every_kernel_says_that_triton_is_missing(answers: dict) -> None:
    """``explain`` and ``supports`` repeat the reason."""
    for algorithm, reason in answers["supports"].items():
        assert reason.startswith("triton is not installed; combinations that work"), algorithm


def test_every_kernel_is_refused_where_it_is_lowered(answers: dict) -> None:
    for algorithm, refusal in answers["lowers"].items():
        assert refusal.startswith("IncompatibleVersions: triton is not installed"), algorithm


def test_every_call_is_traced(answers: dict) -> None:
    """With its gradients: programs are made for GPUs on machines that have none."""
    assert list(answers["launches"]) == list(CALLS)
    assert {name: n for name, n in answers["launches"].items() if not isinstance(n, int)} == {}
