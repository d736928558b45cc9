"""Files that other processes read and write too: bounded reads, atomic replacement."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 2**20
"""Largest file that is read or written: 20,000 configs, or the code of the largest kernel."""

DEEPEST = 64
"""Levels of arrays and objects; what we write has a dozen."""

_LONGEST_STEM = 64  # bytes, in a temporary name
_ATTEMPTS = 100


class NotAFile(OSError):
    """A folder, or a pipe or device, which might never end."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(errno.EINVAL, "not a regular file", os.fspath(path))


class TooLarge(OSError):
    """A file of more than ``MAX_BYTES``."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(errno.EFBIG, f"larger than {MAX_BYTES >> 20} MiB", os.fspath(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the text of a regular file; nothing else is opened.

    Raises:
        NotAFile: something else.
        TooLarge: more than ``MAX_BYTES``.
        OSError: unreadable.
        UnicodeDecodeError: not UTF-8.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise NotAFile(path)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):  # replaced since os.stat
            raise NotAFile(path)
        if status.st_size > MAX_BYTES:
            raise TooLarge(path)
        content = file.read(MAX_BYTES + 1)  # the file may be growing
    if len(content) > MAX_BYTES:
        raise TooLarge(path)
    return content.decode("utf-8")


def replace_text(path: Path, text: str) -> None:
    """Replaces a file as a whole: no reader sees half of it, and no killed writer leaves half.

    Raises:
        TooLarge: more than ``MAX_BYTES``, which ``read_text`` would refuse.
        OSError: not written; the old file stays.
    """
    content = text.encode("utf-8")
    if len(content) > MAX_BYTES:
        raise TooLarge(path)
    handle, temporary = _create_temporary(path)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file that the user named: as ``replace_text``, or into a pipe or device.

    Raises:
        OSError: not written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        replace_text(Path(os.path.realpath(path)), text)  # a link stays a link


def _create_temporary(path: Path) -> tuple[int, Path]:
    """Creates a file next to ``path`` under a name that nobody can prepare a link for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    for _ in range(_ATTEMPTS):
        temporary = path.with_name(f".{_short_stem(path)}.{secrets.token_hex(8)}.tmp")
        try:
            return os.open(temporary, flags, 0o666), temporary
        except FileExistsError:
            continue
    raise FileExistsError(errno.EEXIST, "no free temporary name", os.fspath(path))


def leftover_temporaries(path: Path) -> list[Path]:
    """Returns the temporary files that killed writers of ``path`` left."""
    of_path = re.compile(re.escape(f".{_short_stem(path)}.") + r"[^.]+\.tmp")
    return [path.with_name(name) for name in os.listdir(path.parent) if of_path.fullmatch(name)]


def _short_stem(path: Path) -> str:
    """The stem of ``path``, or what identifies a long one: a temporary name is longer still."""
    stem = os.fsencode(path.stem)
    if len(stem) <= _LONGEST_STEM:
        return path.stem
    return f"{os.fsdecode(stem[:_LONGEST_STEM])}-{hashlib.sha256(stem).hexdigest()[:16]}"


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
