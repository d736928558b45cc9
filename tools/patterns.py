"""Draws the pictures of docs/operations/blocksparse_attention.md as SVG: python tools/patterns.py

Tiles come from ``visited_tiles``, times from tools/bench/results; without a record no times are
drawn.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import checkout
from ejkernel.types import MaskInfo, combine_masks
from ejkernel.types.masks.pattern import visited_tiles

FOLDER = checkout.ROOT / "docs/operations/pictures"
RECORD = checkout.ROOT / "tools/bench/results/nvidia-h200/blocksparse_attention-density.json"
BLOCKS = 12
COLOURS = {
    "skipped": "#eef1f5",
    "visited, element mask": "#93b4f5",
    "visited, no element mask": "#2563eb",
}


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


def visits(pattern: np.ndarray, causal: bool, cover: int) -> np.ndarray:
    """Returns for each tile whether it is skipped (0), needs an element mask (1), or none (2)."""
    block = 16
    length, tile = len(pattern) * block, block * cover
    mask = combine_masks(causal=True, q_len=length, kv_len=length) if causal else MaskInfo()
    visited, unmasked = visited_tiles(
        mask, pattern[None, None], (block, block), length, length, tile, tile
    )
    return visited[0, 0].astype(int) + unmasked[0, 0]


def draw_patterns() -> Figure:
    """Draws which tiles of each pattern are visited, and which need an element mask."""
    figure = Figure(figsize=(6, 7), layout="constrained")
    colours = list(COLOURS.values())
    for axis, (title, pattern) in zip(figure.subplots(3, 3).flat, patterns().items(), strict=True):
        tiles = visits(*pattern)
        axis.pcolormesh(
            tiles, cmap=ListedColormap(colours), vmin=0, vmax=2, edgecolors="w", lw=0.5,
            rasterized=True,
        )  # fmt: skip
        axis.set_title(f"{title}: {(tiles > 0).mean():.0%}", fontsize=9)
        axis.set(aspect="equal", xticks=(), yticks=(), frame_on=False)
        axis.invert_yaxis()
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    title = "queries downwards, keys to the right; percent of tiles visited"
    figure.legend(handles=handles, loc="outside lower center", ncols=3, title=title, fontsize=9)
    return figure


def times_by_density() -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Returns (share of blocks seen, time over dense) by platform and mode, by rising share."""
    record = json.loads(RECORD.read_text())
    dense = {(r["platform"], r["mode"]): r["ms"] for r in record["dense"]}
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for r in sorted(record["rows"], key=lambda r: r["seen"]):
        group = r["platform"], r["mode"]
        points.setdefault(group, []).append((r["seen"], r["ms"] / dense[group]))
    return points


def draw_times() -> Figure:
    """Draws times over that of dense attention on the same platform."""
    platforms = {"triton": ("Triton", "C0"), "pallas": ("Hopper", "C1")}
    modes = {"fwd": ("forward", "-"), "fwd+bwd": ("forward + backward", "--")}
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    for (platform, mode), points in sorted(times_by_density().items(), reverse=True):
        (name, colour), (passes, line) = platforms[platform], modes[mode]
        axis.plot(*zip(*points, strict=True), line, color=colour, marker="o", markersize=4,
                  label=f"{name}, {passes}")  # fmt: skip
    axis.plot((0, 1), (0, 1), ":", color="gray", label="in proportion")
    axis.set(xlabel="blocks seen, as a share of those that causality leaves", ylim=(0, None))
    device = json.loads(RECORD.read_text())["device"]
    sizes = "16k tokens, 16 heads of 128, blocks of 128"
    axis.set_title(f"time over dense causal attention, {device}\n{sizes}", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
    return figure


def write_pictures(folder: Path = FOLDER) -> list[Path]:
    """Draws all pictures and returns their files."""
    figures = {"sparse_patterns": draw_patterns()}
    if RECORD.exists():
        figures["sparse_times"] = draw_times()
    paths = [folder / f"{name}.svg" for name in figures]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ejkernel"}):
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, dpi=200, metadata={"Date": None})
    return paths


if __name__ == "__main__":
    print(*write_pictures(), sep="\n")
