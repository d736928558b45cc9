"""One JSON file of configs: its format, how it is read, and how it is replaced.

Format (schema 1), one entry per line so that differences read well::

    {"schema": 1, "device": "gpu:nvidia-h200:9.0", "kernel": "flash_attention",
     "entries": {
      "<key>": {"class": "package.module:FlashAttentionConfig", "config": {...}, "facts": ...,
                "measured": ...}
    }}

The optional entries ``"facts"`` hold the metadata (the payload of the key), ``"measured"`` times,
versions and a date.
Tables shipped with kernel packages have the same format plus ``"provenance"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import filelock

from ejkernel.ops.errors import warn_once
from ejkernel.ops.utils.allowed import UnknownClass, allow_in_files, allowed_class, class_name
from ejkernel.ops.utils.files import (
    NotAFile,
    TooLarge,
    leftover_temporaries,
    parse_json,
    read_text,
    replace_text,
)
from ejkernel.ops.utils.serialization import from_plain, to_plain

SCHEMA = 1

NOT_WRITTEN = (OSError, filelock.Timeout, NotImplementedError)
"""What writing may raise: permissions, space, a busy lock, a file system without locks."""

KEY = re.compile(r"(?P<kernel>.+)\.v\d+@(?P<device>.+)#[0-9a-f]{32}")
"""A key of the key builder."""


def is_about_one_file(error: Exception) -> bool:
    """Returns whether one of NOT_WRITTEN says nothing about other files of the folder."""
    name_too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return name_too_long or isinstance(error, (NotAFile, TooLarge))


def warn_memory_only(folder: str | os.PathLike[str], reason: str, *, stacklevel: int = 5) -> None:
    """Warns once that nothing of a folder can be read or written."""
    told = f"configs are kept in memory only: {reason}"
    warn_once(("persistent", os.fspath(folder)), told, stacklevel=stacklevel + 1)


def file_stem(name: str) -> str:
    """The name of a kernel or device as that of a file, which is never that of another's file."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "unnamed"
    return re.sub(r"\.(schema\d+)$", r"-\1", stem)  # "x.schema1.json" would belong to kernel x


def key_file(root: Path, key: str) -> tuple[Path, str, str]:
    """Returns the file under ``root`` for a key, and the key's device and kernel."""
    match = KEY.fullmatch(key)
    if match is None:
        return root / "misc.json", "", ""
    device, kernel = match["device"], match["kernel"]
    return root / file_stem(device) / f"{file_stem(kernel)}.json", device, kernel


def remember_class(cls: type) -> None:
    """Let entries of this class be read back."""
    if dataclasses.is_dataclass(cls):
        allow_in_files(cls)


def encode_config(cfg: Any) -> dict[str, Any]:
    """``{"class": ..., "config": ...}``; the class is None for plain JSON values.

    Raises:
        TypeError: no JSON form.
    """
    is_dataclass = dataclasses.is_dataclass(cfg) and not isinstance(cfg, type)
    return {"class": class_name(type(cfg)) if is_dataclass else None, "config": to_plain(cfg)}


def decode_config(plain: Mapping[str, Any], cls: type | None = None) -> Any:
    """Inverse of ``encode_config``; ``cls`` forces the class.

    Raises:
        ValueError, TypeError: the class is unknown, or it rejects the values.
    """
    name = plain.get("class")
    if cls is None or not dataclasses.is_dataclass(cls):
        if name is None:
            return plain["config"]
        cls = allowed_class(name, object)
        if not dataclasses.is_dataclass(cls):
            raise UnknownClass(f"class {name!r} is no config")
    return from_plain(plain["config"], cls)


