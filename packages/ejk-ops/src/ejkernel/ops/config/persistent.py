"""Configs on disk: they survive the process, and many processes may write at once.

Layout: ``<path>/<device>/<kernel>.json`` for keys made by the key builder, ``<path>/misc.json``
for others, or one file when ``path`` ends in ``.json``. ``config/store.py`` has the file format.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ejkernel.ops import env
from ejkernel.ops.config.store import (
    NOT_WRITTEN,
    ConfigFile,
    Entry,
    decode_config,
    encode_config,
    is_about_one_file,
    key_file,
    remember_class,
    warn_memory_only,
)
from ejkernel.ops.errors import warn_once
from ejkernel.ops.utils.copying import Copyable
from ejkernel.ops.utils.serialization import stable_json

_ABSENT = object()


class PersistentCache(Copyable, process_local={"_files": dict}):
    """Configs by key, in JSON files. Same interface as ConfigCache. Thread and process safe.

    Nothing is created before the first ``put``. A file that cannot be written (read-only folder,
    full disk, a lock that is not released in time, no home directory) makes the cache keep further
    configs in memory only, with one warning. A corrupt file is moved to ``*.corrupt-<time>`` with
    one warning, as is one of more than 64 MiB. A file of another schema is left alone: ours is
    written next to it. A folder, pipe or device in place of a file is not opened. Configs of a
    kernel whose name is too long for a file name stay in memory, with one warning.

    Args:
        path: a directory, or one ``*.json`` file; ``~`` is expanded. None = ``configs`` in
            ``$EJKERNEL_CACHE_DIR`` (default ``~/.cache/ejkernel``), looked up at every use.
        lock_timeout: seconds to wait for another process that is writing the same file.

    Raises:
        OSError: ``path`` begins with ``~`` and there is no home directory.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, lock_timeout: float = 10.0
    ) -> None:
        self._path = None if path is None else env.expand_home(path)
        self._lock_timeout = lock_timeout
        self._lock = threading.RLock()
        self._files: dict[Path, ConfigFile] = {}
        self._memory: dict[str, Any] = {}  # configs that could not be written
        self._writable = True
        self._version = 0

    @classmethod
    def from_results(
        cls, results: Iterable[Any], path: str | os.PathLike[str] | None = None
    ) -> PersistentCache:
        """The cache at ``path``, with the winners of results added (``AutotuneResult``)."""
        cache = cls(path)
        for result in results:
            if result.best is not None:
                cache.put(result.key, result.best)
        return cache

    @property
    def path(self) -> Path:
        """The directory or file in use. Raises OSError when there is no home directory for it."""
        return env.cache_dir() / "configs" if self._path is None else self._path

    def _root(self) -> Path | None:
        """``path``; None, with one warning, when there is none."""
        try:
            return self.path
        except env.NoHome as error:
            told = f"configs are kept in memory only: {error}"
            warn_once(("persistent", "home"), told, stacklevel=5)
            return None

    @property
    def version(self) -> int:
        """Counts the changes made through this object."""
        return self._version

    def put(self, key: Hashable, cfg: Any, *, metadata: Any = None, measured: Any = None) -> None:
        """Store ``cfg`` under ``key``, on disk if possible.

        Args:
            key: a string, or anything with a JSON form.
            cfg: a dataclass instance, or plain JSON values.
            metadata: JSON values stored with the config, e.g. the shapes it was tuned for. They let
                entries be copied into a shipped table.
            measured: JSON values that say how good it was, when and with which versions.
        """
        text = _key_text(key)
        remember_class(type(cfg))
        with self._lock:
            self._memory.pop(text, None)
            self._version += 1
            try:
                plain = encode_config(cfg)
                restored = decode_config(plain, type(cfg))
            except (TypeError, ValueError, OverflowError) as error:
                self._keep(text, cfg, f"{type(cfg).__qualname__} cannot be written: {error}")
                return
            if restored != cfg:
                reason = f"{type(cfg).__qualname__} would read back as {restored!r}"
                self._keep(text, cfg, reason)
                return
            file = self._file(text) if self._writable else None
            if file is None:
                self._memory[text] = cfg
                return
            try:
                file.update({text: Entry(plain, metadata, measured)}, self._lock_timeout)
            except NOT_WRITTEN as error:
                self._writable = is_about_one_file(error)
                if self._writable:
                    self._keep(text, cfg, f"{file.path} cannot be written: {error}")
                else:
                    self._memory[text] = cfg
                    warn_memory_only(self.path, f"{self.path} cannot be written: {error}")

    def _keep(self, text: str, cfg: Any, reason: str) -> None:
        self._memory[text] = cfg
        warn_once(
            ("persistent", str(self.path), reason.partition(":")[0]),
            f"configs are kept in memory only: {reason}",
            stacklevel=5,
        )

    def get(self, key: Hashable, default: Any = None, *, cls: type | None = None) -> Any:
        """The config under ``key``, else ``default``.

        The config has the class it was put with, looked up among the modules imported so far and
        the classes this process has put. ``cls`` forces a class. An entry whose class is unknown,
        or that the class rejects, counts as absent.
        """
        text = _key_text(key)
        with self._lock:
            if text in self._memory:
                return self._memory[text]
            entry = self._entry(text)
        if entry is None:
            return default
        config = entry.config(cls, _ABSENT)
        return default if config is _ABSENT else config

    def metadata(self, key: Hashable) -> Any:
        """The ``metadata`` put with ``key``, None when there are none."""
        entry = self._entry(key)
        return None if entry is None else entry.metadata

    def measured(self, key: Hashable) -> Any:
        """Returns the ``measured`` values that ``key`` was put with, None when there are none."""
        entry = self._entry(key)
        return None if entry is None else entry.measured

    def _entry(self, key: Hashable) -> Entry | None:
        text = _key_text(key)
        with self._lock:
            file = self._file(text)
            return None if file is None else file.entries().get(text)

    def __contains__(self, key: Hashable) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def keys(self) -> list[str]:
        """All keys on disk and in memory. Keys that were put as other objects appear as JSON."""
        with self._lock:
            keys: dict[str, None] = {}
            for file in self._existing():
                keys.update(dict.fromkeys(file.entries()))
            keys.update(dict.fromkeys(self._memory))
            return list(keys)

    def __len__(self) -> int:
        return len(self.keys())

    def clear(self) -> None:
        """Remove all entries. Files of other schemas stay."""
        with self._lock:
            self._memory.clear()
            self._version += 1
            for file in self._existing():
                try:
                    file.update({}, self._lock_timeout, keep=False)
                except NOT_WRITTEN as error:
                    reason = f"{self.path} cannot be cleared: {error}"
                    warn_once(("persistent", str(self.path), "clear"), reason)

    def _file(self, text: str) -> ConfigFile | None:
        root = self._root()
        if root is None:
            return None
        if root.suffix == ".json":
            return self._opened(root, "", "")
        return self._opened(*key_file(root, text))

    def _opened(self, path: Path, device: str, kernel: str) -> ConfigFile:
        file = self._files.get(path)
        if file is None:
            header = {"device": device, "kernel": kernel, "folder": self._root()}
            file = self._files[path] = ConfigFile(path, **header)
        return file

    def _existing(self) -> Iterator[ConfigFile]:
        root = self._root()
        if root is None:
            return
        if root.suffix == ".json":
            yield self._opened(root, "", "")
            return
        paths = {ConfigFile.plain_path(p) for p in root.glob("*.json")}
        paths |= {ConfigFile.plain_path(p) for p in root.glob("*/*.json")}
        for path in sorted(paths):
            yield self._opened(path, "", "")

    def __repr__(self) -> str:
        root = self._root()
        return f"PersistentCache({'in memory' if root is None else repr(str(root))})"


def _key_text(key: Hashable) -> str:
    return key if isinstance(key, str) else stable_json(key)
