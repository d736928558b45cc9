"""Grouped heads: query head i reads key head ``i // (heads // kv_heads)``."""

from __future__ import annotations

from typing import Any

from ejkernel.types.calls.settle.errors import invalid

Arguments = dict[str, Any]


def _check(name: str, heads: int, kv_heads: int, value: Any) -> None:
    if heads % kv_heads if kv_heads else heads:
        raise invalid(
            name, f"kv_heads that divide the {heads} query heads ({kv_heads} do not)", value
        )


def grouped_heads(a: Arguments, query: str = "query", key: str = "key") -> None:
    """The key heads divide the query heads."""
    _check(key, a[query].shape[-2], a[key].shape[-2], a[key])


def combined_heads(a: Arguments, name: str) -> int:
    """Number of kv heads of pages that hold keys and values in turn."""
    combined = a[name].shape[2]
    if combined % 2:
        raise invalid(name, "an even axis 2: keys and values of each kv head in turn", a[name])
    _check(name, a["queries"].shape[1], combined // 2, a[name])
    return combined // 2
