"""Checks of records, which come from files: parts of another form are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
Form = Mapping[str, Check]
LEAST, MOST = 1e-30, 1e30


def is_text(x: Any) -> bool:
    return isinstance(x, str)


def is_number(x: Any) -> bool:
    """Returns whether this is a number of plausible size, so that ratios stay finite."""
    return type(x) in (int, float) and -MOST < x < MOST


def is_time(x: Any) -> bool:
    return is_number(x) and x > LEAST


def is_mapping(x: Any) -> bool:
    return isinstance(x, Mapping)


def is_mapping_of_numbers(x: Any) -> bool:
    return isinstance(x, Mapping) and all(map(is_number, x.values()))


def or_none(check: Check) -> Check:
    return lambda x: x is None or check(x)


ROW: Form = {"case": is_text, "mode": is_text, "contender": is_text, "ms": or_none(is_time)}
ROW_MAY: Form = {
    "speed_over": is_mapping_of_numbers,
    **dict.fromkeys(("tflops", "gbps", "percent_of_limit", "spread_ms"), or_none(is_number)),
    **dict.fromkeys(("note", "bound", "clock", "tier", "implementation", "config"), is_text),
}
CALL: Form = {
    "config": or_none(is_mapping),
    "trials": lambda x: isinstance(x, list) and all(find_misfit(t, TRIAL) is None for t in x),
    **dict.fromkeys(("operation", "shape", "pass"), is_text),
    **dict.fromkeys(("heuristic_ms", "best_ms", "heuristic_over_best"), or_none(is_time)),
    **dict.fromkeys(("seconds", "timed", "candidates"), is_number),
}
TRIAL: Form = {
    "config": or_none(is_mapping),
    "error": or_none(is_text),
    "ms": or_none(is_time),
    **dict.fromkeys(("fwd_ms", "bwd_ms"), or_none(is_number)),
}
HEAD: Form = dict.fromkeys(("op", "device", "date", "time"), is_text)
LIMITS: Form = {"flops": is_mapping_of_numbers, "bytes_per_s": is_number}


def find_misfit(
    part: Any, must: Mapping[str, Check], may: Mapping[str, Check] | None = None
) -> str | None:
    """Returns why ``part`` is not of this form, None when it is. Other fields do not matter."""
    if not isinstance(part, Mapping):
        return "it is no object"
    for name, check in must.items():
        if name not in part:
            return f"it has no {name!r}"
        if not check(part[name]):
            return f"{name!r} has a value that it cannot have"
    for name, check in (may or {}).items():
        if name in part and not check(part[name]):
            return f"{name!r} has a value that it cannot have"
    return None


def valid_parts(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the record with the parts that can be shown, and a line for each that cannot."""
    usable, problems = dict(record), []
    name, must, may = ("rows", ROW, ROW_MAY) if record["kind"] == "bench" else ("trials", CALL, {})
    parts = record.get(name)
    if not isinstance(parts, list):
        parts = []
        problems.append(f"{name!r} is no list")
    verdicts = [find_misfit(part, must, may) for part in parts]
    usable[name] = [part for part, why in zip(parts, verdicts, strict=True) if why is None]
    reasons = Counter(filter(None, verdicts))
    problems += [f"{count} of {len(parts)} {name}: {why}" for why, count in reasons.items()]
    for field, check in HEAD.items():
        if field in usable and not check(usable[field]):
            problems.append(f"{field!r} is no text")
            del usable[field]
    if "limits" in usable and find_misfit(usable["limits"], {}, LIMITS) is not None:
        problems.append(f"'limits': {find_misfit(usable['limits'], {}, LIMITS)}")
        del usable["limits"]
    return usable, problems
