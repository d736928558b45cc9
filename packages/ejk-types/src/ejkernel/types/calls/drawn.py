"""Valid inputs drawn for calls where random floats and zeros are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


def starts(sequences: int, rows: int) -> np.ndarray:
    """Cumulative lengths of sequences of equal length, int32 ``[sequences + 1]``."""
    return (np.arange(sequences + 1) * rows // max(sequences, 1)).astype(np.int32)


def tables(
    a: Mapping[str, Any], rng: np.random.Generator, lengths: str, cache: str
) -> dict[str, Any]:
    """Full contexts, and ``block_tables`` that visit the pages in random order."""
    (pages, page_size), rows = a[cache].shape[:2], a[lengths].shape[0]
    shape = a["block_tables"].shape
    entries = int(np.prod(shape))
    table = rng.permutation(max(pages, entries))[:entries] % max(pages, 1)
    length = entries // max(rows, 1) * page_size
    return {
        lengths: np.full((rows,), length, np.int32),
        "block_tables": table.reshape(shape).astype(np.int32),
    }


def normal(a: Mapping[str, Any], rng: np.random.Generator, *names: str) -> dict[str, Any]:
    """Normal numbers for those of the arrays that are given."""
    given = {name: a[name] for name in names if hasattr(a[name], "shape")}
    return {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in given.items()}
