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
        leaves = list(self.leaves)
        for position, array in zip(self.positions, arrays, strict=True):
            leaves[position] = array
        return jax.tree_util.tree_unflatten(self.treedef, leaves)

    def without_arrays(self) -> FlatTree:
        """Returns a copy that keeps no array alive."""
        leaves: list[Any] = list(self.leaves)
        for position in self.positions:
            leaves[position] = None
        return self._replace(leaves=tuple(leaves))
