"""Latent attention on a GPU at real sizes: values, every gradient, repeatability."""

from __future__ import annotations

import pytest

from ejktest.cases import latent as cases

pytest.importorskip("triton", reason="Triton is not installed")

from ejkernel.kernels.triton import mla_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", cases.EXPANDED)
def test_against_float32(form: str) -> None:
    cases.check_expanded(form, mla_attention)
