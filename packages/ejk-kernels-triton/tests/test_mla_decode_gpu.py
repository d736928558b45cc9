"""Latent decoding on a GPU at real sizes: values, repeatability, memory that nobody may see."""

from __future__ import annotations

import pytest

from ejktest.cases import latent as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import mla_decode
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import compile_cases
from ejktest.at_size import names_in_run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    compile_cases(cases, "mla_decode", names_in_run(request), current_target())


@pytest.mark.parametrize("name", cases.CASES)
def test_against_float32(name: str) -> None:
    """Two runs have the same bits, whatever lies in memory past the contexts."""
    cases.check(name, mla_decode)
