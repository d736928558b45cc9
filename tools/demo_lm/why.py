"""Which kernel ran a call, and why no other one, in two lines."""

from __future__ import annotations

from typing import Any


def which(e: Any) -> str:
    """The implementation, and the configuration with where it comes from."""
    config = e.cfg.to_dict() if hasattr(e.cfg, "to_dict") else {}
    inner = {n: v for n, v in config.items() if v is not None and n not in ("platform", "backend")}
    return f"{e.implementation}, {_compact(inner) or 'no tiles'} from {e.tier}"


def why(e: Any) -> str:
    """Every other implementation beside the reason against it, the same reasons together."""
    reasons: dict[str, list[str]] = {}
    for name, reason in e.skipped:
        reasons.setdefault(reason, []).append(name.split("/", 1)[1])
    if not reasons:
        return f"the only implementation, and {e.device} can run it"
    return "; ".join(f"not {', '.join(names)}: {reason}" for reason, names in reasons.items())


def _compact(fields: dict[str, Any]) -> str:
    said = []
    for name, value in fields.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{n}={v}" for n, v in value.items() if v is not None)
            said.append(f"{name}({inner})")
        else:
            said.append(f"{name}={value}")
    return " ".join(said)
