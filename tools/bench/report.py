"""JSON and Markdown of one run."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import asdict

from ejkernel.modules.bench.limits import Limits
from ejkernel.modules.bench.record import environment, rates_text
from ejkernel.modules.bench.runner import Row


def _number(value, digits=3) -> str:
    return "" if value is None else f"{value:.{digits}g}"


def markdown(rows: Sequence[Row], limits: Limits, env: dict) -> str:
    text = [
        f"Device {env['device']}, {env['date']}; {rates_text(asdict(limits))}",
        "",
        "| case | mode | what | ms | +- | TFLOP/s | GB/s | % of limit | speed over | temp MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    on_device = any(r.clock == "device" for r in rows)
    for r in rows:
        if r.ms is None:
            cell = f"not run: {r.note}"
            text.append(f"| {r.case} | {r.mode} | {r.contender} | {cell} | | | | | | |")
            continue
        over = ", ".join(f"{k} {v:.2f}x" for k, v in r.speed_over.items())
        cells = [
            r.case, r.mode, r.contender, _number(r.ms, 4) + "*" * (r.clock == "device"),
            _number(r.spread_ms, 2),
            _number(r.tflops, 4), _number(r.gbps, 4), _number(r.percent_of_limit), over,
            _number(r.temp_mb, 4),
        ]  # fmt: skip
        text.append("| " + " | ".join(cells) + " |")
    if on_device:
        text += [
            "",
            "Times marked * are the device's own after a rest: of kernels, without launches.",
        ]
    return "\n".join(text) + "\n"


def keep(out: pathlib.Path, name: str, content: dict) -> pathlib.Path:
    """Write ``content`` to ``out/name.json``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def write(
    rows: Sequence[Row], limits: Limits, op: str, out: pathlib.Path
) -> tuple[pathlib.Path, pathlib.Path]:
    env = environment()
    measured = {"limits": asdict(limits), "rows": [asdict(r) for r in rows]}
    data = {"kind": "bench", "op": op, **env, **measured}
    as_json, as_markdown = keep(out, op, data), out / f"{op}.md"
    as_markdown.write_text(markdown(rows, limits, env))
    return as_json, as_markdown
