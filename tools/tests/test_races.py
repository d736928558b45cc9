"""The race detector of Hopper's kernels: every piece has its stand-in, and a race is seen."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import checkout
from ejkernel.kernels.pallas import compat
from ejktest.cases import attention, grouped, ragged

if (reason := compat.mosaic_gpu_problem()) is not None:
    pytest.skip(reason, allow_module_level=True)

from ejkernel.kernels.pallas.gpu.grouped_matmul.weights import Weights
from gpu.mosaic import standins

KERNELS = Path(checkout.ROOT, "packages/ejk-kernels-pallas/src/ejkernel/kernels/pallas/gpu")
MAKES = {"inline_mgpu", "on_registers", "_by_thread"}  # a piece of the compiler's instructions


@pytest.fixture(scope="module")
def races():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
            patch.setenv(name, "")  # which the script sets
        yield importlib.import_module("gpu.races")


def pieces(path: Path) -> set[str]:
    """Functions of a file with instructions of the compiler's own."""
    names_in_file = set()
    for function in ast.parse(path.read_text()).body:
        if isinstance(function, ast.FunctionDef) and function.name not in MAKES:
            calls = (x.func for x in ast.walk(function) if isinstance(x, ast.Call))
            names = {getattr(x, "attr", getattr(x, "id", None)) for x in calls}
            names_in_file |= {f"{path.stem}.{function.name}"} if names & MAKES else set()
    return names_in_file


def test_every_piece_of_the_compilers_instructions_has_a_stand_in():
    """Without one ``gpu/races.py`` stops at the piece; one without a piece is of no use."""
    assert set(standins.ALL) == set().union(*map(pieces, KERNELS.rglob("*.py")))


def test_calls_are_small_cases_that_exist(races):
    call = attention.SMALL["sinks cap window"]
    assert (call.q, call.k, call.mask["sliding_window"], call.cap) == (330, 330, 100, 20.0)
    assert call.sinks == (call.h, 2)
    assert set(races.GROUPED) <= grouped.SIZES.keys()
    assert ragged.SMALL.keys() == ragged.HOPPER.keys()


def test_a_race_is_seen(races):
    """A kernel has none; it would have one if matmuls did not wait for their operands."""
    if reason := races.problem():
        pytest.skip(reason)
    kernel = Weights(
        rows=72, down=128, across=256, batch=1, groups=2, held=2, dtype="bfloat16", cores=1
    )
    sizes, bf = jnp.asarray([3, 65], jnp.int32), jnp.bfloat16
    run = jax.jit(lambda: kernel(jnp.ones((72, 128), bf), jnp.ones((72, 256), bf), sizes))
    seen, out = races.watch(run)
    assert not races.unexplained(seen)
    assert [float(x) for x in out[:, 5, 7]] == [3, 65]
    (wait,) = (site for site, kind in seen.sites.items() if "sums.step" in site and "bar" in kind)
    told = races.unexplained(races.watch(run, wait)[0])
    assert any("written at" in x and "Weights.copy" in x and "sums.step" in x for x in told)
