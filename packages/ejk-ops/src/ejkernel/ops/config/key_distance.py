"""Distance of two calls: whether the tuned config of one is worth using for the other.

Properties that decide the work of a tile must be equal: operation, device, platform, dtypes, last
axes (head dims), other axes that are part of the layout (page sizes), the set of arrays and options
(bias, sinks, cap, window, segments), and the mask rule. Sizes may differ by a factor: every length,
the width of a window, the number of heads, and batch times heads by ``FACTOR``, queries per key
head by ``GROUP_FACTOR``. Further away, an entry says less than arithmetic does.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

FACTOR = 4.0
GROUP_FACTOR = 2.0
# An octave of heads weighs as much as this many octaves of a length: equal heads come first.
HEADS_WEIGHT = 8.0
# Entries for the requested platform come before entries for any platform.
OTHER_PLATFORM = 4.0
# Details that hardly matter: another sharding of an operand, a scale that is given.
DETAIL = 1.0


class SimilarityRules(NamedTuple):
    """Names of a kernel's arguments that are compared in a way of their own.

    Attributes:
        untuned_arguments: arguments that no tile depends on; any value matches.
        size_arguments: static integers that are sizes; other static values must be equal.
        pools: arrays whose first axis is a pool, of a size that says nothing about one call.
    """

    untuned_arguments: frozenset[str] = frozenset()
    size_arguments: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()


NO_RULES = SimilarityRules()
SUBJECT = ("schema", "kernel", "version", "device")

_ARRAY = {"shape", "dtype", "sharding", "free"}
_LIMIT = math.log2(FACTOR) + 1e-9
_GROUP_LIMIT = math.log2(GROUP_FACTOR) + 1e-9


def subject(payload: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the subject of an entry: a kernel of this version on this device."""
    return tuple(map(payload.get, SUBJECT))


def key_schema(payload: Mapping[str, Any], rules: SimilarityRules) -> Hashable:
    """Returns the part of a payload that must be equal in comparable payloads."""
    arguments = sorted(payload.get("arguments", {}).items())
    placed = repr((payload.get("mesh"), payload.get("specs")))
    fixed = [(name, *_fixed_part(name, x, rules)) for name, x in arguments]
    return (*subject(payload), placed, *fixed)


def _fixed_part(name: str, x: Any, rules: SimilarityRules) -> tuple[Any, ...]:
    """Returns the part of an argument that must be equal; distances compare its sizes."""
    if isinstance(x, Mapping):
        if _is_array(x):
            free, heads = x["free"], _head_axis(x, name in rules.pools)
            sizes = [None if i in free or i == heads else n for i, n in enumerate(x["shape"])]
            return x["dtype"], tuple(free), tuple(sizes)
        if _is_node(x) and name not in rules.untuned_arguments:
            return x["node"], len(x["children"])
    return () if name in rules.untuned_arguments or name in rules.size_arguments else (repr(x),)


def key_distance(
    entry: Mapping[str, Any], call: Mapping[str, Any], rules: SimilarityRules = NO_RULES
) -> float:
    """Distance of the payload of an entry from the payload of a call, in octaves.

    0 for one bucket, infinite when the entry says nothing about the call.
    """
    same = key_schema(entry, rules) == key_schema(call, rules)
    return distance_within_schema(entry, call, rules) if same else math.inf


def distance_within_schema(
    entry: Mapping[str, Any], call: Mapping[str, Any], rules: SimilarityRules
) -> float:
    """Returns ``key_distance`` of payloads that have one schema."""
    platform, tuned = call.get("platform", "auto"), entry.get("platform", "auto")
    if tuned not in ("auto", platform):  # the best of one platform is not the best of all
        return math.inf
    call_arguments = call.get("arguments", {})
    heads: list[float] = []
    distance = 0.0
    for name, a in entry.get("arguments", {}).items():
        b = call_arguments[name]
        if type(a) is type(b) and a == b and not isinstance(a, Mapping):
            continue
        distance += _argument_distance(name, a, b, heads, rules)
        if distance == math.inf:
            return math.inf
    if heads and max(heads) - min(heads) > _GROUP_LIMIT:
        return math.inf
    return distance + (0.0 if tuned == platform else OTHER_PLATFORM)


