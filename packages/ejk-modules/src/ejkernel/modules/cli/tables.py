"""Writing tuned configurations to one file, with where they come from, and reading one in."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ejkernel.modules.bench import record
from ejkernel.modules.bench.record_checks import is_number
from ejkernel.modules.cli import stored
from ejkernel.modules.cli.output import write_file


def provenance(chosen: list[stored.StoredConfig]) -> dict[str, Any]:
    """Device, date, versions, and the largest spread of the timings."""
    spreads = [c.measured["spread"] for c in chosen if is_number(c.measured.get("spread"))]
    return {
        "devices": sorted({c.device for c in chosen}),
        "date": datetime.date.today().isoformat(),
        "versions": record.versions(),
        "largest_spread": max(spreads, default=None),
        "made_by": "ejk",
    }


def write_table(
    path: Path,
    *,
    keys: Iterable[str] | None = None,
    kernel: str | None = None,
    device: str | None = None,
) -> int:
    """Writes the cached configurations that fit to one file of the cache's schema.

    Returns:
        The number written. Without any the file is left as it is.
    """
    from ejkernel.ops.config.store import format_file

    chosen = stored.configs(stored.scan(), kernel=kernel, device=device)
    if keys is not None:
        requested = set(keys)
        chosen = [c for c in chosen if c.key in requested]
    if not chosen:
        return 0
    chosen.sort(key=lambda c: (c.device, c.kernel, stored.shapes_text(c.entry.metadata), c.key))
    header: dict[str, Any] = {"provenance": provenance(chosen)}
    kernels, devices = {c.kernel for c in chosen}, {c.device for c in chosen}
    if len(kernels) == 1:
        header = {"kernel": kernels.pop(), **header}
    if len(devices) == 1:
        header = {"device": devices.pop(), **header}
    write_file(path, format_file(header, {c.key: c.entry for c in chosen}))
    return len(chosen)


def import_table(path: Path, *, replace: bool) -> dict[str, list[str]]:
    """Puts the configurations of a file into the cache.

    Returns:
        Keys by their outcome: "added", "replaced", "kept" (the cache had one already),
        "unknown" (of a class that this process has not declared), "illegal" (no config of this
        version).

    Raises:
        OSError: the cache cannot be written; what came before in the file is kept.
    """
    from ejkernel.modules._table import operation_class
    from ejkernel.ops import KernelNotFound, PersistentCache

    cache = PersistentCache()
    outcome: dict[str, list[str]] = {}
    for config in stored.configs([stored.read(path)]):
        try:
            cls = operation_class(config.kernel).config_cls
        except KernelNotFound:  # a kernel of the user's own: its class names the config
            cls = None
            if not _declared(config.entry.plain.get("class")):
                outcome.setdefault("unknown", []).append(config.key)
                continue
        value = config.entry.config(cls)
        if value is None:
            outcome.setdefault("illegal", []).append(config.key)
            continue
        present = config.key in cache
        if present and not replace:
            outcome.setdefault("kept", []).append(config.key)
            continue
        entry = config.entry
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="configs are kept in memory only")
            try:
                cache.put(config.key, value, metadata=entry.metadata, measured=entry.measured)
            except Warning as warning:
                raise OSError(str(warning).partition(": ")[2]) from None
        outcome.setdefault("replaced" if present else "added", []).append(config.key)
    return outcome


def _declared(name: Any) -> bool:
    """Returns whether configs of this class can be read; None stands for plain JSON values."""
    from ejkernel.ops.utils.allowed import UnknownClass, allowed_class

    try:
        return name is None or bool(allowed_class(name, object))
    except UnknownClass:
        return False
