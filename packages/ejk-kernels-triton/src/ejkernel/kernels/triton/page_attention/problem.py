"""What one decoding step computes, as static properties: hashable, so that it can key programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.triton.common.dims import split_dim
from ejkernel.kernels.triton.launch import power_of_two
from ejkernel.types.attention.problem import LOG2E

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class Problem:
    """Sizes, dtypes and options of one call.

    Attributes:
        batch, heads, kv_heads, dim, value_dim: sizes; one query token per batch row.
        pages, page_size, max_pages: of the caches; ``max_pages`` columns of the block table.
        query, key, value: dtypes of the query (and of the result) and of the caches.
        scale: factor of the products.
        soft_cap: cap of the logits or None.
        left: keys seen besides the newest, or None for all.
        splits: parts of every sequence that the call asks for, or None.
        tokens: query rows of a sequence that are one product, at most.
        form: of a cache that holds keys and values in turn, (kv heads of a token, elements of a
            key and its value); None for two caches.
        shared: whether the first ``value_dim`` columns of a key are its value: one cache.
        lse: whether the sums' logarithms are a result.
    """

    batch: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    pages: int
    page_size: int
    max_pages: int
    query: str
    key: str
    value: str
    scale: float
    soft_cap: float | None = None
    left: int | None = None
    splits: int | None = None
    tokens: int = 1
    form: tuple[int, int] | None = None
    shared: bool = False
    lse: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def capacity(self) -> int:
        """Tokens one sequence can hold."""
        return self.max_pages * self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value of one head."""
        if self.shared:
            return self.dim * BYTES[self.key]
        return self.dim * BYTES[self.key] + self.value_dim * BYTES[self.value]

    @property
    def places(self) -> dict[str, int]:
        """Where heads of keys and values lie in a token, as the kernels' constants.

        V_FIRST counts elements as they are read: pairs of 8-bit numbers.
        """
        heads, step = self.form or (self.kv_heads, self.dim)
        found = {"K_HEADS": heads, "K_STEP": step}
        if self.form is None:
            return found | {"V_HEADS": heads, "V_STEP": self.value_dim, "V_FIRST": 0}
        first = step // 2 // (2 if BYTES[self.value] == 1 else 1)
        return found | {"V_HEADS": heads, "V_STEP": step, "V_FIRST": first}

    @property
    def logits(self) -> dict[str, float]:
        """What turns products into logits: a cap's tanh takes natural ones, all else is base 2."""
        cap = self.soft_cap
        return {
            "scale": float(self.scale if cap else self.scale * LOG2E),
            "cap_in": float(2 * LOG2E / cap) if cap else 0.0,
            "cap_out": float(cap * LOG2E) if cap else 0.0,
        }

    @property
    def wide(self) -> bool:
        """Returns whether a product is in float32."""
        return "float32" in (self.number(self.key), self.number(self.value))

    @property
    def eight_bit(self) -> bool:
        """Returns whether both caches are of 8-bit numbers."""
        return BYTES[self.key] == BYTES[self.value] == 1

    def number(self, cache: str) -> str:
        """The dtype of products with a cache of dtype ``cache``.

        8-bit caches are exact in float16, where probabilities (at most 1) and queries (scaled
        per row) are more exact than in bfloat16. What has no common 16-bit dtype uses float32.
        """
        if self.query != "float32" and BYTES.get(cache) == 1:  # others are refused later
            return "float16"
        return cache if cache == self.query else "float32"

    @property
    def parts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(main, rest) of the columns of keys and of values, as ``split_dim`` has them.

        Where a key holds its value, that is its main part.
        """
        if self.shared:
            rest = self.dim - self.value_dim
            rest = rest and max(power_of_two(rest), _least(self.key))
            return (self.value_dim, rest), (self.value_dim, 0)
        return _split(self.dim, _least(self.key)), _split(self.value_dim, _least(self.value))

    @property
    def narrow(self) -> bool:
        """Returns whether a second part is no wider than a product must be."""
        (_, k), (_, v) = self.parts
        return k == _least(self.key) or v == _least(self.value)

    def folded(self, size: int, pages: int) -> Problem:
        """The same problem ``size`` times along the batch axis, over caches of ``pages`` pages."""
        return replace(self, batch=self.batch * size, pages=pages)


def _least(cache: str) -> int:
    """Columns that a product needs; even and odd ones of 8-bit caches are multiplied apart."""
    return 32 if BYTES[cache] == 1 else 16


def _split(dim: int, least: int) -> tuple[int, int]:
    main, rest = split_dim(dim)
    return max(main, least), rest and max(rest, least)


def problem_of(a: Mapping[str, Any], query: Any, key: Any, value: Any, **sizes: Any) -> Problem:
    """The static properties of a call with canonical arguments ``a``, of its query and its caches.

    ``sizes``: fields that the operation has in other places.
    """
    window = a["sliding_window"]
    known = {
        "batch": query.shape[0],
        "heads": query.shape[-2],
        "kv_heads": key.shape[2],
        "dim": query.shape[-1],
        "value_dim": value.shape[-1],
        "pages": key.shape[0],
        "page_size": key.shape[1],
        "query": jnp.dtype(query.dtype).name,
        "key": jnp.dtype(key.dtype).name,
        "value": jnp.dtype(value.dtype).name,
        "scale": a["softmax_scale"],
        "soft_cap": a["logits_soft_cap"],
        "left": None if window is None else min(window[0], 2**30),
        "splits": a.get("num_splits"),
    }
    return Problem(**known | sizes)