def _argument_distance(
    name: str, a: Any, b: Any, heads: list[float], rules: SimilarityRules
) -> float:
    """Distance of one argument; ``heads`` collects the ratios of head counts, in octaves."""
    if _is_array(a) and _is_array(b):
        return _array_distance(a, b, heads, pool=name in rules.pools)
    if a == b and type(a) is type(b):
        return 0.0
    if _is_array(a) or _is_array(b):
        return math.inf
    if name in rules.untuned_arguments:
        return DETAIL
    if _is_node(a) and _is_node(b):
        return _node_distance(a, b)
    if name in rules.size_arguments:
        return _size_distance(_window_sides(a), _window_sides(b))
    return math.inf


def _is_array(x: Any) -> bool:
    return isinstance(x, Mapping) and x.keys() == _ARRAY


def _is_node(x: Any) -> bool:
    return isinstance(x, Mapping) and "node" in x


def _window_sides(window: Any) -> Any:
    """A window as ``[left, right]``."""
    return [window, window] if type(window) is int else window


def _size_distance(a: Any, b: Any) -> float:
    """Returns the distance of static sizes such as windows; a size must be given on both sides."""
    if a == b and type(a) is type(b):
        return 0.0
    if type(a) is int and type(b) is int:  # a window of n sees n + 1 tokens
        return _within_limit(_octaves(a + 1, b + 1)) if a > 0 and b > 0 else math.inf
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return sum(map(_size_distance, a, b))
    if isinstance(a, str) and isinstance(b, str):
        return DETAIL
    return math.inf


def _node_distance(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """Returns the distance of pytrees such as masks: the same arrays, and one kind of rule."""
    if a["node"] != b["node"] or len(a["children"]) != len(b["children"]):
        return math.inf
    children = sum(map(_child_distance, a["children"], b["children"]))
    return _size_distance(a["static"], b["static"]) + children


def _child_distance(a: Any, b: Any) -> float:
    if isinstance(a, list) and isinstance(b, list):
        return sum(map(_child_distance, a, b)) if len(a) == len(b) else math.inf
    return _argument_distance("", a, b, [], NO_RULES)


def _head_axis(x: Mapping[str, Any], pool: bool) -> int | None:
    """The axis of heads in ``[..., heads, dim]``; a cache of rank three is [pages, size, dim]."""
    rank = len(x["shape"])
    return rank - 2 if rank > (3 if pool else 1) else None


def _array_distance(
    a: Mapping[str, Any], b: Mapping[str, Any], heads: list[float], *, pool: bool
) -> float:
    head_axis = _head_axis(a, pool)
    alike = all(a[name] == b[name] for name in ("dtype", "free"))
    if not alike or len(a["shape"]) != len(b["shape"]):
        return math.inf  # arguments have passed the schema; arrays inside masks have not
    free = set(a["free"])
    sizes, rows = 0.0, 0.0
    for axis, (m, n) in enumerate(zip(a["shape"], b["shape"], strict=True)):
        octaves = 0.0 if m == n else _octaves(m, n)
        if axis in free:
            if pool and axis == 0:
                continue
            sizes += _within_limit(octaves) if octaves else 0.0
            rows += octaves if axis == 0 else 0.0
        elif axis == head_axis:
            heads.append(octaves)
            sizes += HEADS_WEIGHT * _within_limit(octaves) if octaves else 0.0
            rows += octaves
        elif octaves:
            return math.inf
    placed = 0.0 if a["sharding"] == b["sharding"] else DETAIL
    return sizes + placed if abs(rows) <= _LIMIT else math.inf


def _octaves(a: int, b: int) -> float:
    """Returns log2 of a ratio, infinite where there is none."""
    return math.log2(a / b) if a > 0 and b > 0 else math.inf


def _within_limit(octaves: float) -> float:
    return abs(octaves) if abs(octaves) <= _LIMIT else math.inf
