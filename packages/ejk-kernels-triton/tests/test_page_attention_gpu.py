"""Paged decoding on a GPU at real sizes: values, repeatability, memory that nobody may see."""

from __future__ import annotations

from typing import Any

import pytest

from ejktest.cases import paged as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import page_attention
from ejkernel.kernels.triton.targets import current_target
from ejktest.ahead import compile_cases
from ejktest.at_size import names_in_run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    compile_cases(cases, "page_attention", names_in_run(request), current_target())


@pytest.mark.parametrize("name", cases.CASES)
def test_against_float32(name: str) -> None:
    """Two runs have the same bits, whatever lies in memory past the contexts."""
    cases.check(name, page_attention)


@pytest.mark.parametrize("kind", [cases.I8, cases.E4, cases.E5])
def test_every_8_bit_number_is_read_exactly(kind: Any) -> None:
    assert cases.every_code(kind, page_attention) == 0
