"""Calls of grouped matmul side by side as one call of more groups."""

from __future__ import annotations

import numpy as np
import pytest

from ejkernel.types.problems.grouped_matmul import GroupedProblem
from ejkernel.types.problems.grouped_passes import fold_groups

ROWS, INNER, COLUMNS, GROUPS = 8, 2, 3, 2
PROBLEM = GroupedProblem(
    ROWS, INNER, COLUMNS, GROUPS, GROUPS, False, "bfloat16", "bfloat16", "tf32", stored="int8"
)


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


@pytest.mark.parametrize(("name", "shape"), [("rhs", (INNER, COLUMNS)), ("scale", (COLUMNS,))])
@pytest.mark.parametrize("outer_mapped", [False, True])
@pytest.mark.parametrize("inner_mapped", [False, True])
def test_matrices_are_shared_until_they_are_mapped(
    inner_mapped: bool, outer_mapped: bool, name: str, shape: tuple[int, ...]
) -> None:
    """Twice three calls: each has the matrices that it had."""
    inner_axis, outer_axis = (3,) * inner_mapped, (2,) * outer_mapped
    x = numbered(*outer_axis, *inner_axis, GROUPS, *shape)

    given = {name: x[0] if outer_mapped else x, "group_sizes": np.full((3, GROUPS), 4)}
    mapped = {name: inner_mapped, "group_sizes": True}
    problem, inner = fold_groups(PROBLEM, 3, given, mapped)
    sizes = np.stack([inner["group_sizes"]] * 2)
    given = {name: x.reshape(*outer_axis, -1, *shape), "group_sizes": sizes}
    problem, found = fold_groups(problem, 2, given, {name: outer_mapped, "group_sizes": True})

    assert problem.batch == 6
    assert problem.shared == (not inner_mapped and not outer_mapped)
    if problem.shared:
        np.testing.assert_array_equal(found[name], x)
    else:
        calls = x.reshape(2 if outer_mapped else 1, 3 if inner_mapped else 1, GROUPS, *shape)
        calls = np.broadcast_to(calls, (2, 3, GROUPS, *shape))
        np.testing.assert_array_equal(found[name], calls.reshape(-1, *shape))
