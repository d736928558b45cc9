"""The answer to "can this call be done?"."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """Whether a call can be done; truthy iff ``ok``.

    Attributes:
        ok: yes or no.
        reason: why not, empty when ok.
        argument: the argument that stands in the way, None when no single one does.
        nearest: the platform that can do the call, None when unknown.
    """

    ok: bool
    reason: str = ""
    argument: str | None = None
    nearest: str | None = None

    def __bool__(self) -> bool:
        return self.ok