@dataclass
class Entry:
    """One config as stored, and as an object once it was read."""

    plain: Mapping[str, Any]
    metadata: Any = None
    measured: Any = None
    _built: dict[type | None, Any] = field(default_factory=dict, repr=False)

    def config(self, cls: type | None = None, default: Any = None) -> Any:
        """The config; ``default`` when its class is unknown or rejects it."""
        if cls not in self._built:
            try:
                self._built[cls] = decode_config(self.plain, cls)
            except UnknownClass as error:
                warn_once(("class", self.plain.get("class")), f"a config is not used: {error}")
                return default
            except Exception:  # whatever a class raises for values that are none of its own
                return default
        return self._built[cls]

    def line(self) -> str:
        """JSON text of the entry."""
        stored = {"class": self.plain.get("class"), "config": self.plain["config"]}
        if self.metadata is not None:
            stored["facts"] = self.metadata
        if self.measured is not None:
            stored["measured"] = self.measured
        return json.dumps(stored)


class CorruptFile(ValueError):
    """Not JSON, or not of the form it claims. ``path`` is the file, once known."""

    path: Path


class OtherSchema(ValueError):
    """JSON of another schema. ``newer``: of a schema that a later version writes."""

    newer = False


def parse_file(text: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Header and entries of a config file.

    Raises:
        CorruptFile: cut off, not JSON, or entries that are none.
        OtherSchema: valid JSON of another schema.
    """
    try:
        content = parse_json(text)
    except ValueError as error:
        raise CorruptFile(f"not JSON: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        other = OtherSchema(f"schema {schema!r}, expected {SCHEMA}")
        other.newer = type(schema) is int and schema > SCHEMA
        raise other
    stored = content.pop("entries", None)
    if not isinstance(stored, dict):
        raise CorruptFile("it has no entries")
    entries = {}
    for key, value in stored.items():
        if not (isinstance(value, dict) and "config" in value):
            raise CorruptFile(f"entry {key!r} has no config")
        if not isinstance(value.get("class"), (str, NoneType)):
            raise CorruptFile(f"entry {key!r} has a class that is no name")
        entries[key] = Entry(value, value.get("facts"), value.get("measured"))
    return content, entries


def format_file(header: Mapping[str, Any], entries: Mapping[str, Entry]) -> str:
    """Text of a config file, one entry per line."""
    head = json.dumps({"schema": SCHEMA, **header})[:-1]
    lines = ",\n".join(f"  {json.dumps(key)}: {entry.line()}" for key, entry in entries.items())
    return f'{head},\n "entries": {{\n{lines}\n}}}}\n'


def read_table(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Header and entries of a shipped table.

    Raises:
        OSError: unreadable.
        ValueError: not a table of this schema.
    """
    return parse_file(read_text(path))


class Stamp(NamedTuple):
    """Identity of a file's content: its path, time and size."""

    path: Path
    mtime_ns: int
    size: int
    inode: int


class ConfigFile:
    """A file of configs that several processes may read and write.

    Writing takes a lock file next to it, reads what others wrote, adds, writes a temporary file
    in the same folder, and renames it over the old one: a reader, or a writer that is killed,
    never leaves or sees half a file.

    Args:
        path: the file.
        device, kernel: what its entries are about, if all are about one.
        folder: the cache it belongs to, which is warned about once if it cannot be read.
    """

    def __init__(
        self, path: Path, *, device: str = "", kernel: str = "", folder: Path | None = None
    ):
        self.path = path
        self._folder = path if folder is None else folder
        self._header = {k: v for k, v in (("device", device), ("kernel", kernel)) if v}
        self._stamp: Stamp | None = None  # of the file that _entries was read from
        self._foreign: Stamp | None = None  # of a file of another schema
        self._entries: dict[str, Entry] = {}

    @staticmethod
    def plain_path(path: Path) -> Path:
        """``x.json`` for ``x.json`` and for ``x.schema1.json``."""
        ending = f".schema{SCHEMA}.json"
        name = path.name
        if not name.endswith(ending):
            return path
        return path.with_name(f"{name.removesuffix(ending)}.json")

    @property
    def _fallback_path(self) -> Path:
        """The file to write when ``path`` belongs to another schema."""
        return self.path.with_suffix(f".schema{SCHEMA}.json")

    def entries(self) -> dict[str, Entry]:
        """Returns the stored entries; empty when there is no readable file. Never raises."""
        try:
            active = self._active()
        except CorruptFile:
            active = None
            self._set_corrupt_aside()
        except OSError as error:
            if is_about_one_file(error):
                cause = ("persistent", str(self.path), "read")
                warn_once(cause, f"{self.path}: {error}", stacklevel=5)
            else:
                warn_memory_only(self._folder, f"{self.path} cannot be read: {error}")
            return {}
        return {} if active is None else self._entries

    def update(self, new: Mapping[str, Entry], timeout: float, *, keep: bool = True) -> None:
        """Add entries, or with ``keep=False`` replace all. Raises one of NOT_WRITTEN."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked(timeout):
            try:
                active = self._active()
            except CorruptFile as error:
                self._move_aside(error)
                active = self._active()
            path = active or (self._fallback_path if self.path.exists() else self.path)
            merged = {**(self._entries if active and keep else {}), **new}
            self._stamp = None
            self._replace(path, format_file(self._header, merged))
            self._entries = merged

    def _locked(self, timeout: float) -> contextlib.AbstractContextManager[Any]:
        lock = filelock.FileLock(self.path.with_suffix(".lock"))
        return lock.acquire(timeout=timeout, poll_interval=0.01)

    def _active(self) -> Path | None:
        """The file that holds our entries, loaded; None when there is none yet."""
        for path in (self.path, self._fallback_path):
            stamp = _stamp(path)
            if stamp is None or stamp == self._foreign:
                continue
            if stamp != self._stamp:
                try:
                    header, self._entries = parse_file(_read(path))
                except OtherSchema as other:
                    self._foreign = _stable_stamp(stamp)
                    if other.newer:
                        self._tell_newer(path, other)
                    continue
                except CorruptFile as error:
                    error.path = path
                    raise
                except FileNotFoundError:  # moved aside by another process just now
                    continue
                header.pop("schema")
                self._header = {**self._header, **header}
                self._stamp = _stable_stamp(stamp)
            return path
        return None

    def _tell_newer(self, path: Path, other: OtherSchema) -> None:
        warn_once(
            ("schema", str(path)),
            f"{path} was written by a newer version ({other}): it is left alone, configs of this "
            f"version are kept in {self._fallback_path.name} beside it",
            stacklevel=7,
        )

    def _set_corrupt_aside(self) -> None:
        """Under the lock, because the file may be someone's fresh replacement by now."""
        try:
            with self._locked(1.0):
                try:
                    self._active()
                except CorruptFile as error:
                    self._move_aside(error)
        except NOT_WRITTEN as error:
            reason = f"{self.path} is corrupt and cannot be moved aside: {error}"
            warn_once(("corrupt", str(self.path)), reason, stacklevel=6)

    def _move_aside(self, error: CorruptFile) -> None:
        path = error.path
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns() // 1_000_000}")
        os.replace(path, aside)
        self._entries, self._stamp = {}, None
        warn_once(
            ("corrupt", str(path)), f"{path} is corrupt ({error}): moved to {aside}", stacklevel=7
        )

    def _replace(self, path: Path, text: str) -> None:
        for leftover in leftover_temporaries(path):  # under the lock nobody else writes
            with contextlib.suppress(OSError):
                leftover.unlink()
        replace_text(path, text)


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise CorruptFile(f"not UTF-8: {error}") from error
    except TooLarge as error:
        raise CorruptFile(str(error.strerror)) from error


def _stamp(path: Path) -> Stamp | None:
    """Identity of a file's content as far as the file system tells; None without the file."""
    try:
        s = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # so there can be none
            return None
        raise
    return Stamp(path, s.st_mtime_ns, s.st_size, s.st_ino)


def _stable_stamp(stamp: Stamp) -> Stamp | None:
    """``stamp``, unless the file is so new that a change within the same clock tick is possible."""
    return stamp if abs(time.time_ns() - stamp.mtime_ns) > 100_000_000 else None
