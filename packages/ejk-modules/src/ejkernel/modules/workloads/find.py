"""Looking up operations and cases by name, and cases made from ``key=value`` words.

The error for an unknown name lists similar names.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import fnmatch
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ejkernel.modules._table import ALIASES, OPERATIONS, REGISTRY_NAMES
from ejkernel.modules.workloads.call import WIDTH, Call, call_of
from ejkernel.modules.workloads.families import FAMILIES, SHORT_NAMES, Shape
from ejkernel.modules.workloads.shapes import SHAPES

DEFAULTS: Mapping[str, Any] = {
    "batch": 1, "q_len": 1024, "length": 1024, "heads": 8, "head_dim": 128, "context": 4096,
    "page": 16, "decodes": 8, "prefills": 1, "chunk": 256, "m": 4096, "k": 1024, "n": 1024,
    "groups": 8, "channels": 1024,
}  # fmt: skip


SHOWN = 25  # names that a message lists when none is near


class UnknownName(LookupError):
    """No such operation, case or argument; ``near``: similar names."""

    def __init__(self, kind: str, name: str, names: Iterable[str]):
        names = list(dict.fromkeys(names))
        self.name = name
        self.near = near(name, names)
        if self.near:
            hint = f"did you mean {' or '.join(self.near)}?"
        else:
            shown = ", ".join(names[:SHOWN]) or "none"
            others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            hint = f"there are: {shown}{others}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


def near(name: str, names: Iterable[str], count: int = 5) -> list[str]:
    """Returns the names that resemble ``name``, best first."""
    word, names = name.lower(), list(names)
    close = difflib.get_close_matches(word, names, count, 0.6)
    inside = [k for k in names if word and (word in k or k in word)]
    return list(dict.fromkeys([*close, *inside]))[:count]


def operation_names() -> list[str]:
    """The public functions."""
    return sorted(OPERATIONS)


def operation_name(name: str) -> str:
    """The public function that a function's name, alias or registry name stands for."""
    word = name.strip().lower().replace("-", "_")
    word = {**REGISTRY_NAMES, **ALIASES}.get(word, word)
    if word not in OPERATIONS:
        raise UnknownName("operation", name, [*operation_names(), *ALIASES, *REGISTRY_NAMES])
    return word


def family_of(operation: str) -> type[Shape]:
    """The family that describes calls of an operation."""
    return next(f for f in FAMILIES if operation in f.operations)


def shapes_of(operation: str, pattern: str = "*", device: str | None = None) -> list[Shape]:
    """The cases of an operation whose names match a glob; ``device``: only those meant for it.

    Raises:
        UnknownName: none matches; says which names are near.
    """
    family = family_of(operation)
    every = [s for s in SHAPES if type(s) is family and s.serves(operation)]
    matching = [s for s in every if fnmatch.fnmatch(s.name, pattern)]
    if not matching:
        raise UnknownName(f"shape of {operation}", pattern, [s.name for s in every])
    return [s for s in matching if device is None or s.device == device]


def device_meant() -> str:
    """Returns which cases the device at hand is for: "cpu", or "gpu" for every accelerator."""
    from ejkernel.ops import device_kind

    return "cpu" if device_kind() == "cpu" else "gpu"


def matching(names: Iterable[str], globs: str) -> list[str]:
    """The names that one of the comma-separated globs matches."""
    return [n for n in names if any(fnmatch.fnmatch(n, glob) for glob in globs.split(","))]


def calls_here(operation: str, globs: str) -> list[Call]:
    """The calls of an operation's cases for the device at hand whose names match."""
    shapes = {s.name: s for s in shapes_of(operation, device=device_meant())}
    return [call_of(shapes[name], operation) for name in matching(shapes, globs)]


def from_words(operation: str, words: Sequence[str], base: Shape | None = None) -> Call:
    """The call that ``key=value`` words describe, on top of a case or of modest defaults.

    Keys are fields of the family, their short names (b, s, h, hk, d, ...), or arguments of the
    operation that are no arrays, ``platform`` included. Values are Python literals or words.

    Raises:
        UnknownName: a key that is neither.
        ValueError: a word without ``=``, a value of the wrong kind, or something given twice.
    """
    family = family_of(operation)
    fields = {f.name: f for f in dataclasses.fields(family)}
    options = _static_options(operation)
    sizes: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r}: expected key=value, e.g. {next(iter(_usable(fields)))}=8")
        if key not in fields:
            key = next((name for name in SHORT_NAMES.get(key, ()) if name in fields), key)
        if key in _usable(fields):
            sizes[key] = _checked(key, text, fields[key].type)
        elif key in options:
            arguments[key] = _value(text)
        else:
            raise UnknownName(f"argument of {operation}", key, [*_usable(fields), *options])
        if key in sources:
            raise ValueError(f"{word!r}: {key} is given before, by {sources[key]!r}")
        sources[key] = word
    if base is not None:
        name = base.name + ("" if not sizes else " with " + " ".join(words))
        return call_of(dataclasses.replace(base, **{**sizes, "name": name}), operation, **arguments)
    required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
    values = {name: value for name, value in DEFAULTS.items() if name in required} | sizes
    if "kv_heads" in required:
        values.setdefault("kv_heads", values["heads"])
    return call_of(
        family(name=" ".join(words) or "default", device="any", **values), operation, **arguments
    )


def _usable(fields: Iterable[str]) -> list[str]:
    return [name for name in fields if name not in ("name", "source", "device")]


def _static_options(operation: str) -> list[str]:
    from ejkernel import modules

    signature = inspect.signature(getattr(modules, operation))
    without = {"cfg", "mesh", "in_specs", "out_specs"}
    optional = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in optional if p.name not in without]


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _checked(key: str, text: str, annotation: Any) -> Any:
    """A field's value; ``8k`` and ``1m`` are 8192 and 1048576."""
    kind = str(annotation)
    if kind.startswith("int") and text[:-1].isdigit() and text[-1:].lower() in ("k", "m"):
        return int(text[:-1]) * (1024 if text[-1].lower() == "k" else 1024**2)
    value = _value(text)
    if value is None and "None" in kind:
        return None
    if key.endswith("dtype"):
        if value not in WIDTH:
            raise UnknownName("dtype", str(value), WIDTH)
        return value
    legal = {"int": int, "float": (int, float), "bool": bool}[kind.split(" ")[0]]
    if not isinstance(value, legal) or (isinstance(value, bool) and legal is not bool):
        raise ValueError(f"{key}={text}: expected {kind.replace(' | None', '')}")
    if kind.startswith("int") and value < 0:
        raise ValueError(f"{key}={text}: expected a number >= 0")
    return value
