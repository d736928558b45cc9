"""What watches Hopper's kernels for races: every piece has its stand-in, and a race is seen."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import checkout
from ejkernel.kernels.pallas import compat
from ejktest import attention_at_size, grouped_cases

if (reason := compat.mosaic_gpu_problem()) is not None:
    pytest.skip(reason, allow_module_level=True)

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
    found = set()
    for function in ast.parse(path.read_text()).body:
        if isinstance(function, ast.FunctionDef) and function.name not in MAKES:
            calls = (x.func for x in ast.walk(function) if isinstance(x, ast.Call))
            names = {getattr(x, "attr", getattr(x, "id", None)) for x in calls}
            found |= {f"{path.stem}.{function.name}"} if names & MAKES else set()
    return found


def test_every_piece_of_the_compilers_instructions_has_a_stand_in():
    files = KERNELS.rglob("*.py")
    assert set(standins.ALL) == set().union(*map(pieces, files))


def test_calls_are_cases_that_exist(races):
    assert races.FLASH.keys() <= attention_at_size.CASES.keys()
    assert races.SPARSE.keys() <= attention_at_size.SPARSE.keys()
    assert set(races.GROUPED) <= grouped_cases.SIZES.keys()


def test_a_race_is_seen(races, monkeypatch):
    """A kernel has none; it would have one if products did not wait for their operands."""
    if reason := races.problem():
        pytest.skip(reason)
    monkeypatch.setattr(races, "CORES", 1)
    run, error = races.hopper_grouped("around a tile")
    seen, out = races.watch(run)
    assert not races.unexplained(seen)
    assert error(out) <= 1
    (wait,) = (site for site, kind in seen.sites.items() if "sums.step" in site and "bar" in kind)
    told = races.unexplained(races.watch(run, wait)[0])
    assert any("written at" in x and "Weights.copy" in x and "sums.step" in x for x in told)
