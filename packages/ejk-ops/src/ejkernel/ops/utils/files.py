"""Files that others read and write too: read without surprises, replaced as a whole."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

DEEPEST = 64
"""Levels of arrays and objects; what we write has a dozen."""


class NotAFile(OSError):
    """A folder, or a pipe or device, which might never end."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(errno.EINVAL, "not a regular file", os.fspath(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a regular file; nothing else is opened.

    Raises:
        NotAFile: something else.
        OSError: unreadable.
        UnicodeDecodeError: not UTF-8.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise NotAFile(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # exchanged just now
            raise NotAFile(path)
        file = os.fdopen(handle, encoding="utf-8")
    except BaseException:
        os.close(handle)
        raise
    with file:
        return file.read()


def replace_text(path: Path, text: str) -> None:
    """Replace a file as a whole: who reads it, or is killed writing it, sees or leaves no half.

    Raises:
        OSError: not written; the old file stays.
    """
    writer = f"{os.getpid()}-{threading.get_ident()}"
    temporary = path.with_name(f".{path.stem}.{writer}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def parse_json(text: str) -> Any:
    """The JSON values of ``text``.

    Raises:
        ValueError: not JSON, or nested deeper than ``DEEPEST``, as nothing of ours is.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(DEEPEST):
        if not level:
            break
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    if level:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return content
