"""The files of tuned configurations: their content and status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejkernel.modules.bench.record import config_text
from ejkernel.ops.config.store import KEY, CorruptFile, Entry, OtherSchema, read_table


@dataclass(frozen=True)
class StoredFile:
    """One file of the cache.

    ``status``: "ok", "foreign" (another schema), "corrupt" or "unreadable".
    """

    path: Path
    status: str
    entries: Mapping[str, Entry] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class StoredConfig:
    """One configuration with the parts of its key."""

    key: str
    kernel: str
    device: str
    entry: Entry
    path: Path

    @property
    def digits(self) -> str:
        return self.key.rpartition("#")[2]

    @property
    def measured(self) -> Mapping[str, Any]:
        """Measurements, as far as the file has them."""
        return self.entry.measured if isinstance(self.entry.measured, dict) else {}

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Kernel, device, arrays and config, as tables show them."""
        config = config_text(self.entry.plain["config"])
        return self.kernel, self.device, shapes_text(self.entry.metadata), config


def root() -> Path:
    """Returns the folder of the default executor's files."""
    from ejkernel.ops import PersistentCache

    return PersistentCache().path


def read(path: Path) -> StoredFile:
    """A file with its status. Raises OSError when it cannot be read."""
    try:
        _, entries = read_table(path)
    except OtherSchema as error:
        newer = f"{error}: written by another version of ejkernel, left alone"
        return StoredFile(path, "foreign", problem=newer)
    except (CorruptFile, UnicodeDecodeError) as error:
        return StoredFile(path, "corrupt", problem=f"corrupt: {error}")
    return StoredFile(path, "ok", entries)


def scan(folder: Path | None = None) -> list[StoredFile]:
    """All files of the cache, in order of their paths."""
    folder = root() if folder is None else folder
    files = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*/*.json")]):
        try:
            files.append(read(path))
        except OSError as error:
            problem = f"unreadable: {error.strerror or error}"
            files.append(StoredFile(path, "unreadable", problem=problem))
    return files


def configs(
    files: Iterable[StoredFile], *, kernel: str | None = None, device: str | None = None
) -> list[StoredConfig]:
    """Returns the configurations of readable files whose key has ``kernel`` and ``device``."""
    configs = []
    for file in files:
        for key, entry in file.entries.items():
            match = KEY.fullmatch(key)
            name = match["kernel"] if match else ""
            where = match["device"] if match else ""
            if kernel is not None and kernel != name:
                continue
            if device is not None and device.lower() not in where.lower():
                continue
            configs.append(StoredConfig(key, name, where, entry, file.path))
    return configs


def shapes_text(metadata: Any) -> str:
    """Returns the arrays that a configuration was tuned for, from the metadata stored with it."""
    words: list[str] = []

    def collect(name: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            if isinstance(value, list):
                for item in value:
                    collect(name, item)
            return
        if isinstance(value.get("shape"), list) and "dtype" in value:
            words.append(f"{name} {value['dtype']}[{','.join(map(str, value['shape']))}]".strip())
            return
        for key, item in value.items():
            collect(str(key), item)

    collect("", metadata)
    return " ".join(words[:4]) + (" ..." if len(words) > 4 else "")
