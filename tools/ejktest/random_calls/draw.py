"""A random call, and the generator of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types import MaskInfo

LENGTHS = (1, 2, 7, 31, 64, 65, 129, 200, 333)
LONG = 1000
HEADS = (
    (1, 1),
    (2, 1),
    (3, 1),
    (5, 1),
    (8, 1),
    (16, 1),
    (2, 2),
    (3, 3),
    (4, 2),
    (6, 2),
    (6, 3),
    (8, 8),
)
DIMS = (16, 24, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256)
USUAL_DIMS = (64, 128, 128, 192, 256)
PAGE_SIZES = (8, 16, 16, 24, 32, 64, 128)
EIGHT_BIT = ("int8", "float8_e4m3fn", "float8_e5m2")
WIDE = {"preferred_element_type", "precision", "out_dtype", "dtype"}
"""Options that say how precise a call is: a reference has none of them."""


@dataclass
class RandomCall:
    """A call.

    Attributes:
        operation: its name.
        arrays: arguments that are traced, by name.
        static: the other arguments.
        gradients: names of the arrays that are differentiated, none in a call without gradients.
        dtype: of the least precise matmul.
        invariant: whether it is batch-invariant.
    """

    operation: str
    arrays: dict[str, Any]
    static: dict[str, Any] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    dtype: str = "float32"
    invariant: bool = False

    def __str__(self) -> str:
        shapes = [f"{n}={describe(x)}" for n, x in self.arrays.items()]
        options = [f"{n}={describe(x)}" for n, x in self.static.items()]
        mode = ["gradients"] * bool(self.gradients) + ["batch_invariant"] * self.invariant
        return f"{self.operation}({', '.join(shapes + options)}) {' '.join(mode)}".rstrip()


def describe(x: Any) -> str:
    """Returns shape and dtype of an array, else the value."""
    if isinstance(x, (list, tuple)) and x and hasattr(x[0], "dtype"):
        return f"{len(x)} of {describe(x[0])}"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{np.dtype(x.dtype).name}{list(x.shape)}"
    if callable(x):
        return getattr(x, "__name__", type(x).__name__)
    return type(x).__name__ if isinstance(x, MaskInfo) or hasattr(x, "starts") else repr(x)


class Draw:
    """A random generator of a call's parts.

    Attributes:
        dtype: of the call's floats.
        plain: whether the call has 16 bits, usual dims and row counts, and few options:
            kernels for one device refuse most of the others.
    """

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = str(self.rng.choice(["bfloat16", "bfloat16", "float16", "float32"]))
        self.plain = bool(self.rng.random() < 0.5)
        if self.plain and self.dtype == "float32":
            self.dtype = "bfloat16"

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def option(self, share: float) -> bool:
        """Draws whether a call has an option."""
        return self.chance(share * 0.15 if self.plain else share)

    def pick(self, values: Sequence[Any]) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def integer(self, low: int, high: int) -> int:
        """Draws from ``low`` to ``high``, both included."""
        return int(self.rng.integers(low, high + 1))

    def length(self) -> int:
        return LONG if self.chance(0.05) else self.pick(LENGTHS)

    def normal(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> np.ndarray:
        values = scale * self.rng.standard_normal(shape)
        return values.astype(jnp.dtype(dtype or self.dtype))

    def rows(self, count: int) -> int:
        """Returns ``count``, or the next multiple of 8 in a plain call."""
        return -(-count // 8) * 8 if self.plain else count

    def page_size(self) -> int:
        return self.pick([n for n in PAGE_SIZES if n not in (8, 24) or not self.plain])

    def dim(self, limit: int = 256) -> int:
        return self.pick([d for d in (USUAL_DIMS if self.plain else DIMS) if d <= limit])

    def cumulative(self, total: int, sequences: int) -> np.ndarray:
        """Draws starts of sequences in ``total`` rows: some are empty, some rows are of none."""
        ends = np.sort(self.rng.integers(0, total + 1, sequences))
        if self.chance(0.5) and sequences:
            ends[-1] = total
        return np.concatenate([[0], ends]).astype(np.int32)

    def window(self) -> int | tuple[int, int]:
        left = self.pick((0, 1, 5, 30, 64, 127, 500))
        return left if self.chance(0.5) else (left, self.pick((0, 3, 64)))

    def sinks(self, heads: int) -> np.ndarray:
        shape = (self.integer(1, 3),)
        dtype = self.pick(("float32", self.dtype))
        return self.normal(*(shape if self.chance(0.3) else (heads, *shape)), dtype=dtype)

    def pages(self, pages: int, *row: int, dtype: str) -> np.ndarray:
        """Draws a cache ``[pages, *row]``."""
        if dtype == "int8":
            return self.rng.integers(-127, 128, (pages, *row)).astype(np.int8)
        return self.normal(pages, *row, dtype=dtype)


def hide(d: Draw, cache: np.ndarray, lens: Sequence[int], tables: np.ndarray) -> None:
    """Puts NaN where no context has a token, in place."""
    if not jnp.issubdtype(cache.dtype, jnp.floating) or d.chance(0.5):
        return
    seen, page_size = np.zeros(cache.shape[:2], bool), cache.shape[1]
    for n, row in zip(lens, tables, strict=False):
        j = np.arange(n)
        seen[row[j // page_size], j % page_size] = True
    cache[~seen] = np.nan
