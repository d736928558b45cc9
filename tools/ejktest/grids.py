"""Grids of parameters: the suite takes the cells that cover one, ``-m slow`` the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def cover(grid: Iterable[Any], *fast: Any) -> list[Any]:
    """Marks as slow all cells of ``grid`` but the ``fast`` ones, which show what no other does.

    A cell is a tuple of parameters, or the only one.
    """
    cells = list(grid)
    unknown = [cell for cell in fast if cell not in cells]
    assert not unknown, unknown

    def parameters(cell: Any) -> Any:
        marks = () if cell in fast else (pytest.mark.slow,)
        return pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=marks)

    return [parameters(cell) for cell in cells]


def without(grid: Iterable[Any], *slow: Any) -> list[Any]:
    """Marks as slow the cells of ``grid`` that the others cover."""
    cells = list(grid)
    unknown = [cell for cell in slow if cell not in cells]
    assert not unknown, unknown
    return cover(cells, *(cell for cell in cells if cell not in slow))
