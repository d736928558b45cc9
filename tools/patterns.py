"""The pictures of docs/operations/blocksparse_attention.md, as SVG.

python tools/patterns.py --write      writes them; without it says which are out of date

Tiles are what ``visited_tiles`` says of them; times come from tools/bench/results, and there is no
picture of times that nobody recorded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import generated
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types.masks.pattern import visited_tiles

FOLDER = generated.ROOT / "docs" / "operations" / "pictures"
RESULTS = generated.ROOT / "tools" / "bench" / "results"
RECORD = RESULTS / "nvidia-h200" / "blocksparse_attention-density.json"

BLOCKS, CELL, GAP, TITLE = 12, 9, 34, 18
WHOLE, PART, NOBODY, INK, DIM = "#2563eb", "#93b4f5", "#eef1f5", "#1b2330", "#667085"


def patterns() -> dict[str, tuple[np.ndarray, bool, int]]:
    """Title -> pattern bool [blocks, blocks], whether causal, blocks along the side of a tile."""
    n, rng = BLOCKS, np.random.default_rng(4)
    column, row, window = (np.zeros((n, n), bool) for _ in range(3))
    column[:, 3] = True
    row[8] = True
    distance = np.arange(n)[:, None] - np.arange(n)
    window[(distance >= 0) & (distance < 3)] = True
    heads = rng.random((2, n, n)) < 0.25
    return {
        "none": (np.zeros((n, n), bool), False, 1),
        "all, causal": (np.ones((n, n), bool), True, 1),
        "diagonal": (np.eye(n, dtype=bool), False, 1),
        "one column": (column, False, 1),
        "one row": (row, False, 1),
        "window, first keys": (window | (np.arange(n) == 0), True, 1),
        "random, head 1": (heads[0], True, 1),
        "random, head 2": (heads[1], True, 1),
        "head 2, larger tiles": (heads[1], True, 2),
    }


def _tiles(pattern: np.ndarray, causal: bool, cover: int) -> tuple[np.ndarray, np.ndarray]:
    block = 16
    length, tile = BLOCKS * block, block * cover
    mask = combine_masks(causal=True, q_len=length, kv_len=length) if causal else MaskInfo()
    some, every = visited_tiles(
        mask, pattern[None, None], (block, block), length, length, tile, tile
    )
    return some[0, 0], every[0, 0]


def _text(x: float, y: float, words: str, size: float, colour: str = INK, more: str = "") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-family="sans-serif" font-size="{size:g}" '
        f'fill="{colour}"{more}>{words}</text>'
    )


def _document(width: float, height: float, parts: list[str]) -> str:
    sizes = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {sizes}>'
    ground = f'<rect width="{width:g}" height="{height:g}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def grids() -> str:
    """Which tiles of each pattern are visited, and which need an element mask."""
    found, across, side = patterns(), 3, BLOCKS * CELL
    parts = []
    for n, (title, given) in enumerate(found.items()):
        x0 = 10 + n % across * (side + GAP)
        y0 = 10 + n // across * (side + TITLE + 14) + TITLE
        some, every = _tiles(*given)
        cell = CELL * given[2]
        parts.append(_text(x0, y0 - 6, f"{title}: {some.mean():.0%}", 10))
        for i, j in np.ndindex(some.shape):
            colour = NOBODY if not some[i, j] else WHOLE if every[i, j] else PART
            parts.append(
                f'<rect x="{x0 + j * cell}" y="{y0 + i * cell}" width="{cell - 1}" '
                f'height="{cell - 1}" fill="{colour}"/>'
            )
    rows = -(-len(found) // across)
    bottom = 10 + rows * (side + TITLE + 14) + 6
    x = 10
    words = (
        (WHOLE, "visited, no element mask"),
        (PART, "visited, element mask"),
        (NOBODY, "skipped"),
    )
    for colour, said in words:
        parts.append(f'<rect x="{x}" y="{bottom - 8}" width="8" height="8" fill="{colour}"/>')
        parts.append(_text(x + 13, bottom, said, 9.5, DIM))
        x += 30 + 5.4 * len(said)
    said = "queries downwards, keys to the right; percent of tiles visited"
    parts.append(_text(10, bottom + 16, said, 9.5, DIM))
    return _document(30 + across * (side + GAP) - GAP, bottom + 26, parts)


def recorded() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(platform, mode) -> (share of blocks seen, time over dense), by rising share."""
    record = json.loads(RECORD.read_text())
    dense = {(r["platform"], r["mode"]): r["ms"] for r in record["dense"]}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for r in sorted(record["rows"], key=lambda r: r["seen"]):
        which = r["platform"], r["mode"]
        found.setdefault(which, []).append((r["seen"], r["ms"] / dense[which]))
    return found


def times() -> str:
    """Time over that of dense attention on the same platform, by how many blocks are seen."""
    left, top, width, height, high = 46, 48, 340, 230, 1.15
    platforms = {"triton": ("Triton", WHOLE), "pallas": ("Hopper", "#d97706")}
    modes = {"fwd": ("forward", ""), "fwd+bwd": ("forward + backward", ' stroke-dasharray="5 3"')}

    def at(seen: float, ratio: float) -> tuple[float, float]:
        return left + seen * width, top + height * (1 - ratio / high)

    record = json.loads(RECORD.read_text())
    parts = [_text(10, 16, f"time over dense causal attention, {record['device']}", 10.5)]
    parts.append(_text(10, 30, "16k tokens, 16 heads of 128, random blocks of 128", 9, DIM))
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at(tick, tick)
        parts.append(f'<path d="M{left} {y:g}H{left + width}" stroke="#e4e7ec"/>')
        parts.append(_text(left - 6, y + 3, f"{tick:g}", 9, DIM, ' text-anchor="end"'))
        parts.append(_text(x, top + height + 14, f"{tick:.0%}", 9, DIM, ' text-anchor="middle"'))
    (x0, y0), (x1, y1) = at(0, 0), at(1, 1)
    parts.append(f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="{DIM}" stroke-dasharray="1 3"/>')
    below = "blocks seen, of those that causality leaves; dotted: in proportion"
    parts.append(_text(left, top + height + 30, below, 9.5, DIM))
    for n, ((platform, mode), points) in enumerate(sorted(recorded().items(), reverse=True)):
        (name, colour), (said, dashes) = platforms[platform], modes[mode]
        places = [at(*point) for point in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        line = f'fill="none" stroke="{colour}" stroke-width="1.6"{dashes}'
        y = top + 10 + 14 * n
        parts += [f'<path d="M{path}" {line}/>', f'<path d="M{left + 8} {y - 3}h22" {line}/>']
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts.append(_text(left + 36, y, f"{name}, {said}", 10, colour))
    return _document(left + width + 24, top + height + 42, parts)


def pictures() -> dict[Path, str]:
    """SVG by file."""
    found = {FOLDER / "sparse_patterns.svg": grids()}
    if RECORD.exists():
        found[FOLDER / "sparse_times.svg"] = times()
    return found


if __name__ == "__main__":
    raise SystemExit(generated.main(pictures(), __doc__, None))
