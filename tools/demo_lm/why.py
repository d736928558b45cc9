"""The kernel that ran a call, and why no other one did, in two lines."""

from __future__ import annotations

from typing import Any

from ejkernel.modules.bench.record import config_fields, config_text


def choice_text(e: Any) -> str:
    """The implementation, and the configuration with where it comes from."""
    fields = config_fields(e.cfg) or {}
    tiles = {name: v for name, v in fields.items() if name not in ("platform", "backend")}
    return f"{e.implementation}, {config_text(tiles) or 'no tiles'} from {e.tier}"


def why(e: Any) -> str:
    """Returns every other implementation with the reason against it, equal reasons together."""
    reasons: dict[str, list[str]] = {}
    for name, reason in e.skipped:
        reasons.setdefault(reason, []).append(name.split("/", 1)[1])
    if not reasons:
        return f"the only implementation, and {e.device} can run it"
    return "; ".join(f"not {', '.join(names)}: {reason}" for reason, names in reasons.items())
