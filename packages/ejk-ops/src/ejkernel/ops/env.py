"""Environment variables, read at call time: setting one takes effect on the next call."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

N = TypeVar("N", int, float)

AUTOTUNE_POLICY = "EJKERNEL_AUTOTUNE_POLICY"
AUTOTUNE_BUDGET_S = "EJKERNEL_AUTOTUNE_BUDGET_S"
BATCH_INVARIANT = "EJKERNEL_BATCH_INVARIANT"
CACHE_DIR = "EJKERNEL_CACHE_DIR"
INTERPRET = "EJKERNEL_INTERPRET"
LOG_AUTOTUNE = "EJKERNEL_LOG_AUTOTUNE"
OPS_RECORD = "EJKERNEL_OPS_RECORD"
OPS_STAMP = "EJKERNEL_OPS_STAMP"
TRITON_SMEM_LIMIT = "EJKERNEL_TRITON_SMEM_LIMIT"
TYPECHECK = "EJKERNEL_TYPECHECK"


class NoHome(OSError):
    """There is no home directory to keep files in."""

    def __init__(self, path: str):
        hint = f"there is no home directory; set HOME or {CACHE_DIR}"
        super().__init__(errno.ENOENT, hint, path)


_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"0", "false", "no", "off", ""})


def _illegal(name: str, value: str, legal: str) -> ValueError:
    return ValueError(f"environment variable {name}={value!r}: expected {legal}")


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None:
        return default
    word = value.strip().lower()
    if word in _ON:
        return True
    if word in _OFF:
        return False
    raise _illegal(name, value, "1/true/yes/on or 0/false/no/off")


def _choice(name: str, legal: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name)
    if value is None or not value.strip():
        return default
    word = value.strip().lower()
    if word not in legal:
        raise _illegal(name, value, "one of " + ", ".join(legal))
    return word


def _number(
    name: str, kind: Callable[[str], N], accept: Callable[[N], bool], legal: str, default: Any
) -> Any:
    value = os.environ.get(name)
    if value is None or not value.strip():
        return default
    with contextlib.suppress(ValueError):
        number = kind(value)
        if accept(number):
            return number
    raise _illegal(name, value, legal)


def autotune_policy() -> str:
    """``EJKERNEL_AUTOTUNE_POLICY``: "autotune" (default) or "heuristics"."""
    return _choice(AUTOTUNE_POLICY, ("autotune", "heuristics"), "autotune")


def log_autotune() -> bool:
    """``EJKERNEL_LOG_AUTOTUNE``: one line per candidate on stderr. Default off."""
    return _flag(LOG_AUTOTUNE, False)


def ops_stamp() -> str:
    """``EJKERNEL_OPS_STAMP``: how executor calls are labelled, "none" (default), "hash", "json"."""
    return _choice(OPS_STAMP, ("none", "hash", "json"), "none")


def ops_record() -> bool:
    """``EJKERNEL_OPS_RECORD``: record the executor's invocations. Default off."""
    return _flag(OPS_RECORD, False)


def typecheck() -> bool:
    """``EJKERNEL_TYPECHECK``: check shapes and dtypes at the boundary. Default on."""
    return _flag(TYPECHECK, True)


def interpret() -> bool:
    """``EJKERNEL_INTERPRET``: run forced GPU and TPU platforms in an interpreter. Default off."""
    return _flag(INTERPRET, False)


def batch_invariant() -> bool:
    """``EJKERNEL_BATCH_INVARIANT``: bits that do not depend on the batch. Default off."""
    return _flag(BATCH_INVARIANT, False)


def triton_smem_limit() -> int | None:
    """``EJKERNEL_TRITON_SMEM_LIMIT``: bytes of shared memory a candidate may need.

    None (default) = ask the device.
    """
    legal = "a positive number of bytes"
    return _number(TRITON_SMEM_LIMIT, int, lambda n: n > 0, legal, None)


def autotune_budget_s() -> float:
    """``EJKERNEL_AUTOTUNE_BUDGET_S``: seconds that tuning one key may take. Default 60."""
    legal = "a number of seconds >= 0"
    return _number(AUTOTUNE_BUDGET_S, float, lambda s: 0.0 <= s < math.inf, legal, 60.0)


def cache_dir() -> Path:
    """``EJKERNEL_CACHE_DIR``: folder of everything kept on disk. Default ``~/.cache/ejkernel``.

    Raises:
        NoHome: the folder is below the home directory and there is none.
    """
    value = os.environ.get(CACHE_DIR)
    return expand_home(value if value and value.strip() else "~/.cache/ejkernel")


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Returns ``path`` with a leading ``~`` expanded.

    Raises:
        NoHome: there is no home directory, or HOME is empty or relative: that names the root of
            the file system or the working directory.
    """
    text = os.fspath(path)
    if not text.startswith("~"):
        return Path(text)
    try:
        expanded = Path(text).expanduser()
    except RuntimeError:
        raise NoHome(text) from None
    # an empty HOME expands to "/", which HOME may also name explicitly
    if not expanded.is_absolute() or os.environ.get("HOME") == "":
        raise NoHome(text)
    return expanded


def check_values() -> None:
    """Read every variable, also those that the call at hand does not need.

    Raises:
        ValueError: one of them has an unknown value; names it.
    """
    for read in _READERS.values():
        read()


_READERS: dict[str, Callable[[], Any]] = {
    AUTOTUNE_POLICY: autotune_policy,
    AUTOTUNE_BUDGET_S: autotune_budget_s,
    BATCH_INVARIANT: lambda: None,  # every call reads it, unless a block says otherwise
    CACHE_DIR: lambda: None,  # any text is the name of a folder
    INTERPRET: interpret,
    LOG_AUTOTUNE: log_autotune,
    OPS_RECORD: ops_record,
    OPS_STAMP: ops_stamp,
    TRITON_SMEM_LIMIT: triton_smem_limit,
    TYPECHECK: typecheck,
}
VARIABLES = tuple(_READERS)


@functools.cache
def _encoded() -> tuple[Any, ...]:
    """The variables' names as the environment holds them."""
    environ: Any = os.environ
    return tuple(map(environ.encodekey, VARIABLES))


def env_state() -> tuple[object, ...]:
    """The raw values of all variables, hashable: equal states make equal choices."""
    environ: Any = os.environ
    try:
        # A look-up through the mapping raises inside for each absent name: 20 us against 1.
        return tuple(map(environ._data.get, _encoded()))
    except AttributeError:
        return tuple(map(environ.get, VARIABLES))
