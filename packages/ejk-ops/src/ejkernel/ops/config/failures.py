"""Candidates that failed: remembered with the reason, so that no process compiles them again.

A failure holds for one call, one config and the versions in use. It is kept in the folder of
the persistent cache (``failures/<device>/<kernel>.json``), in the same file format.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ejkernel.ops.config.store import (
    NOT_WRITTEN,
    ConfigFile,
    Entry,
    encode_config,
    is_about_one_file,
    key_file,
)
from ejkernel.ops.config.versions import versions
from ejkernel.ops.utils.copying import Copyable
from ejkernel.ops.utils.serialization import short_hash

if TYPE_CHECKING:
    from ejkernel.ops.config.persistent import PersistentCache


class FailureCache(Copyable, process_local={"_files": dict}):
    """Reasons by call and config, in memory and, with a persistent cache, in its folder.

    Thread safe. A file that cannot be read or written costs a second try, nothing else.

    Args:
        configs: the cache whose folder holds the files; None = memory only.
    """

    def __init__(self, configs: PersistentCache | None = None):
        self._configs = configs
        self._memory: dict[str, str] = {}
        self._files: dict[Path, ConfigFile] = {}
        self._lock = threading.Lock()

    def reason(self, key: str, cfg: Any) -> str | None:
        """Returns why ``cfg`` failed for ``key`` with these versions, None when not known."""
        name = _name(key, cfg)
        if name is None:
            return None
        with self._lock:
            if name in self._memory:
                return self._memory[name]
            file = self._file(key)
            entry = None if file is None else file.entries().get(name)
        metadata = None if entry is None else entry.metadata
        reason = metadata.get("reason") if isinstance(metadata, dict) else None
        return reason if isinstance(reason, str) else None

    def remember(self, key: str, cfg: Any, reason: str) -> None:
        """Keep that ``cfg`` failed for ``key``."""
        name = _name(key, cfg)
        if name is None:
            return
        with self._lock:
            self._memory[name] = reason
            file = self._file(key)
            if file is None:
                return
            metadata = {"reason": reason, "versions": versions()}
            try:
                file.update({name: Entry(encode_config(cfg), metadata)}, 1.0)
            except NOT_WRITTEN as error:
                if not is_about_one_file(error):
                    self._configs = None

    def clear(self) -> None:
        """Forget everything, also on disk."""
        with self._lock:
            self._memory.clear()
            root = self._root()
            for path in () if root is None else sorted(root.glob("*/*.json")):
                try:
                    path.unlink()
                except OSError:
                    continue
            self._files.clear()

    def _root(self) -> Path | None:
        if self._configs is None:
            return None
        try:
            path = self._configs.path
        except OSError:
            return None
        return path.with_suffix(".failures") if path.suffix == ".json" else path / "failures"

    def _file(self, key: str) -> ConfigFile | None:
        root = self._root()
        if root is None:
            return None
        path, device, _ = key_file(root, key)
        if path not in self._files:
            folder = None if self._configs is None else self._configs.path
            self._files[path] = ConfigFile(path, device=device, folder=folder)
        return self._files[path]


def _name(key: str, cfg: Any) -> str | None:
    """The entry's name; None for configs without JSON form, which are not remembered."""
    try:
        return f"{key}!{short_hash([encode_config(cfg), versions()])}"
    except (TypeError, ValueError):
        return None
