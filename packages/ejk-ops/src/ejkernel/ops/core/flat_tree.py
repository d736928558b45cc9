"""A tree taken apart into its arrays and everything else, to be put together around others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from ejkernel.ops.core.keys import is_array


class FlatTree(NamedTuple):
    """The leaves of a tree; those at ``positions`` are its arrays."""

    treedef: Any
    leaves: tuple[Any, ...]
    positions: tuple[int, ...]

    @classmethod
    def flatten(cls, tree: Any) -> FlatTree:
        leaves, treedef = jax.tree_util.tree_flatten(tree)
        positions = tuple(i for i, leaf in enumerate(leaves) if is_array(leaf))
        return cls(treedef, tuple(leaves), positions)

    @property
    def arrays(self) -> list[Any]:
        return [self.leaves[i] for i in self.positions]

    def with_arrays(self, arrays: Iterable[Any]) -> Any:
        """Returns the tree with other arrays in the places of its own."""
        leaves = replace_at(self.leaves, self.positions, arrays)
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def without_arrays(self) -> FlatTree:
        """Returns a copy that keeps no array alive."""
        leaves = replace_at(self.leaves, self.positions, [None] * len(self.positions))
        return self._replace(leaves=tuple(leaves))


def replace_at(values: Iterable[Any], indices: Iterable[int], new: Iterable[Any]) -> list[Any]:
    """Returns the values, those at the indices replaced by the new ones."""
    replaced = list(values)
    for i, x in zip(indices, new, strict=True):
        replaced[i] = x
    return replaced
