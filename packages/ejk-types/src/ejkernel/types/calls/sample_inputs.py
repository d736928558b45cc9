"""Valid random inputs for calls that random floats and zeros do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.types.calls.arguments import lengths_name


def split_evenly(sequences: int, rows: int) -> np.ndarray:
    """Returns the cumulative lengths of sequences of equal length, int32 ``[sequences + 1]``."""
    return (np.arange(sequences + 1) * rows // max(sequences, 1)).astype(np.int32)


def pack_sequences(a: Mapping[str, Any], first: str) -> dict[str, Any]:
    """Returns cumulative lengths of packed sequences of equal length.

    ``first``: name of the array that they are packed in.
    """
    packed = {
        "cu_seqlens": (first, 0 if first == "x" else 1),
        "cum_seqlens_q": ("query", 1),
        "cum_seqlens_k": ("key", 1),
        "query_start_loc": ("queries", 0),
    }
    return {
        name: split_evenly(a[name].shape[0] - 1, a[data].shape[axis])
        for name, (data, axis) in packed.items()
        if a.get(name) is not None
    }


def draw_tables(a: Mapping[str, Any], rng: np.random.Generator, cache: str) -> dict[str, Any]:
    """Returns full contexts, and ``block_tables`` that visit the pages in random order."""
    lengths = lengths_name(a)
    (pages, page_size), rows = a[cache].shape[:2], a[lengths].shape[0]
    shape = a["block_tables"].shape
    entries = int(np.prod(shape))
    table = rng.permutation(max(pages, entries))[:entries] % max(pages, 1)
    length = entries // max(rows, 1) * page_size
    return {
        lengths: np.full((rows,), length, np.int32),
        "block_tables": table.reshape(shape).astype(np.int32),
    }


def draw_normal(
    a: Mapping[str, Any], rng: np.random.Generator, names: Iterable[str]
) -> dict[str, Any]:
    """Returns normally distributed values for the named arrays that the call has."""
    arrays = {name: a[name] for name in names if hasattr(a[name], "shape")}
    return {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}
