"""JSON and Markdown of one run."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ejkernel.modules.bench.record import rates_text

HEAD = """\
| case | mode | what | ms | +- | TFLOP/s | GB/s | % of limit | speed over | temp MB |
|---|---|---|---|---|---|---|---|---|---|"""
ON_DEVICE = "\nTimes marked * are the device's own after a rest: of kernels, without launches."


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def markdown(result: Mapping[str, Any]) -> str:
    """Returns the table of a record of ``ejk bench``."""
    rates = rates_text(result["limits"])
    text = [f"Device {result['device']}, {result['date']}; {rates}", "", HEAD]
    for r in result["rows"]:
        cells = [r["case"], r["mode"], r["contender"]]
        if r["ms"] is None:
            cells += [f"not run: {r['note']}", *[""] * 6]
        else:
            cells += [
                _number(r["ms"], 4) + "*" * (r["clock"] == "device"), _number(r["spread_ms"], 2),
                _number(r["tflops"], 4), _number(r["gbps"], 4), _number(r["percent_of_limit"]),
                ", ".join(f"{k} {v:.2f}x" for k, v in r["speed_over"].items()),
                _number(r["temp_mb"], 4),
            ]  # fmt: skip
        text.append(f"| {' | '.join(cells)} |")
    if any(r["clock"] == "device" for r in result["rows"]):
        text.append(ON_DEVICE)
    return "\n".join(text) + "\n"


def write_json(out: pathlib.Path, name: str, content: Mapping[str, Any]) -> pathlib.Path:
    """Writes ``content`` to ``out/name.json`` and returns the path."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
