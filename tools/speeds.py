"""Speeds of flash attention over its peers on an H200, as the documents say them: of the record.

What is in the record of ``bench flash_attention`` and in no other place: the sentence of the
README, the table of docs/measured.md, and the rates of the page on Hopper's kernel. A peer that is
not in the record is not named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import generated
from ejkernel.modules.bench.record import PEER_NAMES

RECORD = generated.ROOT / "tools/bench/results/nvidia-h200/flash_attention.json"
NOT_REPEATED = "FlashAttention-3's backward adds dq in no fixed order; ours repeats its bits."
MODES = ("fwd", "fwd+bwd")
CASE = re.compile(r"(sweep|short)-d(\d+)-s(\d+)-(full|causal|b\d+)")

Rows = dict[tuple[str, str], dict[str, Any]]
TableRow = tuple[str, dict[str, str]]
"""A label such as "64, 4k", and the names of cases by "full" and "causal"."""


def _read() -> tuple[dict[str, Any], Rows, list[str]]:
    """Returns the record, our rows by case and mode, and the peers that are in them."""
    record = json.loads(RECORD.read_text())
    ours = [r for r in record["rows"] if r["contender"] == "ejkernel" and r["ms"] is not None]
    peers = [name for name in PEER_NAMES if any(name in r["speed_over"] for r in ours)]
    return record, {(r["case"], r["mode"]): r for r in ours}, peers


def _table_rows(rows: Rows) -> list[TableRow]:
    """Returns the rows of a table by head dim and length, batches of short sequences last."""
    cases: dict[tuple[Any, ...], dict[str, str]] = {}
    for case, _ in rows:
        match = CASE.fullmatch(case)
        if match:
            kind, head_dim, length, mask = match.groups()
            sequences = mask[1:] if kind == "short" else ""
            key = (kind == "short", int(head_dim), int(length), sequences)
            cases.setdefault(key, {})["causal" if sequences else mask] = case
    return [
        (f"{d}, {_tokens(s)}{f', {n} sequences' if n else ''}", cases[short, d, s, n])
        for short, d, s, n in sorted(cases)
    ]


def _tokens(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _table(heads: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (tuple(heads), *map(tuple, body))]
    return "\n".join([rows[0], "|---" * rows[0].count(" | ") + "|---|", *rows[1:]])


def _where(record: dict[str, Any]) -> str:
    (product,) = record["limits"]["flops"].values()
    copy = record["limits"]["bytes_per_s"]
    return f"matrix product {product / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s in that run"


def comparison() -> str:
    """Returns the speed over every peer, by head dim and length, mask and mode."""
    record, rows, peers = _read()
    columns = [(mask, peer) for peer in peers for mask in ("full", "causal")]

    def cell(cases: dict[str, str], mask: str, peer: str) -> str:
        speeds = [rows.get((cases.get(mask, ""), m), {}).get("speed_over", {}) for m in MODES]
        texts = [f"{s[peer]:.2f}" if peer in s else "-" for s in speeds]
        return " / ".join(texts) if set(texts) != {"-"} else ""

    heads = ["head dim, length", *(f"{mask}, over {PEER_NAMES[peer]}" for mask, peer in columns)]
    body = [[label, *(cell(c, *column) for column in columns)] for label, c in _table_rows(rows)]
    device = record["device"].removeprefix("NVIDIA ")
    text = [
        f"One {device}, bfloat16, 16k tokens, {record['date']}, forward / forward + backward, as",
        f"speed over peers timed alternately, cuDNN through `jax.nn` ({_where(record)}):",
        "",
        _table(heads, body),
    ]
    return "\n".join([*text, "", NOT_REPEATED] if "fa3" in peers else text)


def rates() -> str:
    """Returns rates in TFLOP/s and speeds over the peers, by head dim and length."""
    record, rows, peers = _read()
    columns = [(mode, mask) for mode in MODES for mask in ("full", "causal")]

    def cell(cases: dict[str, str], mode: str, mask: str) -> str:
        row = rows.get((cases.get(mask, ""), mode))
        if row is None:
            return ""
        over = [f"{row['speed_over'][p]:.2f}x" if p in row["speed_over"] else "-" for p in peers]
        return f"{row['tflops']:.0f} ({', '.join(over)})"

    names = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    heads = ["d, length", *(f"{names[mode]}, {mask}" for mode, mask in columns)]
    body = [
        [f"d = {label}", *(cell(c, *column) for column in columns)]
        for label, c in _table_rows(rows)
    ]
    over = " and over ".join(PEER_NAMES[peer] for peer in peers)
    intro = f"TFLOP/s, in brackets the speed over {over}, {record['date']}\n({_where(record)}):"
    return f"{intro}\n\n{_table(heads, body)}"


def sentence() -> str:
    """Returns the ranges of the speeds over each peer; up to 1k tokens are by themselves."""
    _, rows, peers = _read()
    matches = {key: CASE.fullmatch(key[0]) for key in rows}
    lengths = {key: int(match[3]) for key, match in matches.items() if match}

    def range_text(peer: str, mode: str, is_short: bool) -> str | None:
        keys = [k for k in lengths if k[1] == mode and (lengths[k] <= 1024) == is_short]
        speeds = [rows[k]["speed_over"][peer] for k in keys if peer in rows[k]["speed_over"]]
        return f"{min(speeds):.2f} to {max(speeds):.2f}" if speeds else None

    phrases = []
    for peer in peers:
        name = "cuDNN through `jax.nn`" if peer == "cudnn" else PEER_NAMES[peer]
        forward, both = (range_text(peer, mode, is_short=False) or "-" for mode in MODES)
        phrases.append(f"{forward} times as fast as {name} ({both} with gradients)")
        forward, both = (range_text(peer, mode, is_short=True) for mode in MODES)
        if forward and both:
            phrases[-1] += f", with 1k tokens and fewer {forward} ({both})"
    return ", and ".join(phrases)
