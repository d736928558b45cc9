"""Explanation: which implementation and config a call gets, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, repr=False)
class Explanation:
    """Answer of ``Executor.explain``; prints as a table.

    Attributes:
        kernel: name of the kernel.
        key: cache key of the call.
        tier: "override", "overlay", "memory", "persistent", "autotune" (it would be tuned now),
            "heuristics" or "error".
        cfg: the config; None for kernels without tunables, and before tuning.
        platform: platform of the chosen implementation, None when none can do the call.
        implementation: its name.
        skipped: ``(implementation, reason)`` of all others.
        tiers: ``(tier, answer)`` of the tiers that were asked.
        device: fingerprint of the target device.
        unused: fields of a given config that the chosen implementation does not read.
        error: what the call would raise, None when it would run.
        notes: what the implementation says about the call.
    """

    kernel: str
    key: str
    tier: str
    cfg: Any
    platform: str | None
    implementation: str | None
    skipped: tuple[tuple[str, str], ...] = ()
    tiers: tuple[tuple[str, str], ...] = ()
    device: str = ""
    unused: tuple[str, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [
            ("kernel", self.kernel),
            ("device", self.device),
            ("implementation", self.implementation or "none"),
            ("config", _compact(self.cfg)),
            ("tier", self.tier),
            ("key", self.key),
        ]
        if self.unused:
            rows.append(("no effect", f"{', '.join(self.unused)}: not read here"))
        rows += [("note", note) for note in self.notes]
        if self.error:
            rows.append(("error", self.error))
        text = _table(rows)
        text += "\n\ntiers asked\n" + _table([(f"  {t}", answer) for t, answer in self.tiers])
        if self.skipped:
            text += "\n\nnot chosen\n" + _table([(f"  {n}", why) for n, why in self.skipped])
        return text

    __repr__ = __str__


def given_fields(cfg: Any, prefix: str = "") -> list[str]:
    """The fields of a config that are neither None nor their default.

    Fields of nested configs are named with a dot.
    """
    if not is_dataclass(cfg) or isinstance(cfg, type):
        return []
    names: list[str] = []
    for f in fields(cfg):
        value = getattr(cfg, f.name)
        if is_dataclass(value):
            names += given_fields(value, f"{prefix}{f.name}.")
        elif value is not None and value != f.default:
            names.append(prefix + f.name)
    return names


def _compact(cfg: Any) -> str:
    """A config without the fields that are None."""
    if not is_dataclass(cfg) or isinstance(cfg, type):
        return repr(cfg)
    values = [(f.name, getattr(cfg, f.name)) for f in fields(cfg)]
    inside = ", ".join(f"{name}={_compact(value)}" for name, value in values if value is not None)
    return f"{type(cfg).__name__}({inside})"


def _table(rows: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
