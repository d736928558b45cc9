"""Labels: names that survive lowering and compilation, to find operations in a program again.

A label is a named scope ``ejkernel#<name>``. Stamps are labels that the executor puts on its
calls: ``<kernel>.v<version>#<16 hex digits of the key>``, or with the config in percent-encoded
JSON instead of the digits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast
from urllib.parse import quote, unquote

import jax

from ejkernel.ops.errors import warn_once
from ejkernel.ops.utils.copying import Copyable
from ejkernel.ops.utils.serialization import stable_json

PREFIX = "ejkernel#"
DIGITS = 16

_LABEL = re.compile(re.escape(PREFIX) + r"([\w.~%#:=+-]+)", re.ASCII)

F = TypeVar("F", bound=Callable[..., Any])


class label(Copyable, process_local={"_entered": threading.local}):
    """Decorator and context manager that labels everything traced within.

        @label("my_attention")
        def my_attention(q, k, v): ...

        with label("block_3"): ...

    The name may be any non-empty text. It changes no result. ``find_labels_in_lowered`` and
    ``extract_labels_from_hlo_text`` give it back.
    """

    def __init__(self, name: str):
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r}: expected non-empty text")
        self.name = name
        self._scope = PREFIX + quote(name, safe="")
        self._entered = threading.local()

    def __call__(self, fn: F) -> F:
        @functools.wraps(fn)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(self._scope):
                return fn(*args, **kwargs)

        return cast(F, labelled)

    def __enter__(self) -> label:
        scope = jax.named_scope(self._scope)
        scope.__enter__()
        self._stack().append(scope)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack().pop().__exit__(*error)

    def _stack(self) -> list[Any]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        return self._entered.stack


def extract_labels_from_hlo_text(text: str) -> list[str]:
    """Labels in the text of a program (StableHLO with debug information, or HLO).

    Each once, in order of appearance, without the ``ejkernel#`` prefix.
    """
    labels = dict.fromkeys(_LABEL.findall(text))
    # stamps stay as they are: their percent-encoding belongs to their own form
    return [name if "#" in name else unquote(name) for name in labels]


def find_labels_in_lowered(lowered: Any) -> list[str]:
    """Labels in a ``jax.stages.Lowered`` or ``jax.stages.Compiled``, each once, in order.

    Raises:
        TypeError: neither of them.
    """
    if isinstance(lowered, jax.stages.Lowered):
        return extract_labels_from_hlo_text(lowered.as_text(debug_info=True))
    if isinstance(lowered, jax.stages.Compiled):
        return extract_labels_from_hlo_text(lowered.as_text() or "")
    raise TypeError(f"lowered must be a jax.stages.Lowered or Compiled, got {lowered!r}")


@dataclasses.dataclass(frozen=True)
class _Stamped:
    """The config and calls behind a stamp of this process."""

    key: str
    cfg: Any
    calls: dict[str, Any] = dataclasses.field(default_factory=dict)  # invocations by key


_stamped: dict[str, _Stamped] = {}
_STAMPED_LIMIT = 4096


def key_digits(key: str) -> str:
    """The 16 hex digits that stand for a key of the key builder in a stamp."""
    return key.rpartition("#")[2][:DIGITS]


def stamped_config(name: str) -> tuple[bool, Any]:
    """Returns whether this process made the stamp ``name``, and the config it stands for."""
    made = _stamped.get(name)
    return made is not None, None if made is None else made.cfg


def stamped_calls(name: str) -> list[Any]:
    """The invocations that this process put the stamp ``name`` on; empty for other labels."""
    made = _stamped.get(name)
    return [] if made is None else list(made.calls.values())


def stamped(
    kernel: str, version: int, key: str, cfg: Any, mode: str, call: Any = None
) -> contextlib.AbstractContextManager[Any]:
    """A scope that stamps what is traced within with a label.

    A stamp that cannot be made (a config without JSON form) is left out with one warning.

    Args:
        kernel: name of the kernel; characters that a program text cannot carry are encoded.
        version: its version.
        key: its key from the key builder.
        cfg: the config it runs with.
        mode: "hash", "json" or "none" (no stamp), as ``EJKERNEL_OPS_STAMP``.
        call: the abstract invocation, kept for ``stamped_calls``.
    """
    if mode == "none":
        return contextlib.nullcontext()
    try:
        content = key_digits(key) if mode == "hash" else quote(stable_json(cfg), safe="")
    except Exception as error:
        warn_once(("stamp", kernel), f"calls of {kernel} are not stamped: {error}")
        return contextlib.nullcontext()
    name = f"{quote(kernel, safe='')}.v{version}#{content}"
    if len(_stamped) >= _STAMPED_LIMIT:
        _stamped.pop(next(iter(_stamped)), None)
    calls = _stamped[name].calls if name in _stamped else {}
    _stamped[name] = _Stamped(key, cfg, calls if call is None else {**calls, key: call})
    return jax.named_scope(PREFIX + name)
