"""The tuned table of one device, spread over the kernel packages: each ships its own platform's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.store import Entry, read_table
from tuned.building import TableBuilder, table_name, write_table

KERNELS = Path(__file__).resolve().parents[2] / "packages"
FOLDERS = {
    "triton": "ejk-kernels-triton/src/ejkernel/kernels/triton/tables",
    "pallas": "ejk-kernels-pallas/src/ejkernel/kernels/pallas/tables",
    "cuda": "ejk-kernels-xla/src/ejkernel/kernels/xla/cudnn/tables",
    "xla": "ejk-kernels-xla/src/ejkernel/kernels/xla/tables",
}


def shipped_names(root: Path = KERNELS) -> list[str]:
    """File names of all tables that packages ship, one a device."""
    return sorted({p.name for f in FOLDERS.values() for p in (root / f).glob("*.json")})


def shipped(name: str, root: Path = KERNELS) -> tuple[Mapping[str, Any], dict[str, Entry]]:
    """Header and entries of one device, of all packages together.

    Raises:
        ValueError, OSError: one of the files is no table, or cannot be read.
    """
    header: Mapping[str, Any] = {}
    entries: dict[str, Entry] = {}
    for folder in FOLDERS.values():
        path = root / folder / name
        if path.exists():
            header, part = read_table(path)
            entries |= part
    return header, entries


class ShippedTable(TableBuilder):
    """A TableBuilder over the packages of a checkout."""

    def __init__(self, device: str, root: Path = KERNELS):
        self.root = root
        super().__init__(root / "*/tables" / table_name(device), device)

    def read(self) -> tuple[Mapping[str, Any], dict[str, Entry]]:
        return shipped(self.path.name, self.root)

    def write(self) -> None:
        """Replace every package's file; one without entries is not made."""
        for platform, folder in FOLDERS.items():
            own = {k: e for k, e in self.entries.items() if _platform(e) == platform}
            path = self.root / folder / self.path.name
            if own or path.exists():
                write_table(path, self.device, own)


def _platform(entry: Entry) -> Any:
    return entry.plain["config"].get("platform")
