"""Tables of tuned configs, each file complete after every call.

The table of one device is spread over the kernel packages: each ships the entries of its platform.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ejkernel.ops.config.store import Entry, encode_config, format_file, read_table
from ejkernel.ops.config.versions import today, versions, versions_text
from ejkernel.ops.core.keys import payload_key
from ejkernel.ops.utils.files import replace_text

if TYPE_CHECKING:
    from ejkernel.ops.core.invocation import Invocation
    from ejkernel.ops.execution.trials import AutotuneResult, Trial


KERNELS = Path(__file__).resolve().parents[2] / "packages"
FOLDERS = {
    "triton": "ejk-kernels-triton/src/ejkernel/kernels/triton/tables",
    "pallas": "ejk-kernels-pallas/src/ejkernel/kernels/pallas/tables",
    "cuda": "ejk-kernels-xla/src/ejkernel/kernels/xla/cudnn/tables",
    "xla": "ejk-kernels-xla/src/ejkernel/kernels/xla/tables",
}


class TableBuilder:
    """A table file that grows by one tuned call at a time.

    The winner of a call serves calls under platform auto, and calls that force its platform. For
    every other platform that was timed the best of its own is kept too, for calls that force it.

    Args:
        path: the table; entries it has already are kept until they are replaced.
        device: fingerprint of the device; goes into the header.

    Raises:
        ValueError: ``path`` holds something else, or a table of another device.
    """

    def __init__(self, path: str | os.PathLike[str], device: str):
        self.path = Path(path)
        self.device = device
        header, self.entries = self.read()
        owner = header.get("device", device)
        if owner != device:
            raise ValueError(f"{path} is a table for {owner!r}, the device here is {device!r}")

    def read(self) -> tuple[Mapping[str, Any], dict[str, Entry]]:
        """Returns header and entries of the table so far."""
        return read_table(self.path) if self.path.exists() else ({}, {})

    def is_tuned(self, key: str) -> bool:
        """Returns whether the table has a call, tuned with the versions installed now."""
        entry = self.entries.get(key)
        return entry is not None and (entry.measured or {}).get("versions") == versions_text()

    def add(self, inv: Invocation, result: AutotuneResult, case: str) -> None:
        """Adds the outcome of tuning one call, with its trials, and writes the file.

        Later calls are compared with the payload of ``inv``; ``case`` is its name.
        """
        payload = dict(inv.payload)
        made = {"date": today(), "versions": versions_text()}
        self._put(payload, result.best, {"case": case, **result.measured()})
        kernel = inv.kernel
        winner = kernel.config_platform(result.best)
        if winner is not None:  # of an earlier run that another platform won
            self.entries.pop(payload_key({**payload, "platform": winner.value}), None)
        for platform, trial in _best_by_platform(kernel, result).items():
            if platform is not winner:
                measured = {"case": case, "ms": trial.ms, "spread": trial.spread, **made}
                self._put({**payload, "platform": platform.value}, trial.cfg, measured)
        self.write()

    def _put(self, payload: Mapping[str, Any], cfg: Any, measured: Mapping[str, Any]) -> None:
        self.entries[payload_key(payload)] = Entry(encode_config(cfg), payload, measured)

    def write(self) -> None:
        write_table(self.path, self.device, self.entries)


def write_table(path: Path, device: str, entries: Mapping[str, Entry]) -> None:
    """Replaces a table; a killed run leaves the old one or the new one."""
    header = {"device": device, "provenance": {"date": today(), "versions": versions()}}
    ordered = dict(sorted(entries.items(), key=_order))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, format_file(header, ordered))


def _order(item: tuple[str, Entry]) -> tuple[str, str, str]:
    key, entry = item
    return key.partition("@")[0], str((entry.measured or {}).get("case")), key


def _best_by_platform(kernel: Any, result: AutotuneResult) -> dict[Any, Trial]:
    best: dict[Any, Trial] = {}
    for trial in result.trials:
        platform = kernel.config_platform(trial.cfg)
        if trial.ms is None or platform is None:
            continue
        before = best.get(platform)
        if before is None or before.ms is None or trial.ms < before.ms:
            best[platform] = trial
    return best


def table_name(device: str) -> str:
    """Returns the file name of a device's table: "nvidia_h200.json" for "gpu:nvidia-h200:9.0"."""
    parts = device.split(":")
    return (parts[1] if len(parts) > 1 else device).replace("-", "_") + ".json"


def shipped_names(root: Path = KERNELS) -> list[str]:
    """Returns the file names of all tables that packages ship, one a device."""
    return sorted({p.name for f in FOLDERS.values() for p in (root / f).glob("*.json")})


def read_shipped(name: str, root: Path = KERNELS) -> tuple[Mapping[str, Any], dict[str, Entry]]:
    """Returns header and entries of one device, of all packages together.

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
    """A table spread over the packages of a checkout."""

    def __init__(self, device: str, root: Path = KERNELS):
        self.root = root
        super().__init__(root / "*/tables" / table_name(device), device)

    def read(self) -> tuple[Mapping[str, Any], dict[str, Entry]]:
        return read_shipped(self.path.name, self.root)

    def write(self) -> None:
        """Replaces every package's file; one without entries is not made."""
        for platform, folder in FOLDERS.items():
            path = self.root / folder / self.path.name
            entries = {k: e for k, e in self.entries.items() if _platform(e) == platform}
            if entries or path.exists():
                write_table(path, self.device, entries)


def _platform(entry: Entry) -> Any:
    return entry.plain["config"].get("platform")
